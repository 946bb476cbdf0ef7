"""Options of a target's last build: the defaults of the commands that use the result.

A small file of the checkout, ``.sparkforge/last-build/TARGET.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

from sparkforge.build.context import Context
from sparkforge.build.options import SOURCES, VariantOptions
from sparkforge.build.stages.source import chosen
from sparkforge.core.disk import read_json, write_file
from sparkforge.core.plain import as_json, load


def path_of(root: Path, target: str) -> Path:
    """Return the file with the options of a target's last build."""
    return root / ".sparkforge" / "last-build" / f"{target}.json"


def read(root: Path, target: str) -> VariantOptions:
    """Return the options of a target's last build.

    The defaults where there is no such file, or another version of sparkforge wrote it.
    """
    return load(VariantOptions, read_json(path_of(root, target))) or VariantOptions()


def write(context: Context, *, image: bool, engine: str) -> None:
    """Record the options that give a build like this one again; defaults stand for themselves.

    Args:
        image: whether the build made an image; its base is recorded.
        engine: value of --engine; recorded where it is ``none``.
    """
    last = VariantOptions(
        engine="none" if engine == "none" else "auto",
        base=context.base.reference if image and context.base is not None else None,
        wheels=context.wheels if context.wheels == "compile" else None,
        source=_source(context),
        pack=None if context.pack == context.target.pack else " ".join(context.pack) or "none",
    )
    if read(context.root, context.target_name) != last:
        text = json.dumps(as_json(last), indent=1, sort_keys=True) + "\n"
        write_file(path_of(context.root, context.target_name), text.encode())


def _source(context: Context) -> str | None:
    """Return the value of --source; None where a mirror makes the sources of upstreams differ."""
    names = [layer for wheel in context.target.wheels for layer in context.layers(wheel)]
    plans = [chosen(context, name) for name in names]
    for value, plan in SOURCES.items():
        if all(used == {"provider": plan.provider, "fallback": plan.fallback} for used in plans):
            return value
    return None
