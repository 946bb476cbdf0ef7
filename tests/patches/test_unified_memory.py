"""What vLLM takes of a memory that GPU and host share, in states of a Spark: the release, and
with our plugin.

The table of docs/serving.md holds these numbers. The model's amounts are those of gpt-oss-120b
under Marlin as far as they are known (67.5 GiB of weights, measured on an H200; 60.8 GiB of files);
what its graphs, its largest step and everything else take is made up. Nothing is allocated.
"""

from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import memory
from sparkforge.serving.memory import Reading
from sparkforge.serving.profile import MemoryPlan
from tests.patches.checkout import PINS
from tests.patches.probing import ask
from tests.patches.unified_memory import GIB, Machine

TOTAL = 119.7
BOOT = {"total": TOTAL, "held": 5.2, "cache": 0.5}
GRAPHS = {"count": 10, "first": 0.6, "each": 0.05, "before": 0, "during": 0}
MODEL: dict[str, Any] = {
    "own": 3,
    "weights": 67.5,
    "file": 0,
    "other": 0.5,
    "peak": 1.5,
    "graphs": GRAPHS,
}
ALL_GRAPHS = 0.6 + 9 * 0.05
STATES: dict[str, dict[str, Any]] = {
    "fresh boot": {"machine": BOOT},
    "60 GB of page cache": {"machine": {**BOOT, "cache": 55.9}},
    "another process holds 20 GB": {"machine": {**BOOT, "held": 5.2 + 18.6}},
    "page cache grows as weights are read by mmap": {"machine": BOOT, "file": 60.8},
    "the same, and 2 GB are read before graphs are measured": {
        "machine": BOOT,
        "file": 60.8,
        "graphs": {**GRAPHS, "before": 1.9},
    },
    "the same, and 2 GB are read while graphs are measured": {
        "machine": BOOT,
        "file": 60.8,
        "graphs": {**GRAPHS, "during": 1.9},
    },
}
RUNNERS = ("v1", "v2")
# the runners differ in how they measure graphs, so the older one is asked where that matters
CASES = [
    (name, runner)
    for name in STATES
    for runner in RUNNERS
    if runner == "v2" or "graphs are measured" in name
]


def _plan() -> MemoryPlan:
    plan = PINS.profile_of(PINS.target("spark")).memory
    assert plan is not None
    return plan


def _share(state: dict[str, Any]) -> float:
    """Return what the entrypoint gives vLLM."""
    fields = {name: int(value * GIB) for name, value in state["machine"].items()}
    machine = Machine(**fields)
    reading = Reading(machine.total, machine.available)
    return memory.utilisation(_plan(), reading, cuda_total=machine.total)


def _run(python: Path, states: dict[str, dict[str, Any]], folder: Path) -> Any:
    asked = {name: {**MODEL, **state} for name, state in states.items()}
    return ask(python, "probe_unified_memory", asked, folder=folder)


def _all_states() -> dict[str, dict[str, Any]]:
    states = {
        f"{name}, {runner}": {**STATES[name], "runner": runner, "share": _share(STATES[name])}
        for name, runner in CASES
    }
    apart = {"machine": BOOT, "integrated": False, "share": 0.4, "weights": 20}
    for runner in RUNNERS:
        states[f"a card of its own memory, {runner}"] = {**apart, "runner": runner}
    return states


@pytest.fixture(scope="module")
def stock(stock_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _run(stock_python, _all_states(), tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def patched(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _run(patched_python, _all_states(), tmp_path_factory.mktemp("patched"))


def _right(state: dict[str, Any], found: dict[str, Any]) -> float:
    """Return the KV cache, in GiB, that with all the rest is what was asked for."""
    rest = sum(state[name] for name in ("weights", "other", "peak"))
    return float(found["requested"]) - float(rest) - ALL_GRAPHS


@pytest.mark.parametrize("runner", RUNNERS)
def test_graphs_cost_the_same_whatever_the_page_cache_does(
    runner: str, stock: dict[str, Any], patched: dict[str, Any]
) -> None:
    for name, its in CASES:
        if its == runner:
            found = patched[f"{name}, {runner}"]["graphs"]
            assert found == pytest.approx(ALL_GRAPHS, abs=0.02), name
    # the release: what is read before hides the graphs, what is read meanwhile counts as graphs
    before, during = (
        stock[f"the same, and 2 GB are read {when} graphs are measured, {runner}"]["graphs"]
        for when in ("before", "while")
    )
    assert before < 0.1
    assert during > ALL_GRAPHS + 0.4


@pytest.mark.parametrize(("name", "runner"), CASES)
def test_the_kv_cache_is_what_is_left_of_the_share(
    name: str, runner: str, stock: dict[str, Any], patched: dict[str, Any]
) -> None:
    state, found = {**MODEL, **STATES[name]}, patched[f"{name}, {runner}"]
    assert found["kv_cache"] == pytest.approx(_right(state, found), abs=0.05)
    # what was seen at the start and not asked for is there when all is allocated
    left = found["seen"] - found["requested"] + state["peak"]
    assert found["available"] == pytest.approx(left, abs=0.05)
    # and of what the entrypoint keeps free, vLLM's own processes took their part before
    kept = _plan().keep_free_gib
    assert found["seen"] - found["requested"] >= kept - state["own"]
    # in all other states the release gives the same
    if "graphs are measured" not in name:
        assert stock[f"{name}, {runner}"] == pytest.approx(found, abs=0.02)


def test_a_card_of_its_own_memory_sees_no_change(
    stock: dict[str, Any], patched: dict[str, Any]
) -> None:
    for runner in RUNNERS:
        name = f"a card of its own memory, {runner}"
        assert patched[name] == stock[name]
        assert patched[name]["graphs"] == pytest.approx(ALL_GRAPHS, abs=0.02)
