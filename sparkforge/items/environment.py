"""A plain environment, with our wheels or with the release's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkforge import environment
from sparkforge.codekey import code_of
from sparkforge.context import WHEELS, Context, Item, Results, wheel_path


def environment_item(
    context: Context, wheels: Sequence[Item], house: Item, label: str, stage: str = "image"
) -> Item:
    """Return the environment that has these wheels, and beside them those of a wheelhouse."""
    inputs = {
        "wheels": {item.label: item.key for item in wheels},
        "wheelhouse": house.key,
        "python": context.target.python,
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        with context.store.unpacked() as unpacked:
            environment.bake(
                python=context.target.python, lock=context.lock,
                wheelhouse=results[house.label].path / WHEELS,
                unpacked=unpacked, target=context.target_name,
                wheels=[wheel_path(results[item.label]) for item in wheels],
                folder=folder,
            )  # fmt: skip
        return {"kind": "environment"}

    return Item(stage, label, inputs, make)
