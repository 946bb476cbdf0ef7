"""Requirements of a target that doctor checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkforge.build.context import profile_of
from sparkforge.pins.pins import Pins
from sparkforge.pins.types import Platform
from sparkforge.serving.memory import MemoryPlan
from sparkforge.serving.profile import Profile

# Bytes of a model's files, for the disk of its download; other models are not checked.
MODEL_BYTES: Mapping[str, int] = {"gpt-oss-120b": 65_200_000_000, "gpt-oss-20b": 13_800_000_000}
"""Of OpenAI's safetensors files; docs/kernels.md computes the same from the shapes."""


@dataclass(frozen=True)
class Wanted:
    """Requirements of a target."""

    target: str
    platforms: tuple[Platform, ...]
    python: str
    cuda_arch: str | None = None
    """Compute capability, as ``12.1``; None: no GPU is needed."""
    cuda: tuple[int, int] | None = None
    """Oldest CUDA that the driver must support, as ``(13, 0)``; None without a GPU."""
    compiles: bool = False
    """Its build compiles FlashInfer's modules."""
    needs_engine: bool = False
    """It is served from an image, not from a virtual environment."""
    profile: Profile = field(default_factory=Profile)
    """The image's profile, with the default choice."""
    memory: MemoryPlan | None = None
    model: tuple[str, str, str] | None = None
    """Name in pins.yaml, repository and revision; None: the build makes a checkpoint."""
    moe_backend: str = "auto"
    """The profile's ``--moe-backend``, or "auto"."""
    store_bytes: int = 5 << 30
    """Size of the store after the first build."""

    @property
    def gpu(self) -> bool:
        return self.cuda_arch is not None


def wanted(pins: Pins, name: str) -> Wanted:
    """Return the requirements of a target of pins.yaml; UsageError if there is no such target."""
    target = pins.target(name)
    profile = profile_of(pins, name)
    # uv's name for a build of PyTorch: cu130 is CUDA 13.0
    backend = re.fullmatch(r"cu(\d+)(\d)", target.torch_backend or "")
    pin = pins.models[target.model] if target.model else None
    gpu = target.cuda_arch is not None
    return Wanted(
        target=name,
        platforms=target.platforms,
        python=target.python,
        cuda_arch=target.cuda_arch,
        cuda=(int(backend[1]), int(backend[2])) if backend else None,
        compiles=bool(target.pack),
        needs_engine=target.base is not None,
        profile=profile,
        memory=profile.memory,
        moe_backend=profile.moe_backend or "auto",
        model=(str(target.model), pin.repository, pin.revision) if pin else None,
        # cpu: measured. With CUDA: an estimate; PyTorch's packages are several GB, twice
        # (downloaded and unpacked)
        store_bytes=(30 if gpu else 5) << 30,
    )
