"""FlashInfer's Python code with our series and without: run as it is, on the CPU."""

from typing import Any


def test_inputs_left_out_are_tuned_past(flashinfer_answers: dict[str, dict[str, Any]]) -> None:
    stock, patched = (
        flashinfer_answers["stock"]["autotuner"],
        flashinfer_answers["patched"]["autotuner"],
    )

    # a call with all its inputs keeps its profiles, and so the tuning files that name them
    assert patched["all there"] == stock["all there"]
    assert patched["all there"]["nearest"] == [[8, 4], [4, 8], [3, -1]]
    assert patched["all there"]["profiles"] == [
        [[rows, 4], [4, rows], [3, 2 * rows]] for rows in (1, 8, 64)
    ]

    def answers(case: str) -> tuple[Any, Any]:
        return patched[case]["nearest"], patched[case]["profiles"]

    tuned = (1, 8, 64)
    assert answers("linked input is None") == (
        [[8, 4], [0], [3, -1]],
        [[[n, 4], [0], [3, 2 * n]] for n in tuned],
    )
    assert answers("constrained input is None") == (
        [[8, 4], [4, 8], [0]],
        [[[n, 4], [4, n], [0]] for n in tuned],
    )
    # 16 rows, from the input that is there
    assert answers("first linked input is None") == (
        [[8, 4], [0]],
        [[[16, 4], [0]], [[32, 4], [0]]],
    )
    # None has a first dimension, of size 0, which is nobody's size
    assert answers("None has the linked dimension") == (
        [[8, 4], [8]],
        [[[n, 4], [n]] for n in tuned],
    )
    assert answers("initialized input is missing")[1] == [[[n, 4], [4, 16]] for n in tuned]


def test_the_release_ends_in_an_index_error(flashinfer_answers: dict[str, dict[str, Any]]) -> None:
    """The control: each place that the patch fixes."""
    stock = flashinfer_answers["stock"]["autotuner"]
    assert stock["first linked input is None"]["profiles"] == "IndexError"  # generation
    assert stock["first linked input is None"]["nearest"] == "IndexError"  # matching
    assert stock["constrained input is None"]["nearest"] == "IndexError"  # constraint
    assert stock["initialized input is missing"]["profiles"] == "IndexError"
    # and 16 rows are taken for none
    assert stock["None has the linked dimension"]["nearest"] == [[1, 4], [1]]


def test_12_1f_is_taken_where_12_1a_is(flashinfer_answers: dict[str, dict[str, Any]]) -> None:
    stock, patched = (
        flashinfer_answers["stock"]["architectures"],
        flashinfer_answers["patched"]["architectures"],
    )
    family = "-gencode=arch=compute_121f,code=sm_121f"

    assert patched["named flags"]["sm121f_nvcc_flags"] == family
    assert "sm121f_nvcc_flags" not in stock["named flags"]
    assert patched["12.1f"]["flags"] == stock["12.1f"]["flags"] == family
    for listed in ("12.1", "12.1a", "12.1f"):
        # the FP4 quantizer that the run time loads on 12.1
        assert "sm120f" in patched[listed]["capabilities"]
        assert "sm120f" not in stock[listed]["capabilities"]
    assert patched["12.1f"]["capabilities"] == patched["12.1a"]["capabilities"]
    for listed in ("12.0", "12.0f", "9.0"):
        assert patched[listed] == stock[listed]
