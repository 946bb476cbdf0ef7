"""A virtual environment, with our wheels or with the release's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results, wheels_of
from sparkforge.build.results import EnvironmentResult, OwnWheel, WheelhouseResult
from sparkforge.runtime import environment, interpreter
from sparkforge.sources.download import Fetches
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import code_of


def environment_item(
    context: Context,
    wheels: Sequence[Item[OwnWheel]],
    house: Item[WheelhouseResult],
    label: str,
    *,
    release: bool = False,
) -> Item[EnvironmentResult]:
    """Return the environment with these wheels and those of a wheelhouse.

    Args:
        release: they are the release's, for the smoke test, which keeps it when it runs again: the
            byte code of the first start saves half a minute.
    """
    stage, kind = "smoke" if release else "image", EnvironmentResult
    version = context.target.python
    inputs = {
        "wheels": {item.label: item.key for item in wheels},
        "wheelhouse": house.key,
        "python": version,
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> EnvironmentResult:
        with context.store.unpacked() as unpacked:
            ingredients = environment.Ingredients(
                python=interpreter.ensure(context.store, version, offline=context.access.offline),
                lock=context.lock,
                wheelhouse=results.artefact(house).path / WHEELS,
                unpacked=unpacked,
                target=context.target_name,
                wheels=wheels_of(wheels, results),
            )
            environment.install(ingredients, folder)
        last = context.store.last(context.target_name, label)
        if last is not None and (before := context.store.find(stage, last["inputs"], kind)):
            environment.share_byte_code(before.path, folder)
        return kind()

    def fetches() -> Fetches:
        here = interpreter.find(context.store, version) is not None
        return Fetches() if here else Fetches(unknown=(f"Python {version} by uv",))

    return Item(
        stage,
        label,
        inputs,
        kind,
        make,
        needs=(*wheels, house),
        fetches=fetches,
        valid=_stands,
        sound=lambda artefact: not environment.damaged(artefact.path),
        # only the smoke test uses it
        intermediate=release,
        kept=release,
    )


def _stands(artefact: Artefact[EnvironmentResult]) -> bool:
    # the interpreter is a link to the system's or the store's, which may be gone
    python = environment.python_path(artefact.path)
    return python.exists() and not environment.changed(artefact.path)
