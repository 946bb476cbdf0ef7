"""Results in the store: what is made again."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import cached
from sparkforge.build.cached import Cached, differences, ordered
from sparkforge.build.results import FilesResult
from sparkforge.core.disk import key_of
from sparkforge.store.store import Store


def context_with(store: Store) -> Any:
    return SimpleNamespace(store=store, target_name="tiny")


def test_order_is_by_need_then_by_stage() -> None:
    def item(stage: str, label: str, *needs: Cached[Any]) -> Cached[Any]:
        return Cached(stage, label, {}, FilesResult, lambda _: FilesResult({}), needs)

    late, early = item("wheels", "late"), item("sources", "early")
    assert ordered([item("image", "goal", late, early)])[:2] == [early, late]


def test_changed_inputs_are_named() -> None:
    old = {"same": 1, "series": {"vllm": "a" * 64}, "gone": 2}
    new = {"same": 1, "series": {"vllm": "b" * 64}, "new": "x"}
    assert differences(old, new) == [
        "gone: 2 → nothing",
        "new: nothing → x",
        f"series.vllm: {'a' * 20}…{'a' * 12} → {'b' * 20}…{'b' * 12}",
    ]


@pytest.mark.parametrize("sealed", [True, False])
def test_record_that_is_not_ours_is_made_again(store: Store, sealed: bool) -> None:
    def run() -> Cached[FilesResult]:
        item = Cached("wheels", "demo", {"a": 1}, FilesResult, lambda _: FilesResult({}))
        cached.run(context_with(store), [item])
        return item

    first = run()
    assert (first.made_now, run().made_now) == (True, False)
    record = first.path / "artefact.json"
    values = json.loads(record.read_text()) | {"outputs": {"of": "another version"}}
    del values["seal"]
    record.write_text(json.dumps({**values, "seal": key_of(values) if sealed else ""}))
    assert first.find(store) is None
    (planned,) = cached.plan(context_with(store), [first])
    assert planned.why == ("its result is missing or damaged in the store",)
    assert run().made_now
