"""A build, and items with a result, without making anything."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from sparkforge.build.cached import Cached
from sparkforge.build.context import Context, Tools
from sparkforge.build.graph import Build
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access
from sparkforge.store.store import Artefact, Store

from .support import ROOT

T = TypeVar("T")


def context_of(name: str, checkout: Path = ROOT, /, **fields: Any) -> Context:
    """Return a target of a checkout's pins.yaml, offline, on its first platform.

    Args:
        fields: other values of the context's fields; the store is one that does not exist.
            ``root``: a folder in place of the checkout.
    """
    path = checkout / "pins.yaml"
    loaded = pins.load(path)
    project = Project(path, loaded, Store(checkout / "no-store"), Access(Index(), {}, offline=True))
    context = Context.of(project, name, loaded.target(name).platforms[0])
    if "root" in fields:
        fields["pins_path"] = fields.pop("root") / "pins.yaml"
    return replace(context, **fields)


def build_of(name: str, checkout: Path = ROOT, /, **chosen: Any) -> Build:
    """Return a build; ``chosen``: fields of its tools, its context."""
    tools = {one.name: chosen.pop(one.name) for one in fields(Tools) if one.name in chosen}
    return Build(context_of(name, checkout, **chosen), Tools(**tools))


def older_natives(context: Context) -> bool:
    """Return whether a wheel of a target has the native files of an older release."""
    files = (
        context.pins.upstream(name).files[plan.files[context.platform]]
        for name, plan in context.target.wheels.items()
    )
    return any(file.natives is not None for file in files)


def artefact(result: T, path: Path = Path(), *, seconds: float = 0) -> Artefact[T]:
    """Return an artefact that is in no store."""
    return Artefact("f" * 64, {}, result, path, seconds)


def item(result: T, stage: str = "image", label: str = "", **inputs: Any) -> Cached[T]:
    """Return an item that gives a result."""
    return Cached(stage, label or stage, inputs, type(result), lambda _: result)


def reached(
    of: Cached[T], result: T, path: Path = Path(), *, seconds: float = 0, made_now: bool = True
) -> Cached[T]:
    """Give an item a result, as a run does; returns it."""
    of.found, of.made_now = artefact(result, path, seconds=seconds), made_now
    return of
