"""A plain environment, with our wheels or with the release's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkforge.build.context import WHEELS, Context, Item, Results, wheels_of
from sparkforge.runtime import environment, interpreter
from sparkforge.sources.download import Fetches
from sparkforge.store.codekey import code_of


def environment_item(
    context: Context, wheels: Sequence[Item], house: Item, label: str, *, release: bool = False
) -> Item:
    """Return the environment that has these wheels, and beside them those of a wheelhouse.

    Args:
        release: they are the release's, for the smoke test, which keeps it when it runs again: the
            byte code of the first start saves half a minute.
    """
    version = context.target.python
    inputs = {
        "wheels": {item.label: item.key for item in wheels},
        "wheelhouse": house.key,
        "python": version,
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        with context.store.unpacked() as unpacked:
            environment.bake(
                python=interpreter.ensure(context.store, version, offline=context.access.offline),
                lock=context.lock,
                wheelhouse=results[house.label].path / WHEELS,
                unpacked=unpacked,
                target=context.target_name,
                wheels=wheels_of(wheels, results),
                folder=folder,
            )
        return {"kind": "environment"}

    def fetches() -> Fetches:
        here = interpreter.find(context.store, version) is not None
        return Fetches() if here else Fetches(unknown=(f"Python {version} by uv",))

    return Item(
        "smoke" if release else "image",
        label,
        inputs,
        make,
        fetches=fetches,
        # the interpreter is a link: the system's, or the store's, may have gone
        valid=lambda artefact: environment.python_path(artefact.path).exists(),
        kept=release,
    )
