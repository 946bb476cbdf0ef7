"""The interpreters that patch tests run in: what build.py bakes for the cpu target."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparkforge.build import cached, image
from sparkforge.build.context import UNPATCHED, Context
from sparkforge.build.graph import Build
from sparkforge.core.run import call
from sparkforge.runtime.environment import python_path
from tests import reference
from tests.patches import dequant_probe, probing, scripting, stock
from tests.patches.checkout import CHECKOUT, ROOT, context
from tests.patches.probing import PROMPT
from tests.patches.trees import tree
from tests.reference import TinyCheckpoint, make_tiny
from tests.support import ONE_THREAD

# the probes import thousands of modules of vLLM and torch: the byte code that the first one
# leaves in the environment makes the others 30 s faster
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Two workers have two cores: a second thread of one waits for a thread of the other at every small
# product (measured: a test of numpy's took 2.2 s of CPU with two, 0.07 with one, a whole probe 37
# and 23).
os.environ |= {"OPENBLAS_NUM_THREADS": "1", **ONE_THREAD}


HERE = Path(__file__).resolve().parent
# Files that share a fixture of the session; every other file is a group of its own.
_SHARED = {
    "flashinfer": (
        "flashinfer_python flashinfer_moe_module flashinfer_moe_sources machine_code packs"
    ),
    # what forks.py starts for one of them is there for the others
    "forks": (
        "agents agents_in agents_time bf16_dequant cpu_isa decode_choice decode_half "
        "decode_kernels decode_parts decode_rotary decode_row_major fastsafetensors harmony_text "
        "marlin_moe_padding mxfp4_layers mxfp8_moe_backend plugin "
        "profiles selection stock trial unified_memory"
    ),
    "scripting": "clients coding_agents conformance prefix_cache",
}
_GROUPS = {f"test_{name}": group for group, names in _SHARED.items() for name in names.split()}
# The groups that take longest, longest first: begun last, one of them would leave the other worker
# idle. A wrong order costs only time.
_LONGEST = ("forks", "test_chat", "scripting", "flashinfer", "test_serving", "test_preflight")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test here: --dist loadgroup runs a group in one worker. Sort them."""

    def group(item: pytest.Item) -> str:
        return _GROUPS.get(item.path.stem, item.path.stem)

    places = [index for index, item in enumerate(items) if item.path.parent == HERE]
    ours = [items[index] for index in places]
    ours.sort(key=lambda one: [*_LONGEST, group(one)].index(group(one)))
    for index, item in zip(places, ours, strict=True):
        item.add_marker(pytest.mark.xdist_group(group(item)))
        items[index] = item


@pytest.fixture(scope="session", autouse=True)
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for all workers, in place of the user's; ``forks.known`` is the store's."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["VLLM_CACHE_ROOT"] = str(folder / "vllm-cache")


@pytest.fixture(scope="session")
def cpu_context() -> Context:
    """The cpu target's build, with the store that the user has."""
    return context("cpu")


@pytest.fixture(scope="session")
def baked(cpu_context: Context) -> dict[str, Path]:
    """Folders of the patched and the unpatched environment, by label; made where missing."""
    todo = Build(cpu_context).graph.until("image")
    cached.run(cpu_context, todo)
    release = {UNPATCHED: image.unpatched(cpu_context).path}
    return release | {item.label: item.path for item in todo}


@pytest.fixture(scope="session")
def patched_python(request: pytest.FixtureRequest) -> Path:
    """Interpreter of the environment that has the patched wheel and the plugin; see stock.py."""
    if stock.VARIABLE in os.environ:
        return python_path(Path(os.environ[stock.VARIABLE], stock.WITH_PLUGIN))
    return python_path(request.getfixturevalue("baked")["environment"])


@pytest.fixture(scope="session")
def stock_python(request: pytest.FixtureRequest) -> Path:
    """Interpreter of the environment that has the release as upstream made it."""
    if stock.VARIABLE in os.environ:
        return python_path(Path(os.environ[stock.VARIABLE], stock.RELEASE))
    return python_path(request.getfixturevalue("baked")[UNPATCHED])


@pytest.fixture(scope="session")
def decode_layout(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the index functions of the decode kernels' sources say; None without nvcc."""
    if shutil.which("nvcc") is None:
        return None
    program = tmp_path_factory.mktemp("layout") / "layout"
    words = ["nvcc", "-std=c++17", "-O0", "-arch=sm_90a", f"-I{CHECKOUT / 'kernels/csrc'}"]
    call(*words, "-o", program, HERE / "probes" / "probe_decode_layout.cu")
    return json.loads(call(program).stdout)


class Steps(dict[str, Any]):
    """What is computed, by step; a step that failed is its traceback, and fails who asks for it."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        assert not isinstance(found, str), found
        return found


@pytest.fixture(scope="session")
def decode_answers(
    patched_python: Path, decode_layout: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What the decode kernels' Python side answers and computes."""
    request = {"places": decode_layout, "capabilities": ["8.9", "9.0", "12.1"]}
    folder = tmp_path_factory.mktemp("decode")
    return probing.ask(patched_python, "probe_decode_kernels", request, folder=folder)


@pytest.fixture(scope="session")
def computed(decode_answers: Any) -> Any:
    """What they compute, with a contract in place of the kernels."""
    return Steps(decode_answers["computed"])


@pytest.fixture(scope="session")
def ranks(decode_answers: Any) -> list[Any]:
    """What each of two ranks of tensor parallelism computes."""
    return [Steps(decode_answers[f"rank {rank}"]) for rank in range(2)]


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FlashInfer's tree as released and with its series; tests read them."""
    folder = tmp_path_factory.mktemp("flashinfer")
    return {
        "stock": tree("flashinfer", folder / "stock", patched=False),
        "patched": tree("flashinfer", folder / "patched", patched=True),
    }


@pytest.fixture(scope="session")
def flashinfer_answers(stock_python: Path, trees: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What FlashInfer's Python says as released and with its series, by question."""

    def ask(tree: Path) -> Any:
        variables = {
            "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}",
            "FLASHINFER_WORKSPACE_BASE": str(tree.parent / "workspace"),
            "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        }
        words = ("probe_flashinfer", "autotuner,architectures,mxfp8_moe")
        return probing.ask(stock_python, *words, folder=tree.parent, variables=variables)

    return {name: ask(tree) for name, tree in trees.items()}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """The tiny gpt-oss checkpoint."""
    return make_tiny(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def model(tiny: TinyCheckpoint) -> reference.Model:
    """The tiny checkpoint in float32, apart from the engine."""
    return reference.load(tiny.path)


@pytest.fixture(scope="session")
def expected(model: reference.Model) -> npt.NDArray[np.float32]:
    """The model's logits for ``PROMPT``."""
    return reference.logits(model, list(PROMPT))


@pytest.fixture(scope="session")
def dequantized(
    tiny: TinyCheckpoint, patched_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What all steps of the probe of ``bf16_dequant`` wrote, on the best instruction set here."""
    # not forked, since a fork has no AMX
    run = dequant_probe.make(tiny, tmp_path_factory.mktemp("dequantized"), {})
    return run(patched_python, dequant_probe.STEPS)


@pytest.fixture(scope="session")
def scripted(
    patched_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[scripting.Scripts]:
    """A server behind its front door that says what a test wrote; see scripted.py."""
    with scripting.served(patched_python, tmp_path_factory.mktemp("scripted")) as one:
        yield one
