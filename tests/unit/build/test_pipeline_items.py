"""Which items are made again: what is damaged, read whole where something is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import executor
from sparkforge.build.item import Item, Results
from sparkforge.build.results import CheckpointResult
from sparkforge.core.errors import StoreError
from sparkforge.core.gitsafe import DamagedRepository
from sparkforge.store.store import Store


@dataclass
class Bench:
    """Two items, the second made of the first; what was made and read whole, in order."""

    store: Store
    done: list[str] = field(default_factory=list)
    sound: bool = True
    failure: Exception | None = None

    def run(self, *force: str) -> list[str]:
        """Run both; returns what was done since."""
        context: Any = SimpleNamespace(store=self.store, force=frozenset(force), target_name="tiny")
        self.done.clear()
        executor.run(context, [self.item("house", "wheelhouse"), self.item("image", "image")])
        return list(self.done)

    def run_smoke(self, *force: str) -> list[str]:
        """Run the smoke stage: its test, and the release that it compares with."""
        context: Any = SimpleNamespace(store=self.store, force=frozenset(force), target_name="tiny")
        self.done.clear()
        release, smoke = self.item("release", "smoke", kept=True), self.item("smoke", "smoke")
        executor.run(context, [release, smoke])
        states = {step.label: step.state for step in executor.plan(context, [release, smoke])}
        assert states["release"] == "in the store"
        return list(self.done)

    def item(self, label: str, stage: str, *, kept: bool = False) -> Item[CheckpointResult]:
        def make(folder: Path, results: Results) -> CheckpointResult:
            self.done.append(f"made {label}")
            self.sound = True
            if self.failure is not None and label == "image":
                failure, self.failure = self.failure, None
                raise failure
            return CheckpointResult({})

        def sound(_: object) -> bool:
            self.done.append(f"read {label}")
            return self.sound

        return Item(stage, label, {"label": label}, CheckpointResult, make, sound=sound, kept=kept)


@pytest.fixture
def bench(store: Store) -> Bench:
    made = Bench(store)
    assert made.run() == ["made house", "made image"]
    return made


def test_a_build_in_which_nothing_is_made_reads_nothing_whole(bench: Bench) -> None:
    bench.sound = False
    assert bench.run() == []


def test_what_something_is_made_of_is_read_and_made_again_where_damaged(bench: Bench) -> None:
    assert bench.run("image") == ["read house", "made image"]
    bench.sound = False
    assert bench.run("image") == ["read house", "made house", "made image"]


def test_force_keeps_what_a_stage_only_compares_with(bench: Bench) -> None:
    assert bench.run_smoke() == ["made release", "made smoke"]
    assert bench.run_smoke("smoke") == ["read release", "made smoke"]
    bench.sound = False
    assert bench.run_smoke("smoke") == ["read release", "made release", "made smoke"]


def test_a_damaged_repository_is_removed_and_the_build_goes_on(bench: Bench) -> None:
    repo = bench.store.git_path("demo")
    repo.mkdir(parents=True)
    bench.failure = DamagedRepository(repo, "a bad object")
    assert bench.run("image") == ["read house", "made image", "read house", "made image"]
    assert not repo.exists()


def test_a_damaged_repository_of_others_stays(bench: Bench, tmp_path: Path) -> None:
    bench.failure = DamagedRepository(tmp_path, "a bad object")
    with pytest.raises(StoreError, match="outside this store"):
        bench.run("image")
    assert tmp_path.is_dir()


# -- results that are needed only while something is made of them -----------------------------


@dataclass
class Compiled:
    """A builder that may be lost, and the wheel that is made in it."""

    store: Store
    builder_there: bool = True
    wheel_whole: bool = True

    def run(self, *force: str) -> list[str]:
        """Run both; returns the labels of what was made."""
        context: Any = SimpleNamespace(store=self.store, force=frozenset(force), target_name="tiny")
        builder, wheel = self.items()
        planned = [step.label for step in executor.plan(context, [builder, wheel]) if step.made]
        made = [
            step.item.label for step in executor.run(context, [builder, wheel]) if step.made_now
        ]
        assert planned == made
        return made

    def items(self) -> tuple[Item[CheckpointResult], Item[CheckpointResult]]:
        def make(folder: Path, results: Results) -> CheckpointResult:
            return CheckpointResult({})

        builder = Item(
            "builder",
            "builder",
            {"label": "builder"},
            CheckpointResult,
            make,
            valid=lambda _: self.builder_there,
            intermediate=True,
        )
        wheel = Item(
            "wheels",
            "wheel",
            {"label": "wheel"},
            CheckpointResult,
            make,
            needs=(builder,),
            valid=lambda _: self.wheel_whole,
        )
        return builder, wheel


def test_a_lost_builder_is_made_again_only_for_a_wheel(store: Store) -> None:
    compiled = Compiled(store)
    assert compiled.run() == ["builder", "wheel"]
    compiled.builder_there = False
    assert compiled.run() == []
    assert compiled.run("wheels") == ["builder", "wheel"]
    compiled.wheel_whole = False
    assert compiled.run() == ["builder", "wheel"]


def test_a_lost_builder_is_made_again_where_nothing_uses_it(store: Store) -> None:
    compiled = Compiled(store)
    compiled.run()
    compiled.builder_there = False
    context: Any = SimpleNamespace(store=store, force=frozenset(), target_name="tiny")
    (step,) = executor.run(context, [compiled.items()[0]])
    assert step.made_now
