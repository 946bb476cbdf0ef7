"""The checkpoint of the preflight, and its expected answers."""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.item import Item, Results, undamaged
from sparkforge.build.results import CheckpointResult
from sparkforge.core.disk import intact, sha256_file
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import code_of


def trial_item() -> Item[CheckpointResult]:
    """Return the checkpoint; it is the same for every target."""

    def make(folder: Path, results: Results) -> CheckpointResult:
        # not needed by a build in which nothing changed
        from sparkforge.checkpoints import trial
        from sparkforge.serving.preflight import NAME

        trial.make(folder / NAME)
        made = (folder / NAME).iterdir()
        return CheckpointResult({f"{NAME}/{path.name}": sha256_file(path) for path in made})

    inputs = {"code": code_of(__name__)}
    return Item("image", "preflight checkpoint", inputs, CheckpointResult, make, valid=_whole)


def trial_files(artefact: Artefact[CheckpointResult]) -> dict[str, bytes]:
    """Return the checkpoint by its paths in the image's share; raises what ``undamaged`` does."""
    files, again = artefact.result.files, "makes the checkpoint again"
    return {
        name: undamaged(artefact.path / name, sha256, again).read_bytes()
        for name, sha256 in files.items()
    }


def _whole(artefact: Artefact[CheckpointResult]) -> bool:
    files = artefact.result.files
    return all(intact(artefact.path / name, sha256) for name, sha256 in files.items())
