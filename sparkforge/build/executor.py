"""Run the items of a target in order, or plan it: what would run and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from sparkforge.build.context import Context
from sparkforge.build.graph import Graph, graph_of
from sparkforge.build.item import Item, Results, StepResult
from sparkforge.build.receipt import differences
from sparkforge.core.gitsafe import DamagedRepository
from sparkforge.core.log import human_bytes, log
from sparkforge.core.run import in_parallel
from sparkforge.store.artefact import Artefact, T

_NEW = ("never built for this target",)
_PARALLEL = 4  # items that are looked up at once


@dataclass(frozen=True)
class Step:
    """One item of a plan."""

    stage: str
    label: str
    key: str
    state: str
    """``in the store``, ``to make`` or ``to make again`` (asked for with --force)."""
    why: tuple[str, ...]
    """Inputs that differ from the newest build of this target; empty if it is in the store."""
    download: int
    """Bytes that it has to fetch at most, as far as sizes are known; of a file that several items
    need, the first has them."""
    commands: tuple[str, ...] = ()
    """The command lines that making it would run, where they are worth reading."""
    unknown: tuple[str, ...] = ()
    """Further downloads, in words."""

    @property
    def made(self) -> bool:
        """A build would make it."""
        return self.state != "in the store"


def plan(context: Context, items: Sequence[Item[Any]]) -> list[Step]:
    """Return the steps of a build, without running them."""
    counted: set[str] = set()  # sha256 of files: two items may need one, which is fetched once
    standing = _standing(context, items)
    return [
        _step(context, item, stands, counted) for item, stands in zip(items, standing, strict=True)
    ]


def makes(items: Sequence[Item[Any]], steps: Sequence[Step], kind: type[Any]) -> bool:
    """Return whether by the plan of these items a build makes a result of a type."""
    return any(step.made and item.kind is kind for item, step in zip(items, steps, strict=True))


def _step(context: Context, item: Item[Any], stands: bool, counted: set[str]) -> Step:
    if stands:
        return Step(item.stage, item.label, item.key, "in the store", (), 0)
    state = "to make again" if _forced(context, item) else "to make"
    absent = {
        file.sha256: file.size
        for file in item.download
        if not context.store.download_path(file.sha256, file.file).exists()
    }
    fetches = item.fetches()
    absent |= fetches.known
    missing = sum(size for sha256, size in absent.items() if sha256 not in counted)
    counted.update(absent)
    return Step(
        item.stage,
        item.label,
        item.key,
        state,
        tuple(_why(context, item)),
        missing,
        item.commands,
        fetches.unknown,
    )


def _forced(context: Context, item: Item[Any]) -> bool:
    return item.stage in context.force and not item.kept


def _standing(context: Context, items: Sequence[Item[Any]]) -> list[bool]:
    """Return for each item whether its result in the store is used as it is."""

    def stands(item: Item[Any], stopping: Event) -> bool:
        return _stands(context, item, items)

    # at once: it hashes wheels, and asks git and the engine
    return list(in_parallel(stands, items, _PARALLEL))


def _stands(context: Context, item: Item[Any], items: Sequence[Item[Any]]) -> bool:
    artefact = None if _forced(context, item) else item.find(context.store)
    return artefact is not None and _valid(context, artefact, item, items)


def _valid(
    context: Context, artefact: Artefact[Any], item: Item[Any], items: Sequence[Item[Any]]
) -> bool:
    users = [other for other in items if item.intermediate and item in other.needs]
    if users and all(_stands(context, user, items) for user in users):
        return True
    return item.valid(artefact)


def _why(context: Context, item: Item[Any]) -> list[str]:
    """Return the inputs that differ from those of the newest item of this name in the store."""
    last = context.store.last(context.target_name, item.label)
    if last is None:
        return list(_NEW)
    changed = differences(last["inputs"], item.inputs)
    if changed:
        return changed
    if _forced(context, item):
        return ["--force"]
    return ["its result is missing or damaged in the store"]


@dataclass(frozen=True)
class Build:
    """A target's items, and the results of those that a run has reached."""

    graph: Graph
    results: Results


