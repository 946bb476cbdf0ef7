"""The interpreters that patch tests run in: what build.py bakes for the cpu target."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkforge import pins, pipeline
from sparkforge.context import UNPATCHED, Context
from sparkforge.environment import python_path
from sparkforge.index import Index
from sparkforge.sources import Access
from sparkforge.stages import items
from tests.patches.checkout import CHECKOUT, store
from tests.patches.trees import tree

# the probes import thousands of modules of vLLM and torch: the byte code that the first one
# leaves in the environment makes the others 30 s faster
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def cpu_context() -> Context:
    """The cpu target's build, with the store that the user has."""
    loaded = pins.load(CHECKOUT / "pins.yaml")
    return Context(
        root=CHECKOUT, pins=loaded, pins_path=CHECKOUT / "pins.yaml", store=store(),
        target_name="cpu", target=loaded.target("cpu"), platform="linux/amd64",
        access=Access(Index(), {}, offline=False),
    )  # fmt: skip


@pytest.fixture(scope="session")
def baked(cpu_context: Context) -> dict[str, Path]:
    """Folders of the patched and the unpatched environment, by label; made where missing."""
    context = cpu_context
    todo = [item for item in items(context, "smoke") if item.label != "smoke"]
    return {line.label: line.artefact.path for line in pipeline.run(context, todo)}


@pytest.fixture(scope="session")
def patched_python(baked: dict[str, Path]) -> Path:
    """Interpreter of the environment that has the patched wheel."""
    return python_path(baked["environment"])


@pytest.fixture(scope="session")
def stock_python(baked: dict[str, Path]) -> Path:
    """Interpreter of the environment that has the release as upstream made it."""
    return python_path(baked[f"environment ({UNPATCHED})"])


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FlashInfer's tree as released and with its series; tests read them."""
    folder = tmp_path_factory.mktemp("flashinfer")
    return {
        "stock": tree("flashinfer", folder / "stock", patched=False),
        "patched": tree("flashinfer", folder / "patched", patched=True),
    }
