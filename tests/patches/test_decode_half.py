"""What follows the attention of a gpt-oss layer as one operator: on the CPU, in vLLM's own model.

As in test_decode_kernels.py, a contract stands in for the kernels (probes/decode_contract.py). The
model, its loading and the usual path are vLLM's (probes/decode_half.py).
"""

from typing import Any

import pytest

ROUNDED = 0.006
"""Largest relative error of a result that was rounded to BF16 three times."""
TWO_PATHS = 0.012
"""The same of two paths through three layers, which round in different places (measured: 0.005).
An output norm that is applied twice makes it 0.036, a sum that an Eagle head gets twice 0.25."""
FEW = ["route", "experts_gate_up_8", "experts_down_8", "experts_combine"]
NORMS = ["add_norm", "add_norm"]


@pytest.fixture(scope="module")
def half(computed: Any) -> Any:
    return computed["half"]


# -- one layer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16])
def test_few_rows_are_four_launches(half: Any, rows: int) -> None:
    answer = half["compute"]["rows"][str(rows)]
    most = {3: 8, 5: 8, 9: 16}.get(rows, rows)
    products = [f"experts_gate_up_{most}", f"experts_down_{most}"]
    assert answer["launches"] == ["route", *products, "experts_combine"]
    assert max(answer["errors"]) < ROUNDED
    assert answer["kept"]


@pytest.mark.parametrize("rows", [0, 17, 18])
def test_more_rows_take_the_usual_path_between_two_norms(half: Any, rows: int) -> None:
    answer = half["compute"]["rows"][str(rows)]
    assert answer["launches"] == (NORMS if rows else [])
    assert answer["shapes"] == [[rows, 192]] * 2
    assert all(error < ROUNDED for error in answer["errors"])
    assert len(answer["errors"]) == (2 if rows else 0)
    assert answer["kept"]


def test_the_last_layer_ends_with_the_models_norm(half: Any) -> None:
    answer = half["compute"]["the last layer"]
    assert answer["launches"] == FEW
    assert max(answer["errors"]) < ROUNDED


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_rows_that_pad_have_no_experts(half: Any, rows: int) -> None:
    answer = half["compute"]["padding"][str(rows)]
    assert answer["launches"][0] == "route"
    assert max(answer["errors"]) < ROUNDED


def test_the_fake_gives_what_the_operator_gives(half: Any) -> None:
    assert half["compute"]["fake"] == [[[5, 192], "torch.bfloat16", [192, 1]]] * 2


@pytest.mark.parametrize("why", ["Marlin's experts", "a hook"])
def test_experts_that_stay_with_marlin_leave_the_norms(half: Any, why: str) -> None:
    for rows, answer in half["compute"][why].items():
        assert answer["launches"] == NORMS, rows
        assert max(answer["errors"]) < ROUNDED + 0.002  # Marlin rounds more often


def test_a_failed_self_check_leaves_the_usual_path(half: Any) -> None:
    answers = half["compute"]["failed self-check"]
    launches = {rows: answer["launches"] for rows, answer in answers.items()}
    assert launches == {"0": [], "3": FEW[1:], "17": []}
    assert answers["0"]["shapes"] == [[0, 192]] * 2
    for rows in ("3", "17"):
        assert max(answers[rows]["errors"]) < ROUNDED + 0.002  # torch rounds the sum first
        assert answers[rows]["kept"]
    # weights that are loaded again are compared again
    assert half["compute"]["prepared again"]["launches"] == FEW


# -- the model -------------------------------------------------------------------------------------


def test_the_model_gives_the_same_hidden_states(half: Any) -> None:
    for rows in (4, 17):
        (alone,) = half["model"]["joined"][f"{rows} rows, 0 more"]
        with_more = half["model"]["joined"][f"{rows} rows, 4 more"]
        assert len(with_more) == 5
        assert max(alone, *with_more) < TWO_PATHS, rows


def test_all_layers_are_joined(half: Any) -> None:
    answer = half["model"]["joined"]
    assert answer["classes"] == ["JoinedBlock"] * 3
    # the first norm has nothing before it
    assert answer["norms"] == ["RMSNorm", *["NormalizedBefore"] * 3]
    assert answer["halves"] == [True] * 3
    assert answer["head"] == "Bf16Head"
    assert answer["launches with 4 rows"] == FEW * 3
    assert answer["launches with 17 rows"] == NORMS * 3
    # and torch.compile's cache tells them apart
    assert answer["key"] != half["model"]["off"]["key"]


def test_a_model_compares_the_kernels_once(half: Any) -> None:
    experts, norms = half["model"]["joined"]["said"]
    # 256 without our patch of Marlin's padding
    used = "INFO: Decode kernels are used for MXFP4 experts 32 x {} x 64: "
    assert experts.startswith((used.format(192), used.format(256)))
    assert norms.startswith("INFO: Decode kernels are used for norms and routers 32 x 192: ")
    assert half["model"]["off"]["said"] == []


# -- two ranks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(ranks: Any) -> Any:
    return [rank["half"] for rank in ranks]


def _reduced(launches: list[str]) -> list[str]:
    """What half a layer launches on a rank, by what it launches alone."""
    if launches[-1:] == ["experts_combine"]:
        return [*launches, "all_reduce", "add_norm"]
    return [*launches[:1], "all_reduce", *launches[1:]]


def test_two_ranks_add_up_what_they_have_of_the_experts(half: Any, two: Any) -> None:
    first = two[0]["compute"]
    for rows, answer in first["rows"].items():
        assert answer["launches"] == _reduced(half["compute"]["rows"][rows]["launches"]), rows
    answers = [first["the last layer"], *first["rows"].values(), *first["padding"].values()]
    for answer in answers:
        assert max(answer["errors"], default=0) < ROUNDED
        assert answer["kept"]
    for why in ("Marlin's experts", "a hook", "failed self-check"):
        for answer in first[why].values():
            assert answer["launches"].count("all_reduce") == 1, why
            assert max(answer["errors"], default=0) < ROUNDED + 0.002, why


def test_two_ranks_have_the_same_to_the_byte(two: Any) -> None:
    assert two[0]["compute"] == two[1]["compute"]


def test_a_layer_of_two_ranks_has_two_all_reduces(two: Any) -> None:
    """One after the attention; before all layers the embedding has one."""
    answer = two[0]["model"]["joined"]
    assert answer["halves"] == [True] * 3
    for rows, launches in (("4", FEW), ("17", NORMS)):
        layer = ["all_reduce", *_reduced(launches)]
        assert answer[f"launches with {rows} rows"] == ["all_reduce", *layer * 3]
        assert max(answer[f"{rows} rows, 4 more"]) < TWO_PATHS


def test_what_one_rank_cannot_use_no_rank_uses(two: Any) -> None:
    """Norms that ranks round differently would give a row other experts on each."""
    line = "WARNING: Decode kernels are not used for norms and routers: not all ranks can."
    for rank, one in enumerate(two):
        assert one["off on the second"]["joined"] == 0
        for why in ("wrong on the second", "off on the second"):
            assert (line in one[why]["said"]) == (rank == 0), why
        assert one["wrong on the second"]["launches"] == [*FEW[1:], "all_reduce"]
    assert two[0]["wrong on the second"]["bytes"] == two[1]["wrong on the second"]["bytes"]
