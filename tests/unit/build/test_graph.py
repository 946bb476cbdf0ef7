"""The results of the real targets: order, needs, and keys."""

import json
from typing import Any

import pytest

from sparkforge.build.context import STAGES
from sparkforge.build.graph import Graph
from sparkforge.build.results import EnvironmentResult, ImageArchiveResult, ImageResult
from sparkforge.runtime.engine import BaseImage
from tests.results import build_of

# an engine is only asked when something is made
ENGINE: Any = object()
ENGINES = pytest.mark.parametrize("engine", [None, ENGINE])
BASE = BaseImage("base", "sha256:" + "b" * 64)


def graph(target: str, **more: Any) -> Graph:
    return build_of(target, base=BASE, **more).graph


def test_plan_is_in_the_order_of_the_stages() -> None:
    items = graph("cpu").until("smoke")
    assert [item.label for item in items] == [
        *("source vllm", "series vllm", "kernels", "plugin", "wheel vllm", "wheelhouse"),
        *("environment", "smoke"),
    ]
    every = [item.label for item in graph("spark", engine=ENGINE).until("smoke")]
    layers = ("vllm", "triton-kernels", "flashinfer", "triton")
    assert sorted(every[:4]) == sorted(f"source {name}" for name in layers)
    assert every[4:8] == [label.replace("source", "series") for label in every[:4]]
    assert every[-4:] == ["wheelhouse", "pack flashinfer", "preflight checkpoint", "image"]


@ENGINES
@pytest.mark.parametrize("target", ["rtx", "spark"])
def test_product_has_the_pack(target: str, engine: Any) -> None:
    packed = graph(target, engine=engine)
    assert packed.pack is not None and packed.pack in packed.product.needs
    assert packed.pack.key == packed.product.inputs["wheels"]["pack flashinfer"]
    without = graph(target, engine=engine, pack=())
    assert without.pack is None
    assert "pack flashinfer" not in without.product.inputs["wheels"]


@ENGINES
@pytest.mark.parametrize("target", ["cpu", "rtx", "spark"])
@pytest.mark.parametrize("wheels", ["overlay", "compile"])
def test_every_item_comes_once_after_its_needs(target: str, wheels: str, engine: Any) -> None:
    whole = graph(target, wheels=wheels, engine=engine)
    for stage in STAGES:
        items = whole.until(stage)
        assert len({item.label for item in items}) == len(set(items)) == len(items)
        for at, item in enumerate(items):
            assert set(item.needs) <= set(items[:at]), item.label
            # an image keeps them as JSON, and ``verify`` compares that with the checkout's
            assert json.loads(json.dumps(item.inputs)) == item.inputs, item.label
        indices = [STAGES.index(item.stage) for item in items]
        assert indices == sorted(indices)
        assert all(index <= STAGES.index(stage) for index in indices)
    houses = [item.label for item in whole.until("wheels") if "wheelhouse" in item.label]
    # the cpu target's series changes no native file
    compiles = wheels == "compile" and target != "cpu"
    assert houses == (["builder's wheelhouse"] if compiles else [])


def test_product_has_its_type() -> None:
    assert graph("cpu").product.kind is EnvironmentResult
    kinds = [graph("cpu", engine=ENGINE, cold=cold).product.kind for cold in (False, True)]
    assert kinds == [ImageResult, ImageArchiveResult]


@ENGINES
def test_every_target_gets_the_same_plugin(engine: Any) -> None:
    keys = set()
    for target in ("cpu", "rtx", "spark"):
        made = graph(target, engine=engine)
        assert made.kernels is not None and made.plugin is not None
        assert made.plugin in made.own and made.plugin in made.product.needs
        assert made.product.inputs["wheels"]["plugin"] == made.plugin.key
        assert made.plugin.needs == (made.kernels,)
        assert not [item for item in made.wheels.values() if made.kernels in item.needs]
        # what is compiled does not depend on the package
        assert "package" not in made.kernels.inputs
        keys.add((made.kernels.key, made.plugin.key))
    assert len(keys) == 1
