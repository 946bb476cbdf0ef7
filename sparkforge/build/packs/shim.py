"""Modules of FlashInfer that were compiled ahead of time, by sparkforge.

FlashInfer imports this package where it is installed, and loads from it the modules that it would
otherwise compile. It uses a module only on a device that ``cuda_architectures`` serves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_MANIFEST = json.loads((_HERE / "manifest.json").read_text(encoding="utf-8"))

__version__: str = _MANIFEST["version"]


@dataclass(frozen=True)
class Provider:
    """A source of modules, with the fields that FlashInfer reads."""

    provider_id: str
    distribution: str
    version: str
    jit_cache_dir: str
    cuda_architectures: tuple[str, ...]
    modules: tuple[str, ...]


def get_jit_cache_providers() -> tuple[Provider, ...]:
    """Return this package as the only source of modules."""
    return (
        Provider(
            provider_id="sparkforge",
            distribution=_MANIFEST["distribution"],
            version=__version__,
            jit_cache_dir=str(_HERE / "modules"),
            cuda_architectures=(_MANIFEST["architecture"],),
            modules=tuple(module["name"] for module in _MANIFEST["modules"]),
        ),
    )
