"""Libraries → a wheel with the package that FlashInfer looks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge.pins.types import Platform
from sparkforge.wheels import archive

DISTRIBUTION = "flashinfer-jit-cache"
PACKAGE = "flashinfer_jit_cache"
_SHIM = Path(__file__).with_name("shim.py")
_TAGS = {"linux/amd64": "py3-none-linux_x86_64", "linux/arm64": "py3-none-linux_aarch64"}


@dataclass(frozen=True)
class Entry:
    """One module of a pack.

    Attributes:
        size: bytes of its library.
        units: number of sources that it was compiled from.
        needs: option of ``vllm serve`` that leads to it; "": none.
    """

    name: str
    sha256: str
    size: int
    units: int
    needs: str


@dataclass(frozen=True)
class Pack:
    """The contents of a pack.

    Attributes:
        version: FlashInfer's, and ours after a plus, as FlashInfer wants it.
        architecture: as FlashInfer names it, e.g. ``sm121f``.
        commit: of FlashInfer's patched source.
    """

    version: str
    architecture: str
    platform: Platform
    commit: str
    compiler: str
    host: str
    modules: tuple[Entry, ...]


def write(pack: Pack, libraries: Mapping[str, Path], epoch: int, folder: Path) -> Path:
    """Write the wheel into a folder; the same inputs give the same bytes.

    Args:
        libraries: by the module's name.
        epoch: date of its members, seconds since 1970.
    """
    manifest = {"schema": 1, "distribution": DISTRIBUTION, **asdict(pack)}
    members: dict[str, bytes] = {
        f"{PACKAGE}/__init__.py": _SHIM.read_bytes(),
        f"{PACKAGE}/manifest.json": f"{json.dumps(manifest, indent=1)}\n".encode(),
    }
    for entry in pack.modules:
        path = libraries[entry.name]
        members[f"{PACKAGE}/modules/{entry.name}/{path.name}"] = path.read_bytes()
    metadata = (
        "Summary: FlashInfer's modules for gpt-oss on SM 12.x, compiled by sparkforge",
        "License-Expression: Apache-2.0",
    )
    wheel = archive.Fresh(DISTRIBUTION, pack.version, _TAGS[pack.platform], metadata, members, {})
    return archive.write_fresh(wheel, epoch, folder)
