"""MXFP8 experts in FlashInfer's CUTLASS MoE on SM12x: what the kernel is given, and when.

The selection on all devices is in test_selection.py's tables; here are the reasons for a refusal,
and the numbers: vLLM's own preparation and call, into an emulation of FlashInfer's contract that
reads the tensors as FlashInfer would (probes/mxfp8_moe_reference.py).
"""

from pathlib import Path
from typing import Any

import pytest

from tests.patches.probes.probe_mxfp8_moe import CASES
from tests.patches.probing import ask

# The result is rounded to BF16; all else is the same arithmetic on both sides.
TOLERANCE = 0.003


@pytest.fixture(scope="module")
def answers(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ask(patched_python, "probe_mxfp8_moe", folder=tmp_path_factory.mktemp("mxfp8"))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gets_what_its_contract_says(answers: Any, name: str) -> None:
    answer = answers["cases"][name]
    assert answer["error"] < TOLERANCE
    assert answer["inter"] == -(-CASES[name]["inter"] // 128) * 128


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("kernels", "kernels for this device in the installed FlashInfer"),
        ("class", "kernels for this device in the installed FlashInfer"),
        ("prebuilt modules", "flashinfer-jit-cache uninstalled"),
        ("compiler", "nvcc"),
        ("CUDA_HOME", "/no/such/cuda/bin/nvcc"),
        ("hidden size", "multiple of 128, not 2880"),
        ("biases", "biases"),
        ("activation", "swigluoai"),
        ("data parallelism", "dispatch of tokens"),
        # FlashInfer gets no map of experts: any other placement would be computed wrongly
        ("equal parts", "not 5 experts on 2 ranks, placed linear"),
        ("linear placement", "not 4 experts on 2 ranks, placed round_robin"),
        ("JIT", "FLASHINFER_DISABLE_JIT"),
    ],
)
def test_it_is_refused_with_the_reason(answers: Any, missing: str, words: str) -> None:
    assert words in answers["reasons"][missing]


@pytest.mark.parametrize("there", ["nothing", "nothing, equal parts", "nothing, a pack"])
def test_it_is_taken_where_nothing_is_missing(answers: Any, there: str) -> None:
    assert answers["reasons"][there] is None


def test_it_is_never_the_automatic_choice(answers: Any) -> None:
    assert answers["reasons"]["automatically"] == "MARLIN"
