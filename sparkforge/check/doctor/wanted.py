"""Requirements of a target that doctor checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sparkforge.build.context import profile_of
from sparkforge.pins.pins import Pins
from sparkforge.pins.types import Platform
from sparkforge.serving.profile import Profile

_GB = 10**9
# of OpenAI's safetensors files; docs/kernels.md computes the same from the shapes
_MODEL_GB: Mapping[str, float] = {"gpt-oss-120b": 65.2, "gpt-oss-20b": 13.8}


@dataclass(frozen=True)
class Wanted:
    """Requirements of a target; sizes in bytes."""

    target: str
    platforms: tuple[Platform, ...]
    cuda_arch: str | None
    """Compute capability, as ``12.1``; None: no GPU is needed."""
    cuda: tuple[int, int]
    """Oldest CUDA that the driver must support."""
    compiles: bool
    """Its build compiles FlashInfer's modules."""
    image: bool
    """It is served from an image, not from a virtual environment."""
    profile: Profile
    repository: str
    """Of the model on the hub; "": the build makes a checkpoint."""
    revision: str
    store_bytes: int
    """Of the store after a first build: measured for cpu, an estimate with CUDA."""
    image_bytes: int
    """Of image and build cache in the engine's folder; an estimate."""
    model_bytes: int


def wanted(pins: Pins, name: str) -> Wanted:
    """Return the requirements of a target of pins.yaml; UsageError if there is no such target."""
    target = pins.target(name)
    # uv's name for a build of PyTorch: cu130 is CUDA 13.0
    backend = re.fullmatch(r"cu(\d+)(\d)", target.torch_backend or "")
    pin = pins.models[target.model] if target.model else None
    return Wanted(
        target=name,
        platforms=target.platforms,
        cuda_arch=target.cuda_arch,
        cuda=(int(backend[1]), int(backend[2])) if backend else (0, 0),
        compiles=bool(target.pack),
        image=target.base is not None,
        profile=profile_of(pins, name),
        repository=pin.repository if pin else "",
        revision=pin.revision if pin else "",
        store_bytes=(30 if target.cuda_arch else 5) * _GB,
        image_bytes=35 * _GB if target.base is not None else 0,
        model_bytes=int(_MODEL_GB.get(str(target.model), 0) * _GB),
    )
