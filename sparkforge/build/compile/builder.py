"""The builder: an image with compilers and build requirements, for ``--wheels compile``.

Its base is the target's own (the CUDA devel image of pins.yaml, or ``--base``).
"""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results
from sparkforge.build.results import BuilderResult
from sparkforge.build.stages.wheelhouse import wheelhouse_item
from sparkforge.core.errors import BuildError, MachineError
from sparkforge.core.hashing import code_digest, key_of
from sparkforge.core.log import log
from sparkforge.runtime.engine import OLDEST_ENGINE, BaseImage, Engine, build_image
from sparkforge.store.codekey import code_of

PYTHON = "/opt/sparkforge/venv/bin/python"
_KEY_LABEL = "org.sparkforge.builder"


def packages(python: str) -> tuple[str, ...]:
    """Return the distribution packages that a compile needs; CMake and ninja are locked wheels."""
    # patch: vLLM's CMake patches one header of torch with it. libnuma-dev: its CPU kernels
    tools = ("ccache", "g++", "gcc", "git", "libc6-dev", "libnuma-dev", "patch")
    return (*tools, f"python{python}-dev")


def builder_item(context: Context) -> Item[BuilderResult]:
    """Return the builder image; it needs a wheelhouse that it is installed from.

    Raises:
        BuildError: the target names no requirements for a builder.
        MachineError: the target has no base image, and none is named.
    """
    base = context.base
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

    def make(folder: Path, results: Results) -> BuilderResult:
        engine, key = engine_of(context), key_of(inputs)
        name = f"sparkforge/builder-{context.target_name}:{key[:12]}"
        # another store of this machine may have built it: transferring its wheelhouse takes longest
        if "builder" in context.force or not _present(engine, name, key):
            _build(engine, context, base, name, key, results.artefact(house).path / WHEELS, folder)
        from sparkforge.build import sbom  # not needed by a build in which nothing changed

        image_id = engine.image_id(name)
        log.info(f"builder {name} ({image_id})")
        return BuilderResult(image_id, name, tuple(sbom.system(engine, image_id)))

    return Item(
        "builder",
        "builder",
        inputs,
        BuilderResult,
        make,
        needs=(house,),
        valid=lambda artefact: (
            context.engine is None or context.engine.has_image(artefact.result.image_id)
        ),
        # an engine may lose the image of which all wheels are made
        intermediate=True,
    )


def engine_of(context: Context) -> Engine:
    """Return the engine that compiles; MachineError if none is used here."""
    if context.engine is None:
        msg = "compiling wheels needs a container engine"
        remedy = (
            f"start Docker Engine {OLDEST_ENGINE} or newer (DOCKER_HOST), or use --wheels overlay"
        )
        raise MachineError(msg, remedy)
    return context.engine


def _build(
    engine: Engine,
    context: Context,
    base: BaseImage,
    name: str,
    key: str,
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
        labels={_KEY_LABEL: key},
        contexts={"wheels": ours, "wheelhouse": wheelhouse},
        ca_bundle=context.ca_bundle,
    )


def _present(engine: Engine, name: str, key: str) -> bool:
    """Return whether the engine has the builder of this key."""
    if not engine.has_image(name):
        return False
    labels: dict[str, str] = engine.client.images.get(name).labels
    return labels.get(_KEY_LABEL) == key