def build(context: Context, until: str) -> Build:
    """Make a target's items that the store lacks, up to and with a stage; raises as ``run``."""
    graph = graph_of(context)
    return Build(graph, run(context, graph.until(until)))


def run(
    context: Context, items: Sequence[Item[Any]], steps: Sequence[Step] | None = None
) -> Results:
    """Make the items that the store lacks, in order.

    A failure stops the build; finished items stay and are not made again.

    Args:
        steps: the plan of these items, made just now; None: there is none.
    """
    made: set[Item[Any]] = set()
    renewed: set[Path] = set()
    missing = None if steps is None else [step.made for step in steps]
    while True:
        if missing is None:
            missing = [not stands for stands in _standing(context, items)]
        try:
            return _run(context, items, missing, made)
        except DamagedRepository as error:
            missing = None
            if error.repository in renewed:
                raise
            renewed.add(error.repository)
            log.warning(f"{error.what}: fetching it again")
            context.store.drop_repository(error.repository)


def _run(
    context: Context, items: Sequence[Item[Any]], missing: Sequence[bool], made: set[Item[Any]]
) -> Results:
    """As ``run``; adds each result to ``made``, and stops at a damaged repository."""
    steps: list[StepResult[Any]] = []
    for at, item in enumerate(items):
        again = _forced(context, item)
        kept = item.find(context.store)
        if kept is not None and not again:
            # an input of this item may have just been made anew
            again = not _valid(context, kept, item, items) if made else missing[at]
            # an input of another item is read in full first: a damaged one must not spread
            again = again or (any(missing[at + 1 :]) and not item.sound(kept))
            if again:
                log.warning(
                    f"{item.label}: missing, damaged or outdated in the store: rebuilding it"
                )
        if kept is None or again:
            with log.step(item.label):
                kept = _make(context, item, Results(steps), again=again)
            made.add(item)
        steps.append(StepResult(item, kept, made_now=item in made))
        context.store.remember(context.target_name, item.label, kept)
    return Results(steps)


def _make(context: Context, item: Item[T], results: Results, *, again: bool) -> Artefact[T]:
    return context.store.build(
        item.stage, item.inputs, item.kind, lambda folder: item.make(folder, results), again=again
    )


@dataclass(frozen=True)
class Total:
    """Downloads of several steps: bytes of known size, and descriptions of others."""

    known: int
    unknown: tuple[str, ...]


def total(steps: Sequence[Step]) -> Total:
    """Return the downloads of a plan, over all its stages."""
    unknown = tuple(download for step in steps for download in step.unknown)
    return Total(sum(step.download for step in steps), unknown)


def describe(fetches: Total) -> str:
    """Return the size and names of downloads as text, or "nothing"."""
    size = [human_bytes(fetches.known)] if fetches.known else []
    return ", ".join([*size, *fetches.unknown]) or "nothing"


def show(context: Context, steps: Sequence[Step]) -> None:
    """Print a plan as a table, with the reasons below each item that would be made."""
    plan = context.target.source
    provider = "release files" if plan.provider == "release" else "git"
    mirrored = [name for name in context.access.mirrors if "/" not in name]
    log.info(
        f"sources: {provider}{', else release files' if plan.fallback else ''}"
        f"{', with --mirror git: ' + ', '.join(mirrored) if mirrored else ''}"
    )
    new = 0
    for step in steps:
        fetches = total([step])
        size = f"  (fetches {describe(fetches)})" if fetches != Total(0, ()) else ""
        log.info(f"{step.label:28} {step.key[:12]}  {step.state}{size}")
        if step.why == _NEW:
            new += 1
        else:
            for reason in step.why:
                log.info(f"    {reason}")
        for command in step.commands:
            log.info(f"    {command}")
    if new:
        log.info(f"{new} of {len(steps)} were never built for this target")
    unsized = (
        "; plus downloads of unknown size by git and the engine" if total(steps).unknown else ""
    )
    log.info(f"to fetch: {describe(total(steps))}{unsized}")
