"""A move to another release with all that belongs to it, made and tried before it lands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.core.log import log
from sparkforge.maintain.companions import filesizes, locks, scratch, trial
from sparkforge.maintain.companions.locks import Relocked
from sparkforge.maintain.companions.trial import Tried
from sparkforge.maintain.rebase.drift import DependencyDrift
from sparkforge.pins import pins
from sparkforge.pins.pins import Upstream
from sparkforge.sources import sizes
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Move:
    """A move that was tried."""

    files: Mapping[Path, bytes | None]
    """What the rebase itself writes."""
    before: Mapping[str, str]
    """The files of requirements/ that it began with."""
    relocked: Relocked
    requirements: Mapping[str, str]
    """Lists, locks and sizes, by path in the checkout."""
    tried: Tried
    drift: tuple[DependencyDrift, ...]
    """What no longer agrees in spite of all that."""


def make(
    project: Project,
    files: Mapping[Path, bytes | None],
    moved: Mapping[str, Upstream],
    series: Collection[str],
    folder: Path,
    drifting: Callable[[Project], list[DependencyDrift]],
) -> Move:
    """Make requirements, locks and sizes for a move, and try all of it; the checkout stays.

    Args:
        files: what the rebase writes into the checkout.
        moved: the upstreams with another release, as pins.yaml will have them.
        series: the upstreams whose series moved.
        folder: of the rebase; it gets the throw-away checkout.
        drifting: what does not agree in a checkout.

    Raises:
        RebaseStopped: the requirements cannot be locked, or the trial fails.
    """
    root, here = project.root, folder / "checkout"
    before = locks.texts_of(root)
    with log.step("requirements"):
        lists = locks.follow(project, moved)
        scratch.make(root, here, {**files, **_below(root, lists.files)})
        relocked = locks.lock(project, here, lists, folder / "locked.json")
        scratch.write(here, relocked.files)
        tried_project = replace(
            project, pins_path=here / project.pins_path.name, pins=pins.load(here / "pins.yaml")
        )
        requirements = dict(relocked.files)
        if (here / sizes.FILE).is_file():
            text = filesizes.text(here, tried_project.pins, project.store)
            if text != (root / sizes.FILE).read_text(encoding="utf-8"):
                requirements[sizes.FILE] = text
                scratch.write(here, {sizes.FILE: text})
    for name, changes in relocked.locks.items():
        log.info(f"{name}: {'; '.join(changes)}")
    for what in relocked.ours:
        log.warning(f"to decide: {what}")
    scratch.lend_environments(root, here)
    tried = trial.run(tried_project, series)
    left = drifting(replace(project, pins_path=tried_project.pins_path))
    return Move(files, before, relocked, requirements, tried, tuple(left))


def _below(root: Path, texts: Mapping[str, str]) -> dict[Path, bytes]:
    return {root / name: text.encode() for name, text in texts.items()}
