"""A build, and items with a result, without making anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sparkforge.build.context import Context
from sparkforge.build.item import Item, Results, StepResult
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access
from sparkforge.store.artefact import Artefact
from sparkforge.store.store import Store

from .support import ROOT

T = TypeVar("T")


def context_of(target: str, checkout: Path = ROOT, **fields: Any) -> Context:
    """Return the build of a target of a checkout's pins.yaml, offline, on its first platform.

    Args:
        fields: other values of the context's fields; the store is one that does not exist.
    """
    path = checkout / "pins.yaml"
    loaded = pins.load(path)
    project = Project(path, loaded, Store(checkout / "no-store"), Access(Index(), {}, offline=True))
    context = Context.of(project, target, loaded.target(target).platforms[0])
    return replace(context, **fields)


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
