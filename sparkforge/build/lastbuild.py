"""How a target was built last: the defaults of the commands that use the result.

A small file of the checkout, ``.sparkforge/last-build/TARGET.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.context import Context
from sparkforge.build.options import SOURCES
from sparkforge.build.stages.source import chosen
from sparkforge.core.disk import read_json, write_file
from sparkforge.core.typed import as_json, load


@dataclass(frozen=True)
class LastBuild:
    """The options of a build; None stands for the option's default.

    Attributes:
        engine: ``none``, or None.
        base: reference of the base image; None where the build made no image.
        wheels: ``compile``, or None for overlay wheels.
        native: ``patched`` or ``all`` for compiled wheels.
        source: None where a mirror makes the sources of upstreams differ.
    """

    engine: str | None = None
    base: str | None = None
    wheels: str | None = None
    native: str | None = None
    source: str | None = None


def path_of(root: Path, target: str) -> Path:
    """Return the file that says how a checkout built a target last."""
    return root / ".sparkforge" / "last-build" / f"{target}.json"


def read(root: Path, target: str) -> LastBuild:
    """Return how a target was built last.

    The defaults where there is no such file, or another version of sparkforge wrote it.
    """
    return load(LastBuild, read_json(path_of(root, target))) or LastBuild()


def write(context: Context, *, image: bool, engine: str) -> None:
    """Record how a target was built.

    Args:
        image: whether the build made an image.
        engine: value of --engine.
    """
    compiled = context.wheels == "compile"
    last = LastBuild(
        engine="none" if engine == "none" else None,
        base=context.base.reference if image and context.base is not None else None,
        wheels=context.wheels if compiled else None,
        native=context.native if compiled else None,
        source=_source(context),
    )
    if read(context.root, context.target_name) != last:
        text = json.dumps(as_json(last), indent=1, sort_keys=True) + "\n"
        write_file(path_of(context.root, context.target_name), text.encode())


def _source(context: Context) -> str | None:
    names = [layer for wheel in context.target.wheels for layer in context.layers(wheel)]
    plans = [chosen(context, name) for name in names]
    for value, plan in SOURCES.items():
        if all(one == {"provider": plan.provider, "fallback": plan.fallback} for one in plans):
            return value
    return None
