"""A trial of the kernels before a model is loaded, on a device that is not there.

As in test_decode_kernels.py, a contract stands in for the kernels; a spoilt one is found by the
process that runs them, and one that ends its process or does not end by the process that watches
it. tests/unit/serving/test_trial.py has what the entrypoint makes of a verdict.
"""

from typing import Any

import pytest

DENSE = ["rotary embedding and KV cache", "INT8", "MXFP8", "BF16"]
PROBLEMS = {
    "one tile": "INT8: wrong: differs by 0.05",
    "no memory": "INT8: memory: OutOfMemoryError: CUDA out of memory",
    "an error": "INT8: fault: RuntimeError: CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS",
    "a fault": "INT8: fault: the process ended with -11",
    "a hang": "INT8: hang: no result within 2 s",
}


def test_right_kernels_leave_a_server_as_it_is(computed: Any) -> None:
    found = computed["trial"]["right"]
    assert found["verdict"] == {"failed": [], "moe_backend": None, "expect": {}, "keep": True}
    assert found["kinds"] == DENSE
    assert found["packed"]
    assert found["metrics"][0].endswith(" 1.0")
    assert found["told"] == ["INFO: Using DecodeInt8LinearKernel for INT8 GEMM"]


def test_every_kind_of_kernel_is_tried(computed: Any) -> None:
    kinds = computed["trial"]["all kinds"]
    dense = ["rotary embedding and FP8 KV cache", "LOSSLESS", "NVFP4", "INT6"]
    assert list(kinds) == [*dense, "MXFP4 experts", "norms and routers"]
    assert {part for _, part in kinds.values()} == {"rotary", "layers", "experts", "norms"}
    assert {problem for problem, _ in kinds.values()} == {""}


def test_a_rank_of_two_tries_its_own_shapes(computed: Any) -> None:
    dense = {"qkv": [2560, 2880], "o": [2880, 2048], "lm_head": [100544, 2880]}
    assert computed["trial"]["two ranks"] == [dense, 1440]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kind_that_failed_changes_a_server(computed: Any, name: str) -> None:
    """What vLLM must say, /metrics, the key of compiled code, and the layer; not the others."""
    found, right = computed["trial"][name], computed["trial"]["right"]
    assert any(line.startswith(PROBLEMS[name]) for line in found["said"]), found["said"]
    assert found["kinds"] == DENSE
    assert found["verdict"] == {
        "failed": ["INT8"],
        "moe_backend": None,
        "expect": {"failed": "INT8", "linear": None},
        "keep": name != "no memory",
    }
    assert found["key"] != right["key"]
    assert [line.rpartition(" ")[2] for line in found["metrics"]] == ["0.0"]
    assert not found["packed"]
    assert found["told"] == [
        "WARNING: Kernels that failed their trial: INT8.",
        "INFO: Using PlainInt8LinearKernel for INT8 GEMM",
        "INFO: Decode kernels are not used for INT8: they failed their trial.",
    ]


CHOSEN = {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8", "experts": None}


@pytest.mark.parametrize(
    ("name", "tried", "chosen", "left_out"),
    [
        ("faster", 7, True, []),
        ("as fast", 7, False, []),
        ("one is wrong", 8, True, [0]),
        ("two fault", 9, True, [1, 5]),
        ("all are wrong", 6, False, []),
        ("not compiled", 0, False, []),
        ("another FlashInfer", 1, False, []),
    ],
)
def test_experts_of_prompts_are_chosen_by_what_is_right_and_faster(
    computed: Any, name: str, tried: int, chosen: bool, left_out: list[int]
) -> None:
    found = computed["trial"]["prompts"][name]
    assert len(found["kinds"]) == tried, found["kinds"]
    failed = [f"CUTLASS tactic {number}" for number in left_out]
    expect = {"failed": ",".join(failed).upper()} if failed else {}
    assert found["verdict"] == {
        "failed": failed,
        "moe_backend": "flashinfer_cutlass" if chosen else None,
        "expect": {**expect, **CHOSEN} if chosen else {},
        "keep": True,
    }


def test_a_servers_autotuner_leaves_failed_tactics_out(computed: Any) -> None:
    *chosen, another = computed["trial"]["prompts"]["left out"]
    first, second = [1, 2, 3], [4, 6]
    assert chosen == [[first, 1], [first, 1], [first, 2], [second, 4], [second, 6]]
    assert another == 6  # what the tuner of another operator had
