"""Items with a result, without making anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from sparkforge.build.item import Item, Results, StepResult
from sparkforge.store.artefact import Artefact

T = TypeVar("T")


def artefact(
    result: T, path: Path = Path(), *, stage: str = "any", seconds: float = 0
) -> Artefact[T]:
    """Return an artefact that is in no store."""
    return Artefact(stage, "f" * 64, {}, result, path, seconds)


def item(result: T, stage: str = "image", label: str = "", **inputs: Any) -> Item[T]:
    """Return an item that gives a result."""

    def make(folder: Path, results: Results) -> T:
        return result

    return Item(stage, label or stage, inputs, type(result), make)


def step(
    of: Item[T], result: T, path: Path = Path(), *, seconds: float = 0, made_now: bool = True
) -> StepResult[T]:
    """Return the step of an item with a result."""
    return StepResult(of, artefact(result, path, stage=of.stage, seconds=seconds), made_now)
