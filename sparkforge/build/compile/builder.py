"""The builder: an image with compilers and build requirements, for ``--wheels compile``.

Its base is the target's own (the CUDA devel image of pins.yaml, or ``--base``).
"""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.build.context import Context
from sparkforge.build.results import BuilderResult
from sparkforge.core.log import log
from sparkforge.runtime import buildx
from sparkforge.runtime.engine import BaseImage, Engine

PYTHON = "/opt/sparkforge/venv/bin/python"
_KEY_LABEL = "org.sparkforge.builder"
_USER = 10001
"""User of the Dockerfile's builder; where sparkforge runs as root, a compile does not."""


def packages(python: str) -> tuple[str, ...]:
    """Return the distribution packages that a compile needs; CMake and ninja are locked wheels."""
    # patch: vLLM's CMake patches one header of torch with it. libnuma-dev: its CPU kernels
    return (
        "ccache",
        "g++",
        "gcc",
        "git",
        "libc6-dev",
        "libnuma-dev",
        "patch",
        f"python{python}-dev",
    )


def user() -> tuple[int, int]:
    """Return the user and group that compiles: the caller, or the builder's own instead of root."""
    uid, gid = os.getuid(), os.getgid()
    return (uid, gid) if uid else (_USER, _USER)


def tag(target: str, key: str) -> str:
    """Return the name of the image of a key."""
    return f"sparkforge/builder-{target}:{key[:12]}"


def build(
    engine: Engine, context: Context, base: BaseImage, key: str, wheelhouse: Path, folder: Path
) -> BuilderResult:
    """Build the image in the engine; returns its id, name, and the packages in it.

    Args:
        key: of the item; a label of the image.
        wheelhouse: folder of the wheels of the target's lock for builders.

    Raises:
        ImageError: the build failed.
    """
    ours = folder / "wheels"
    ours.mkdir()
    lock = context.root / context.target.builder[context.platform]
    (ours / "requirements.txt").write_bytes(lock.read_bytes())
    name, python = tag(context.target_name, key), context.target.python
    buildx.build(
        buildx.ImageBuild(
            context.root / "Dockerfile",
            context.root,
            engine.context,
            engine.kept_as(name),
            stage="builder",
            platform=context.platform,
            arguments={
                "BASE": base.reference,
                "PYTHON_VERSION": python,
                "SOURCE_DATE_EPOCH": str(context.epoch),
                "SYSTEM_PACKAGES": " ".join(packages(python)),
            },
            labels={_KEY_LABEL: key},
            contexts={"wheels": ours, "wheelhouse": wheelhouse},
            ca_bundle=context.ca_bundle,
        )
    )
    return _result(engine, name)


def standing(engine: Engine, name: str, key: str) -> BuilderResult | None:
    """Return the result of ``build`` if the engine has the image of this key, else None."""
    from docker.errors import ImageNotFound

    try:
        labels = engine.client.images.get(name).labels
    except ImageNotFound:
        return None
    return _result(engine, name) if labels.get(_KEY_LABEL) == key else None


def _result(engine: Engine, name: str) -> BuilderResult:
    from sparkforge.build import sbom  # not needed by a build in which nothing changed

    image_id = str(engine.client.images.get(name).id)
    log.info(f"builder {name} ({image_id})")
    return BuilderResult(image_id, name, tuple(sbom.system(engine, image_id)))
