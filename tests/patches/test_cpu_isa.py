"""The tiny model on each instruction set that this CPU can present, and AMX tiles.

vLLM is shown a CPU without the better sets (sparkforge/runtime/isa.py), in a process of its own
for each; the best one is looked at where test_bf16_dequant.py looks, too.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparkforge.runtime import isa
from tests import reference
from tests.instruction_sets import hiding
from tests.patches.checkout import ROOT
from tests.patches.dequant_probe import TIMEOUT_S
from tests.patches.probing import PROMPT, assert_close, result_of, runner
from tests.reference import TinyCheckpoint
from tests.results import context_of, older_natives

# The engine may be shown more than the CPU has only where nothing runs; so these are real ones.
EXTENSION = {"amx": "_C", "avx512_bf16": "_C", "avx512": "_C_AVX512", "avx2": "_C_AVX2"}
EXPERTS = {"amx": "X86CPUUnquantizedExperts"}
Runs = Callable[[isa.InstructionSet, str], Path]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest,
    tiny: TinyCheckpoint,
    patched_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """What the probe wrote, by instruction set and the plugin's option ``experts``."""

    @cache
    def run(shown: isa.InstructionSet, experts: str) -> Path:
        if (shown, experts) == (isa.here(), "bf16_dequant"):
            found: Path = request.getfixturevalue("dequantized")
            return found
        asked = {"checkpoint": str(tiny.path), "prompt": list(PROMPT), "experts": experts}
        folder = tmp_path_factory.mktemp(shown)
        hidden = hiding(shown)
        hidden["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
        return runner("probe_logits", asked, folder, TIMEOUT_S, hidden)(patched_python, "isa")

    return run


@pytest.fixture(scope="module")
def here() -> isa.InstructionSet:
    """The best instruction set of this CPU."""
    best = isa.here()
    if best is None:
        pytest.skip("no x86-64 CPU with AVX2: its kernels are of another kind")
    return best


def test_amx_tiles_are_requested_before_the_first_forward(
    runs: Runs, here: isa.InstructionSet
) -> None:
    order = result_of(runs(here, "bf16_dequant"))["isa"]["order"]
    assert order[0] == "tiles"
    assert order.count("tiles") == 1
    assert "forward" in order


def test_a_system_that_denies_amx_tiles_is_warned_of(runs: Runs, here: isa.InstructionSet) -> None:
    out = runs(here, "bf16_dequant")
    assert "tiles_denied" in result_of(out)
    log = (out / "log").read_text(encoding="utf-8")
    assert log.count("does not let this process use AMX tiles") == 1


@pytest.mark.parametrize(
    ("shown", "experts"),
    [*((one, "bf16_dequant") for one in isa.INSTRUCTION_SETS), ("amx", "")],
)
def test_a_first_request_of_one_token_and_the_logits(
    shown: isa.InstructionSet,
    experts: str,
    runs: Runs,
    model: reference.Model,
    expected: npt.NDArray[np.float32],
) -> None:
    best = isa.here()
    if best is None or isa.INSTRUCTION_SETS.index(shown) < isa.INSTRUCTION_SETS.index(best):
        pytest.skip(f"this CPU has no {shown}, and what it lacks cannot be made up")
    if shown == "amx" and not experts and older_natives(context_of("cpu")):
        pytest.skip(
            "vLLM's AMX kernel is of an older release than its Python files (docs/build.md)"
        )
    out = runs(shown, experts)
    seen: dict[str, Any] = result_of(out)["isa"]
    assert seen["extensions"] == [EXTENSION[shown]]
    unquantized = EXPERTS.get(shown, "CPUUnquantizedExperts")
    assert seen["experts"] == [unquantized if experts else "CPUExpertsMxfp4"]
    tokens, _ = reference.greedy(model, [5], 1)
    assert seen["first"] == tokens
    assert_close(np.load(out / "isa.npy"), expected)
