"""Wheels → image, with ``docker buildx build``; docker-py has no BuildKit."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.engine import Engine
from sparkforge.errors import CommandError, ImageError
from sparkforge.log import log
from sparkforge.run import call
from sparkforge.store import code_digest

RECIPE = (
    "Dockerfile", "scripts/entrypoint.py", "scripts/healthcheck.py", "sparkforge/__init__.py",
    *(f"sparkforge/serving/{name}.py" for name in (
        "__init__", "access", "backends", "memory", "pagecache", "profile", "progress",
        "supervise", "vocabulary",
    )),
)  # fmt: skip
"""What of the checkout goes into the image."""


@dataclass(frozen=True)
class Request:
    """An image to be built.

    Attributes:
        root: the checkout.
        base: reference of the base image, with its digest or of a local image.
        python: version whose wheels are installed, e.g. ``3.11``.
        epoch: date of all files, seconds since 1970.
        system_packages: distribution packages installed into the image.
        profile: how the model is served; the entrypoint makes arguments of it.
        serve: default arguments of ``vllm serve``.
        ca_bundle: certificates for a proxy that signs its own; mounted as a secret, never copied.
        release: version of the result; the image's tag.
        lock: hash-locked requirements that the wheelhouse satisfies.
    """

    root: Path
    target: str
    base: str
    python: str
    platform: str
    epoch: int
    system_packages: tuple[str, ...]
    serve: tuple[str, ...]
    profile: Mapping[str, Any]
    ca_bundle: Path | None
    release: str
    lock: Path

    @property
    def tag(self) -> str:
        return f"sparkforge/{self.target}:{self.release}"


def recipe_digest(root: Path) -> str:
    """Return one digest of the Dockerfile and the scripts that it copies.

    Raises:
        ImageError: one of them is missing.
    """
    try:
        return code_digest(*(root / name for name in RECIPE))
    except FileNotFoundError as error:
        raise ImageError(f"{error.filename}: no such file", "restore it: git checkout") from None


def _output(engine: Engine, tag: str) -> list[str]:
    """Say where the image goes: into the engine, the fastest way that it knows."""
    if not engine.containerd_store:
        return ["--load", "--tag", tag]
    # gzip would take 147 s for the 3.4 GB of the cpu target, zstd takes 69 s (measured, 2 cores)
    how = f"type=image,name={tag},compression=zstd,compression-level=1,unpack=true"
    return ["--output", how]


def bake(
    engine: Engine, request: Request, wheels: Sequence[Path], wheelhouse: Path,
    labels: Mapping[str, str], folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Build the image and load it into the engine; returns its id, tag and size.

    Raises:
        ImageError: the build failed.
    """
    ours = folder / "wheels"
    ours.mkdir()
    for wheel in wheels:
        (ours / wheel.name).hardlink_to(wheel)
    (ours / "requirements.txt").write_bytes(request.lock.read_bytes())
    if request.profile:
        (ours / "share").mkdir()
        text = json.dumps(request.profile, indent=2, sort_keys=True) + "\n"
        (ours / "share" / "profile.json").write_text(text)
    metadata = folder / "build.json"
    arguments = {
        "BASE": request.base,
        "PYTHON_VERSION": request.python,
        "SOURCE_DATE_EPOCH": str(request.epoch),
        "RELEASE": request.release,
        "SYSTEM_PACKAGES": " ".join(request.system_packages),
        "SERVE_ARGS": shlex.join(request.serve),
    }
    command: list[str | Path] = [
        "docker", "buildx", "build", "--progress=plain", "--provenance=false",
        *_output(engine, request.tag),
        "--file", request.root / "Dockerfile", "--target", "serve",
        "--platform", request.platform, "--metadata-file", metadata,
        "--build-context", f"wheels={ours}", "--build-context", f"wheelhouse={wheelhouse}",
    ]  # fmt: skip
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    for name, value in sorted(labels.items()):
        command += ["--label", f"{name}={value}"]
    if request.ca_bundle is not None:
        command += ["--secret", f"id=ca,src={request.ca_bundle}"]
    try:
        call(*command, request.root, stream=True)
    except CommandError as error:
        msg = f"docker buildx build failed:\n{error}"
        raise ImageError(msg, "the engine's words are above") from error
    built = json.loads(metadata.read_text())
    image = engine.client.images.get(request.tag)
    log.info(f"image {request.tag} ({image.id})")
    return {
        "kind": "image",
        "tag": request.tag,
        "image_id": image.id,
        "digest": built.get("containerimage.digest"),
        "base": request.base,
    }
