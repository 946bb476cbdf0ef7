"""The builder: an image with compilers and build requirements, for ``--wheels compile``.

Its base is the target's own (the CUDA devel image of pins.yaml, or ``--base``).
"""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.cached import Cached
from sparkforge.build.context import WHEELS, Context, Tools
from sparkforge.build.results import BuilderResult
from sparkforge.build.stages.thirdparty import wheelhouse_item
from sparkforge.core.disk import code_digest, key_of
from sparkforge.core.errors import BuildError, MachineError
from sparkforge.core.log import log
from sparkforge.runtime.engine import OLDEST_ENGINE, BaseImage, Engine, build_image
from sparkforge.store.store import code_of

PYTHON = "/opt/sparkforge/venv/bin/python"


def packages(python: str) -> tuple[str, ...]:
    """Return the distribution packages that a compile needs; CMake and ninja are locked wheels."""
    # patch: vLLM's CMake patches one header of torch with it. libnuma-dev: its CPU kernels
    tools = ("ccache", "g++", "gcc", "git", "libc6-dev", "libnuma-dev", "patch")
    return (*tools, f"python{python}-dev")


def builder_item(context: Context, tools: Tools) -> Cached[BuilderResult]:
    """Return the builder image; it needs a wheelhouse that it is installed from.

    Raises:
        BuildError: the target names no requirements for a builder.
        MachineError: the target has no base image, and none is named.
    """
    base = tools.base
    if base is None:
        msg = f"target {context.target_name} has no base image in pins.yaml, and wheels are"
        raise MachineError(f"{msg} compiled in one", "give one: --base IMAGE (with Python and apt)")
    lock = context.target.builder.get(context.platform)
    if lock is None:
        msg = f"targets.{context.target_name}: has no builder for {context.platform}"
        raise BuildError(msg, "add a lock of its upstreams' build requirements (builder:)")
    house = wheelhouse_item(context, context.root / lock, "builder's wheelhouse", "builder")
    inputs = {
        "base": base.digest,
        "wheelhouse": house.key,
        "python": context.target.python,
        "platform": context.platform,
        "packages": list(packages(context.target.python)),
        "epoch": context.epoch,
        "recipe": code_digest(context.root / "Dockerfile"),
        "code": code_of(__name__),
    }

    def make(folder: Path) -> BuilderResult:
        engine = engine_of(tools)
        name = f"sparkforge/builder-{context.target_name}:{key_of(inputs)[:12]}"
        _build(engine, context, tools, base, name, house.path / WHEELS, folder)
        from sparkforge.build import sbom  # not needed by a build in which nothing changed

        image_id = engine.image_id(name)
        log.info(f"builder {name} ({image_id})")
        return BuilderResult(image_id, name, tuple(sbom.system(engine, image_id)))

    return Cached(
        "builder",
        "builder",
        inputs,
        BuilderResult,
        make,
        needs=(house,),
        valid=lambda artefact: (
            tools.engine is None or tools.engine.has_image(artefact.result.image_id)
        ),
        # an engine may lose the image of which all wheels are made
        intermediate=True,
    )


def engine_of(tools: Tools) -> Engine:
    """Return the engine that compiles; MachineError if none is used here."""
    if tools.engine is None:
        msg = "compiling wheels needs a container engine"
        remedy = (
            f"start Docker Engine {OLDEST_ENGINE} or newer (DOCKER_HOST), or use --wheels overlay"
        )
        raise MachineError(msg, remedy)
    return tools.engine


def _build(
    engine: Engine,
    context: Context,
    tools: Tools,
    base: BaseImage,
    name: str,
    wheelhouse: Path,
    folder: Path,
) -> None:
    ours = folder / "wheels"
    ours.mkdir()
    lock = context.root / context.target.builder[context.platform]
    (ours / "requirements.txt").write_bytes(lock.read_bytes())
    build_image(
        context.root / "Dockerfile",
        context.root,
        engine.context,
        engine.kept_as(name),
        stage="builder",
        platform=context.platform,
        arguments={
            "BASE": base.reference,
            "PYTHON_VERSION": context.target.python,
            "SOURCE_DATE_EPOCH": str(context.epoch),
            "SYSTEM_PACKAGES": " ".join(packages(context.target.python)),
        },
        contexts={"wheels": ours, "wheelhouse": wheelhouse},
        ca_bundle=tools.ca_bundle,
    )
