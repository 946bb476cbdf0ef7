"""Items by what they need: order, and results by item."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.context import STAGES, Context
from sparkforge.build.graph import graph_of, ordered, unpatched_environment
from sparkforge.build.item import Item, Results
from sparkforge.build.results import EnvironmentResult, WheelResult
from sparkforge.runtime.engine import BaseImage
from tests.results import artefact, context_of, step


@dataclass(frozen=True)
class Made:
    name: str


def make(folder: Path, results: Results) -> Made:
    return Made(folder.name)


def item(stage: str, label: str, *needs: Item[Any]) -> Item[Made]:
    return Item(stage, label, {"label": label}, Made, make, needs=needs)


def context(target: str, **more: Any) -> Context:
    return context_of(target, base=BaseImage("base", "sha256:" + "b" * 64), **more)


# an engine is only asked when something is made
ENGINE: Any = object()


@pytest.mark.parametrize("target", ["cpu", "spark", "rtx"])
def test_inputs_are_json_values(target: str) -> None:
    """An image keeps them as JSON, and ``verify`` compares that with the checkout's."""
    for item in graph_of(context(target, engine=ENGINE)).until("smoke"):
        assert json.loads(json.dumps(item.inputs)) == item.inputs, item.label


def test_a_plan_is_in_the_order_of_the_stages() -> None:
    items = graph_of(context("cpu")).until("smoke")
    # no build without changes reads the release: nothing of it is published
    intermediate = [item.label for item in items if item.intermediate]
    assert intermediate == ["wheel vllm (unpatched)", "environment (unpatched)"]
    assert [item.label for item in items] == [
        "source vllm",
        "series vllm",
        "kernels",
        "plugin",
        "wheel vllm",
        "wheelhouse",
        "environment",
        "wheel vllm (unpatched)",
        "environment (unpatched)",
        "smoke",
    ]
    every = [item.label for item in graph_of(context("spark", engine=ENGINE)).until("smoke")]
    layers = ("vllm", "triton-kernels", "flashinfer", "triton")
    assert sorted(every[:4]) == sorted(f"source {name}" for name in layers)
    assert every[4:8] == [label.replace("source", "series") for label in every[:4]]
    assert every[-4:] == ["wheelhouse", "pack flashinfer", "preflight checkpoint", "image"]


@pytest.mark.parametrize("engine", [None, ENGINE])
@pytest.mark.parametrize("target", ["rtx", "spark"])
def test_what_serves_has_the_pack(target: str, engine: Any) -> None:
    graph = graph_of(context(target, engine=engine))
    assert graph.pack is not None and graph.pack in graph.product.needs
    assert graph.pack.key == graph.product.inputs["wheels"]["pack flashinfer"]
    without = graph_of(context(target, engine=engine, pack=()))
    assert without.pack is None
    assert "pack flashinfer" not in without.product.inputs["wheels"]
    # the release has none
    release = unpatched_environment(context(target))
    assert "packs" not in {item.stage for item in ordered([release])}


@pytest.mark.parametrize("target", ["cpu", "rtx", "spark"])
@pytest.mark.parametrize("wheels", ["overlay", "compile"])
@pytest.mark.parametrize("engine", [None, ENGINE])
def test_every_item_comes_after_what_it_needs_and_none_twice(
    target: str, wheels: str, engine: Any
) -> None:
    graph = graph_of(context(target, wheels=wheels, engine=engine))
    for stage in STAGES:
        items = graph.until(stage)
        assert len({item.label for item in items}) == len(set(items)) == len(items)
        for at, item in enumerate(items):
            assert set(item.needs) <= set(items[:at]), item.label
        indices = [STAGES.index(item.stage) for item in items]
        assert indices == sorted(indices)
        assert all(index <= STAGES.index(stage) for index in indices)


def test_what_is_needed_comes_along_also_where_its_stage_is_later() -> None:
    late = item("smoke", "late")
    early = item("sources", "early")
    goal = item("wheels", "goal", late, early)
    assert ordered([goal]) == [early, late, goal]


def test_items_of_a_stage_keep_their_order() -> None:
    parts = [item("wheels", name) for name in ("b", "a", "c")]
    assert ordered([item("image", "image", *parts)])[:3] == parts


def test_items_cannot_need_each_other() -> None:
    first = item("wheels", "first")
    second = item("wheels", "second", first)
    with pytest.raises(FrozenInstanceError):
        first.needs = (second,)  # type: ignore[misc]


def test_a_result_is_that_of_its_item_and_not_of_one_like_it() -> None:
    first, second = item("wheels", "same"), item("wheels", "same")
    results = Results([step(first, Made("x"))])
    assert results.of(first) == Made("x")
    assert results.step(second) is None
    assert results.step(None) is None
    with pytest.raises(KeyError):
        results.artefact(second)


def test_a_wheel_that_needs_no_builder_does_not_bring_one() -> None:
    overlaid = graph_of(context("cpu")).until("smoke")
    compiled = graph_of(context("spark", wheels="compile")).until("wheels")
    assert "builder" not in {item.stage for item in overlaid}
    assert [item.label for item in compiled if item.stage == "builder"] == [
        "builder's wheelhouse",
        "builder",
    ]


def test_what_is_served_has_its_type() -> None:
    assert graph_of(context("cpu")).product.kind is EnvironmentResult
    kinds = {
        cold: graph_of(context("cpu", engine=ENGINE, cold=cold)).product.kind.__name__
        for cold in (False, True)
    }
    assert kinds == {False: "ImageResult", True: "ImageArchiveResult"}


def test_an_artefact_of_one_wheel_is_no_other() -> None:
    wheel = artefact(WheelResult("x.whl", "0" * 64, "1"))
    assert wheel != replace(wheel, result=WheelResult("y.whl", "0" * 64, "1"))


@pytest.mark.parametrize("engine", [None, ENGINE])
def test_every_target_gets_the_same_plugin_beside_its_wheels(engine: Any) -> None:
    made = {target: graph_of(context(target, engine=engine)) for target in ("cpu", "rtx", "spark")}
    keys = set()
    for graph in made.values():
        assert graph.kernels is not None and graph.plugin is not None
        assert graph.plugin in graph.own and graph.plugin in graph.product.needs
        assert graph.product.inputs["wheels"]["plugin"] == graph.plugin.key
        assert graph.plugin.needs == (graph.kernels,)
        assert not [item for item in graph.wheels.values() if graph.kernels in item.needs]
        keys.add((graph.kernels.key, graph.plugin.key))
    assert len(keys) == 1
    # what is compiled does not depend on the package
    assert made["cpu"].kernels is not None
    assert "package" not in made["cpu"].kernels.inputs


@pytest.mark.parametrize("target", ["cpu", "rtx"])
def test_the_release_gets_no_plugin(target: str) -> None:
    release = unpatched_environment(context(target))
    assert {item.stage for item in ordered([release])} == {"smoke", "wheelhouse"}
