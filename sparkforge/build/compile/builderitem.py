"""The image that wheels are compiled in, and the wheelhouse that it is installed from."""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.compile import builder
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results
from sparkforge.build.results import BuilderResult
from sparkforge.build.stages.wheelhouse import wheelhouse_item
from sparkforge.core.errors import CompileError, EngineError
from sparkforge.core.hashing import code_digest, key_of
from sparkforge.runtime.engine import OLDEST_ENGINE, Engine
from sparkforge.store.codekey import code_of

_HOUSE = "builder's wheelhouse"


def builder_item(context: Context) -> Item[BuilderResult]:
    """Return the builder image; it needs a wheelhouse that it is installed from.

    Raises:
        CompileError: the target names no requirements for a builder.
        EngineError: the target has no base image, and none is named.
    """
    base = context.base
    if base is None:
        msg = f"target {context.target_name} has no base image in pins.yaml, and wheels are"
        raise EngineError(f"{msg} compiled in one", "give one: --base IMAGE (with Python and apt)")
    lock = context.target.builder.get(context.platform)
    if lock is None:
        msg = f"targets.{context.target_name}: has no builder for {context.platform}"
        raise CompileError(msg, "add a lock of its upstreams' build requirements (builder:)")
    house = wheelhouse_item(context, context.root / lock, _HOUSE, "builder")
    inputs = {
        "base": base.digest,
        "wheelhouse": house.key,
        "python": context.target.python,
        "platform": context.platform,
        "packages": list(builder.packages(context.target.python)),
        "epoch": context.epoch,
        "recipe": code_digest(context.root / "Dockerfile"),
        "code": code_of(__name__),
    }
    name = builder.tag(context.target_name, key_of(inputs))

    def make(folder: Path, results: Results) -> BuilderResult:
        engine, key = engine_of(context), key_of(inputs)
        # another store of this machine may have made it: transferring its wheelhouse takes longest
        present = None if "builder" in context.force else builder.standing(engine, name, key)
        if present is not None:
            return present
        wheelhouse = results.artefact(house).path / WHEELS
        return builder.build(engine, context, base, key, wheelhouse, folder)

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
    """Return the engine that compiles; EngineError if none is used here."""
    if context.engine is None:
        msg = "compiling wheels needs a container engine"
        remedy = (
            f"start Docker Engine {OLDEST_ENGINE} or newer (DOCKER_HOST), or use --wheels overlay"
        )
        raise EngineError(msg, remedy)
    return context.engine
