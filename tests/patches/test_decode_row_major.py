"""gpt-oss's experts in CUTLASS's order: decode kernels for few rows, CUTLASS for more.

As in test_decode_kernels.py, stand-ins compute on a CPU. Where scales lie is compared with
the formula that test_mxfp8_moe_sm12x.py compares with CUTLASS's and FlashInfer's compiled code.
"""

import shutil
from typing import Any

import pytest

ROUNDED = 0.004
"""Largest relative error of a result that was rounded to BF16 twice."""
MXFP8 = (0.01, 0.08)
"""Least and largest relative error of a result whose activations were rounded to MXFP8 twice."""
KIND = "row-major MXFP4 experts"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")


@pytest.fixture(scope="module")
def answers(computed: Any) -> Any:
    return computed["row_major"]


@needs_nvcc
def test_weights_and_scales_are_read_in_cutlass_s_order(computed: Any) -> None:
    right = dict.fromkeys(("scales", "columns", "chunks", "words"), True)
    assert computed["scale order"] == right


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9, 16, 17])
def test_few_rows_take_the_kernels_and_more_take_cutlass(answers: Any, rows: int) -> None:
    answer = answers[str(rows)]
    most = {2: 8, 9: 16, 17: 0}.get(rows, rows)
    kernels = [f"experts_rows_gate_up_{most}", f"experts_rows_down_{most}", "experts_combine"]
    assert answer["launches"] == (kernels if most else [])
    assert answer["cutlass"] == ([17] if rows == 17 else [])
    if rows == 17:
        assert MXFP8[0] < answer["error"] < MXFP8[1]
    else:
        assert answer["error"] < ROUNDED


def test_rows_may_come_without_their_padding(answers: Any) -> None:
    assert answers["without padding"]["inner"] == 96  # of 128
    assert answers["without padding"]["error"] < ROUNDED


def test_the_self_check_compares_with_torch_and_cutlass(answers: Any) -> None:
    (line,) = answers["said"]
    assert line.startswith(f"INFO: Decode kernels are used for {KIND} 6 x 256 x 128: ")
    assert "they differ by 0.00" in line


def test_made_up_weights_are_compared_with_torch_only(answers: Any) -> None:
    used, (line,), calls = answers["zero weights"]
    assert used
    assert line.startswith(f"INFO: Decode kernels are used for {KIND} ")
    assert calls == 0


def test_switched_off_all_rows_take_cutlass(answers: Any) -> None:
    assert answers["off"] == [False, [], 0]
    assert MXFP8[0] < answers["off computes"] < MXFP8[1]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ("LoRA", "LoRA is enabled"),
        ("a scale of 191", "an E8M0 scale is 191, above 190"),
        ("an odd size", "an intermediate size of 90 is not a multiple of 32"),
    ],
)
def test_experts_that_they_cannot_take_stay_with_cutlass(
    answers: Any, layer: str, reason: str
) -> None:
    used, lines, _ = answers[layer]
    assert not used
    assert lines == [f"INFO: Decode kernels are not used for {KIND}: {reason}."]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("3 % too large", "more than 0.02"),
        ("CUTLASS is wrong", "ValueError: FlashInfer's CUTLASS MoE differs by "),
    ],
)
def test_wrong_kernels_are_switched_off(answers: Any, wrong: str, reason: str) -> None:
    (line,) = answers[wrong]
    assert line.startswith(f"WARNING: Decode kernels for {KIND} are switched off. ")
    assert reason in line
