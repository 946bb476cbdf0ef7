"""The mechanism of a build: functions whose results the store keeps under a key of all inputs.

All inputs are known before anything runs, so a plan, ``explain`` and a build without changes
only hash and look up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic

from sparkforge.build import remote
from sparkforge.build.context import STAGES, Context
from sparkforge.core.disk import intact, key_of
from sparkforge.core.errors import StoreError
from sparkforge.core.log import human_bytes, log
from sparkforge.core.run import in_parallel
from sparkforge.sources.download import Fetches
from sparkforge.store.store import Artefact, Store, T, T_co, code_of

CACHED = "in the store"
_NEW = ("never built for this target",)


@dataclass(eq=False)
class Cached(Generic[T_co]):
    """A function whose result the store keeps; ``run`` calls it where needed."""

    stage: str
    label: str
    """Unique in a build, e.g. ``wheel vllm``."""
    inputs: Mapping[str, Any]
    """All that determines the result, as JSON values; the code of builds is added."""
    kind: type[T_co]
    make: Callable[[Path], T_co]
    """Fills a folder and returns the result; it reads those of ``needs`` from these themselves."""
    needs: tuple[Cached[Any], ...] = ()
    valid: Callable[[Artefact[T_co]], bool] = lambda _: True
    """Check a result in the store: its other half may be gone, or it may be damaged."""
    fetches: Callable[[], Fetches] = Fetches
    raw: bool = False
    """Where all that was made of it stands, its record in the store is enough."""
    found: Artefact[T_co] | None = field(default=None, init=False)
    """Its result, once a run has reached it."""
    made_now: bool = field(default=False, init=False)
    """Whether a run of this process made it."""

    def __post_init__(self) -> None:
        self.inputs = {**self.inputs, "code": code_of(__name__)}

    @cached_property
    def key(self) -> str:
        """sha256 of the inputs: the key of the result in the store."""
        return key_of(self.inputs)

    @property
    def artefact(self) -> Artefact[T_co]:
        """Its result in the store; it is a mistake to ask before a run has reached it."""
        assert self.found is not None, self.label
        return self.found

    @property
    def result(self) -> T_co:
        """As ``artefact``: the result alone."""
        return self.artefact.result

    @property
    def path(self) -> Path:
        """As ``artefact``: the folder that ``make`` filled."""
        return self.artefact.path

    def find(self, store: Store) -> Artefact[T_co] | None:
        """Return the result in a store, valid or not."""
        return store.find(self.stage, self.inputs, self.kind)


def result_of(item: Cached[T] | None) -> T | None:
    """Return the result of an item; None where there is no item, or no run has reached it."""
    return None if item is None or item.found is None else item.found.result


def undamaged(path: Path, sha256: str) -> Path:
    """Return a file of a result, read for this; StoreError if it is not as it was made."""
    if not intact(path, sha256):
        raise StoreError(f"{path}: missing or damaged in the store", "run the build again")
    return path


def ordered(goals: Iterable[Cached[Any]]) -> list[Cached[Any]]:
    """Return goals and all that they need: by stage, and each after its needs."""
    found: dict[Cached[Any], None] = {}

    def visit(item: Cached[Any]) -> None:
        for need in item.needs:
            visit(need)
        found.setdefault(item)

    for goal in goals:
        visit(goal)
    return sorted(found, key=lambda item: STAGES.index(item.stage))


def _stands(item: Cached[Any], store: Store, force: Collection[str]) -> bool:
    """Return whether the store's result of an item is used as it is."""
    found = None if item.stage in force else item.find(store)
    return found is not None and item.valid(found)


def _missing(
    store: Store,
    items: Sequence[Cached[Any]],
    force: Collection[str],
    take: Callable[[Cached[Any]], bool] = lambda _: False,
) -> list[bool]:
    """Return for each item whether it has to be made; ``take``: whether it came from elsewhere."""
    # four at once: it hashes wheels, and asks git and the engine
    found = in_parallel(lambda item, _: not _stands(item, store, force), items, 4)
    missing = dict(zip(items, found, strict=True))
    for item in reversed(items):  # what was made of an item comes before it
        users = [missing[user] for user in items if item in user.needs]
        idle = item.raw and bool(users) and not any(users)
        if missing[item] and item.stage not in force and (idle or not item.raw):
            there = idle and item.find(store) is not None
            missing[item] = not (there or take(item))
    return [missing[item] for item in items]


