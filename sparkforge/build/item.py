"""The items of a build: their inputs, and the results of those that are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from sparkforge.build.results import OwnWheel, SourceResult
from sparkforge.core.disk import intact, key_of
from sparkforge.core.errors import StoreError
from sparkforge.pins.pins import ReleaseFile
from sparkforge.sources.download import Fetches
from sparkforge.sources.sources import Source
from sparkforge.store.artefact import Artefact, T, T_co
from sparkforge.store.store import Store


@dataclass(frozen=True, eq=False)
class Item(Generic[T_co]):
    """One thing to make; results are found by the item itself."""

    stage: str
    """One of ``STAGES``."""
    label: str
    """For people, and unique in a build, e.g. ``wheel vllm``."""
    inputs: Mapping[str, Any]
    """Everything that determines the result, as JSON values."""
    kind: type[T_co]
    make: Callable[[Path, Results], T_co]
    """Fills a folder and returns the result."""
    needs: tuple[Item[Any], ...] = ()
    """Items whose results ``make`` reads."""
    valid: Callable[[Artefact[T_co]], bool] = field(default=lambda artefact: True)
    """Check a result in the store: its other half may be gone, or it may be damaged."""
    sound: Callable[[Artefact[T_co]], bool] = field(default=lambda artefact: True)
    """The same, where it takes seconds; called before something is made of the result."""
    intermediate: bool = False
    """A result counts as valid as long as all items that need it are."""
    download: tuple[ReleaseFile, ...] = ()
    """Release files that it may have to fetch."""
    commands: tuple[str, ...] = ()
    """For people: the command lines that it runs, where those are worth reading."""
    fetches: Callable[[], Fetches] = field(default=Fetches)
    """Further downloads that it may need, in words."""
    kept: bool = False
    """``--force`` of its stage does not make it again: the stage needs it, and it is not the
    stage's result."""

    @property
    def key(self) -> str:
        """sha256 of the inputs: the key of the result in the store."""
        return key_of(self.inputs)

    def find(self, store: Store) -> Artefact[T_co] | None:
        """Return the result in a store, valid or not."""
        return store.find(self.stage, self.inputs, self.kind)


@dataclass(frozen=True)
class StepResult(Generic[T_co]):
    """An item's artefact, and whether this run made it."""

    item: Item[T_co]
    artefact: Artefact[T_co]
    made_now: bool


class Results:
    """The results that a run has made or found, in order and by item."""

    def __init__(self, steps: Iterable[StepResult[Any]] = ()) -> None:
        self._steps = {step.item: step for step in steps}

    def __iter__(self) -> Iterator[StepResult[Any]]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, item: Item[T] | None) -> StepResult[T] | None:
        """Return the step of an item; None where the run stopped before it."""
        return None if item is None else self._steps.get(item)

    def artefact(self, item: Item[T]) -> Artefact[T]:
        """Return the artefact of an item; it is an error where there is none."""
        artefact: Artefact[T] = self._steps[item].artefact
        return artefact

    def of(self, item: Item[T]) -> T:
        """Return the result of an item; it is an error where there is none."""
        return self.artefact(item).result


# -- what several kinds share ----------------------------------------------------------------


def source_of(store: Store, name: str, result: SourceResult) -> Source:
    """Return the source of an upstream from its result."""
    repo = store.git_path(name)
    return Source(name, result.provider, repo, result.commit, result.tree, result.origin)


def holds_wheel(artefact: Artefact[OwnWheel]) -> bool:
    """Return whether the wheel that an artefact holds is still the one that was made."""
    return intact(artefact.path / artefact.result.file, artefact.result.sha256)


def wheel_path(artefact: Artefact[OwnWheel]) -> Path:
    """Return the wheel that an artefact holds, read again for this; raises ``undamaged``'s."""
    path = artefact.path / artefact.result.file
    return undamaged(path, artefact.result.sha256, "rebuilds the wheel")


def undamaged(path: Path, sha256: str, again: str) -> Path:
    """Return a file of an artefact, read for this and found as it was made.

    Args:
        again: the next build's action for a damaged one.

    Raises:
        StoreError: it is gone, or damaged.
    """
    if not intact(path, sha256):
        msg = f"{path}: missing or damaged in the store"
        raise StoreError(msg, f"run the build again: it {again}")
    return path


def wheels_of(items: Iterable[Item[OwnWheel]], results: Results) -> dict[Path, str]:
    """Return the wheels that items gave, each with its recorded sha256; raises ``wheel_path``'s."""
    made = [results.artefact(item) for item in items]
    return {wheel_path(artefact): artefact.result.sha256 for artefact in made}
