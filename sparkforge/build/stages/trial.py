"""The checkpoint of the preflight, and what it has to answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkforge.build.context import Item, Results
from sparkforge.store.codekey import code_of


def trial_item() -> Item:
    """Return the checkpoint; it is the same for every target."""

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        # not needed by a build in which nothing changed
        from sparkforge.checkpoints import trial
        from sparkforge.serving import preflight

        trial.make(folder / preflight.NAME)
        return {"kind": "checkpoint"}

    return Item("image", "preflight checkpoint", {"code": code_of(__name__)}, make)
