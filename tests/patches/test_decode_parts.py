"""The plugin as a whole: its parts, and what it says in /metrics.

Each other test of a part fails where VLLM_SPARKFORGE switches the part off, too: so `build.py
ablate` finds which tests a part has.
"""

from typing import Any

import pytest

PARTS = ("amx", "bf16", "experts", "layers", "memory", "metrics", "norms", "rotary")
CONTRACTS = ("bf16", "experts", "layers", "memory", "norms", "rotary")
"""Parts of which vLLM is asked whether it is as they need it."""


@pytest.fixture(scope="module")
def parts(computed: Any) -> Any:
    return computed["parts"]


# -- parts ---------------------------------------------------------------------------------------


def test_all_parts_are_in_use_with_this_vllm(parts: Any) -> None:
    assert parts["all"] == {"used": list(PARTS), "said": []}
    assert parts["registered"] == [True, []]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_can_be_switched_off(parts: Any, part: str) -> None:
    assert set(parts["off"]) == set(PARTS)
    assert parts["off"][part] == {"used": [name for name in PARTS if name != part], "said": []}


def test_each_difference_of_vllm_is_found(parts: Any) -> None:
    assert len(parts["differs"]) == 28
    for name, (wanted, found) in parts["differs"].items():
        assert found.startswith(wanted), name


@pytest.mark.parametrize("part", CONTRACTS)
def test_a_part_is_off_where_vllm_differs(parts: Any, part: str) -> None:
    answer = parts["broken"][part]
    # the half of a layer is prepared by our experts
    lost = {part, "norms"} if part == "experts" else {part}
    assert answer["used"] == [name for name in PARTS if name not in lost]
    reasons = [found for _, found in parts["differs"].values()]
    (line,) = answer["said"]
    assert line in [f"WARNING: vllm-sparkforge: part {part} is off: {why}." for why in reasons]
    assert answer["registered"] == [True, []]


def test_nothing_is_registered_where_vllm_differs_in_what_all_parts_need(parts: Any) -> None:
    assert set(parts["broken"]) == {"", *CONTRACTS}
    called, (line,) = parts["broken"][""]["registered"]
    assert not called
    assert line.startswith("WARNING: vllm-sparkforge is off: this vLLM has no ")


# -- /metrics ------------------------------------------------------------------------------------


def test_metrics_say_what_is_in_use(computed: Any) -> None:
    answer = computed["metrics"]
    # a shape that failed, or a rank, and the kind counts as not used
    assert answer["worker"] == {"MXFP4": False, "BF16": True}
    kinds = {"MXFP4": False, "BF16": False, "MXFP8": True, "norms and routers": True}
    assert answer["frontend"] == kinds
    line = 'vllm:decode_kernels_in_use{{engine="{}",kind="{}",model_name="model"}} {:.1f}'
    wanted = sorted(line.format(engine, *kind) for engine in (0, 1) for kind in kinds.items())
    # each of several API servers
    assert [sorted(text) for text in answer["texts"]] == [wanted] * 2
    assert answer["text of none"] == answer["text of off"] == []


def test_what_workers_leave_for_metrics_ends_no_start_and_does_not_pile_up(computed: Any) -> None:
    answer = computed["metrics"]
    assert answer["left"] == {"old": False, "others": True}
    (line,) = answer["unwritable"]
    assert line.startswith("WARNING: /metrics will not tell of the decode kernels: [Errno 20]")


def test_what_is_in_use_is_no_part_of_the_compile_cache_s_key(computed: Any) -> None:
    """Unless another operator is traced, as in MX layers."""
    assert computed["metrics"]["same key"]