@dataclass(frozen=True)
class Planned:
    """What a build would do about one result."""

    stage: str
    label: str
    key: str
    state: str
    why: Sequence[str] = ()
    """Inputs that differ from the newest build of this target; empty if it is cached."""
    download: int = 0
    """Bytes to fetch at most, where known; a file that several results need counts once."""
    unknown: tuple[str, ...] = ()
    """Further downloads, in words."""

    @property
    def made(self) -> bool:
        """A build would make it."""
        return self.state != CACHED


def plan(
    context: Context, items: Sequence[Cached[Any]], force: Collection[str] = ()
) -> list[Planned]:
    """Return what a run would do, without running anything; ``force``: stages that run again."""
    store = context.store
    counted: set[str] = set()  # sha256 of files: two results may need one, which is fetched once
    planned = []
    for item, missing in zip(items, _missing(store, items, force), strict=True):
        one = Planned(item.stage, item.label, item.key, CACHED)
        if missing:
            last, forced = store.last(context.target_name, item.label), item.stage in force
            lost = "--force" if forced else "its result is missing or damaged in the store"
            why = _NEW if last is None else differences(last["inputs"], item.inputs) or (lost,)
            fetches = item.fetches()
            size = sum(size for sha256, size in fetches.known.items() if sha256 not in counted)
            counted |= fetches.known.keys()
            state = "to make again" if forced else "to make"
            one = replace(one, state=state, why=why, download=size, unknown=fetches.unknown)
        planned.append(one)
    return planned


def differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[str]:
    """Return each input that differs, one line each: ``name: old → new``."""

    def short(value: Any) -> str:
        text = "nothing" if value is None else str(value)
        return text if len(text) <= 48 else f"{text[:20]}…{text[-12:]}"

    result = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            result += differences(before, after, f"{where}{key}.")
        elif before != after:
            result.append(f"{where}{key}: {short(before)} → {short(after)}")
    return result


def total(planned: Sequence[Planned]) -> dict[str, Any]:
    """Return the downloads of a plan: bytes of known size, and descriptions of others."""
    unknown = [download for one in planned for download in one.unknown]
    return {"known": sum(one.download for one in planned), "unknown": unknown}


def show(context: Context, planned: Sequence[Planned]) -> None:
    """Print a plan as a table, with the reasons below each line that would be made."""

    def described(some: Sequence[Planned]) -> str:
        fetches = total(some)
        size = [human_bytes(fetches["known"])] if fetches["known"] else []
        return ", ".join([*size, *fetches["unknown"]])

    log.info(f"sources: {context.source}")
    for one in planned:
        fetches = f"  (fetches {text})" if (text := described([one])) else ""
        log.info(f"{one.label:28} {one.key[:12]}  {one.state}{fetches}")
        for line in () if one.why == _NEW else one.why:
            log.info(f"    {line}")
    log.info(f"to fetch: {described(planned) or 'nothing'}")


def run(
    context: Context,
    items: Sequence[Cached[Any]],
    force: Collection[str] = (),
    planned: Sequence[Planned] | None = None,
) -> None:
    """Make what the store lacks, in order; then each item has its ``found``.

    A failure stops the build; finished results stay and are not made again. ``planned``: the plan
    of these items, if it was made just now.
    """
    store = context.store
    missing = [one.made for one in planned] if planned else _missing(store, items, force)
    with store.in_use():
        if store.remote is not None and any(missing):
            missing = _missing(store, items, force, partial(remote.take, store))
        for item, lacking in zip(items, missing, strict=True):
            found = item.find(store)
            # an input of this item may have just been made anew
            anew = any(need.made_now for need in item.needs)
            again = lacking or (anew and not _stands(item, store, force))
            if found is None or again:
                if found is not None and item.stage not in force and not item.raw:
                    log.warning(f"{item.label}: damaged or outdated in the store: rebuilding it")
                what = (item.stage, item.inputs, item.kind, item.make)
                with log.step(item.label):
                    found = store.build(*what, again=found is not None)
                again = True
            item.found, item.made_now = found, again
            store.remember(context.target_name, item.label, found)
