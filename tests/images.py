"""OCI archives written by hand, as small as can be."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from sparkforge.build.image import VENV
from tests.support import sha256

Member = bytes | tarfile.TarInfo
_TYPES = {"zstd": "tar+zstd", "gzip": "tar+gzip", "plain": "tar"}


def layer(members: Mapping[str, Member] | Sequence[tuple[str, Member]]) -> bytes:
    """Return a tar of regular files (bytes) and ready-made members (a link, another mode)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def environment(venv: str = VENV, python: str = "3.11") -> dict[str, Member]:
    """Return what the recipe leaves of `uv venv`; tests/integration/test_recipe.py compares."""
    links = {"bin/python": f"/usr/bin/python{python}", f"bin/python{python}": "python"}
    links |= {"bin/python3": "python", "lib64": "lib"}
    settings = b"home = /usr/bin\ninclude-system-site-packages = false\n"
    made = {f"{venv}/{name}": link(to, tarfile.SYMTYPE) for name, to in links.items()}
    return {**made, f"{venv}/pyvenv.cfg": settings}


def link(target: str, kind: bytes = tarfile.LNKTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def packed(data: bytes, how: str) -> bytes:
    if how == "zstd":
        return zstandard.ZstdCompressor(level=1).compress(data)
    return gzip.compress(data, mtime=0) if how == "gzip" else data


def make_image(
    path: Path,
    layers: Iterable[bytes],
    labels: Mapping[str, str] | None = None,
    *,
    how: str = "zstd",
    platform: str = "linux/amd64",
    more: Iterable[Any] = (),
    **config: Any,
) -> Path:
    """Write an image; ``more``: further entries of its index, with their documents."""
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> dict[str, Any]:
        digest = sha256(data)
        blobs[digest] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    system, _, machine = platform.partition("/")
    plain = list(layers)
    settings = {
        "architecture": machine,
        "os": system,
        "config": {"Labels": dict(labels or {})},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(one)}" for one in plain]},
        **config,
    }
    media = f"application/vnd.oci.image.layer.v1.{_TYPES[how]}"
    manifest = {
        "schemaVersion": 2,
        "config": put(json.dumps(settings).encode()),
        "layers": [{**put(packed(one, how)), "mediaType": media} for one in plain],
    }
    entries = [put(json.dumps(manifest).encode()), *more]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
        for name, data in [
            ("index.json", index),
            *((f"blobs/sha256/{k}", v) for k, v in blobs.items()),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path
