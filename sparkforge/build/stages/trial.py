"""The checkpoint of the preflight, and what it has to answer."""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.item import Item, Results
from sparkforge.build.results import CheckpointResult
from sparkforge.store.codekey import code_of


def trial_item() -> Item[CheckpointResult]:
    """Return the checkpoint; it is the same for every target."""

    def make(folder: Path, results: Results) -> CheckpointResult:
        # not needed by a build in which nothing changed
        from sparkforge.checkpoints import trial
        from sparkforge.serving import preflight

        trial.make(folder / preflight.NAME)
        return CheckpointResult()

    inputs = {"code": code_of(__name__)}
    return Item("image", "preflight checkpoint", inputs, CheckpointResult, make)
