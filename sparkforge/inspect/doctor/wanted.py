"""What a target asks of a machine, as far as doctor judges it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkforge.pins.pins import Pins
from sparkforge.pins.types import Platform

# Bytes of a model's files, for the disk that it is fetched to; of others nothing is judged.
MODEL_BYTES: Mapping[str, int] = {"gpt-oss-120b": 65_200_000_000, "gpt-oss-20b": 13_800_000_000}
"""Of safetensors, as OpenAI published them; docs/roofline.md computes the same from the shapes."""


@dataclass(frozen=True)
class Wanted:
    """A target's wishes.

    Attributes:
        cuda_arch: compute capability, as ``12.1``; None: no GPU is needed.
        cuda: oldest CUDA that the driver must run, as ``(13, 0)``; None without a GPU.
        needs_engine: it is served from an image; without an engine there is a plain environment.
        memory: the profile's plan for unified memory, or {}.
        model: name among the pins, repository and revision; None: a checkpoint is made on the spot.
        moe_backend: the profile's ``--moe-backend``, or "auto".
        store_bytes: room that a first build takes in the store.
    """

    target: str
    platforms: tuple[Platform, ...]
    python: str
    cuda_arch: str | None = None
    cuda: tuple[int, int] | None = None
    needs_engine: bool = False
    memory: Mapping[str, Any] = field(default_factory=dict)
    model: tuple[str, str, str] | None = None
    moe_backend: str = "auto"
    store_bytes: int = 5 << 30

    @property
    def gpu(self) -> bool:
        return self.cuda_arch is not None


def wanted(pins: Pins, name: str) -> Wanted:
    """Return what a target of pins.yaml asks for.

    Raises:
        UsageError: there is no such target.
    """
    target = pins.target(name)
    # uv's words for a build of PyTorch: cu130 is CUDA 13.0
    backend = re.fullmatch(r"cu(\d+)(\d)", target.torch_backend or "")
    pin = pins.models[target.model] if target.model else None
    gpu = target.cuda_arch is not None
    return Wanted(
        target=name,
        platforms=target.platforms,
        python=target.python,
        cuda_arch=target.cuda_arch,
        cuda=(int(backend[1]), int(backend[2])) if backend else None,
        needs_engine=target.base is not None,
        memory=pins.profile_of(target).get("memory") or {},
        moe_backend=pins.profile_of(target).get("moe_backend") or "auto",
        model=(str(target.model), pin.repository, pin.revision) if pin else None,
        # cpu: measured. With CUDA: PyTorch's own packages are several GB, twice (fetched and
        # unpacked); an estimate that nobody has measured
        store_bytes=(30 if gpu else 5) << 30,
    )
