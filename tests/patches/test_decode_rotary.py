"""gpt-oss's rotary embedding and cache update as one operator: on the CPU, in vLLM's own layer.

As in test_decode_kernels.py, a contract stands in for the kernel (probes/decode_contract.py), and
the place of each slot in the cache comes from the CUDA sources. The rest is vLLM's own
(probes/decode_rotary.py).
"""

import shutil
from typing import Any

import numpy as np
import pytest

ROUNDED = 0.008
"""Largest relative error against the usual path, which rounds cosines to BF16, after the o
product (measured: 0.004)."""
FP8_ROUNDED = 0.02
"""The same with queries and a cache in E4M3, of which such a difference moves some (0.012)."""
ORDERS = ("heads first", "slots first")
ROWS = (0, 1, 2, 5, 8, 9, 40)
BACKENDS = ("triton_attn", "flashinfer", "flash_attn")
LAUNCH = ["rotate_and_cache"]

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")


@pytest.fixture(scope="module")
def rotary(computed: Any) -> Any:
    return computed["rotary"]


def _heads_written(rows: int) -> int:
    """Two heads for each row but the second, which only pads."""
    return 2 * (rows - (rows > 1))


# -- one layer -------------------------------------------------------------------------------------


@needs_nvcc
def test_slots_lie_where_every_backend_has_them(rotary: Any) -> None:
    cases = {f"{backend}, {order}" for backend in BACKENDS for order in ORDERS}
    assert rotary["places"] == dict.fromkeys(cases, True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", ROWS)
def test_one_launch_rotates_and_writes_the_cache(rotary: Any, rows: int, order: str) -> None:
    answer = rotary["compute"][order][str(rows)]
    assert answer["launches"] == (LAUNCH if rows else [])
    assert all(error < ROUNDED for error in answer["errors"])
    assert answer["values"]
    assert answer["others"]
    assert answer["written"] == _heads_written(rows)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [1, 5, 9])
def test_an_fp8_cache_is_one_launch_too(rotary: Any, rows: int, order: str) -> None:
    """With scales that are not one, and queries that vLLM quantizes, for this backend."""
    answer = rotary["compute"]["fp8"][f"{rows}, {order}"]
    assert answer["launches"] == ["rotate_and_cache_fp8"]
    assert all(error < FP8_ROUNDED for error in answer["errors"])
    assert answer["values"]
    assert answer["others"]
    assert answer["written"] == _heads_written(rows)


def test_the_table_of_cosines_comes_back_from_sleep(rotary: Any) -> None:
    answer = rotary["compute"]["after sleep"]
    assert answer["launches"] == LAUNCH
    assert all(error < ROUNDED for error in answer["errors"])


@needs_nvcc
@pytest.mark.parametrize("scale", ["0.37", "1"])
def test_e4m3_is_to_the_byte_what_vllm_writes(decode_layout: Any, scale: str) -> None:
    """Every BF16 number, as the CUDA source computes it."""
    bits, codes = np.arange(1 << 16, dtype=np.uint32), np.arange(0x7F)
    numbers = np.where(codes < 8, codes, 8 + codes % 8) * 2.0 ** (np.maximum(codes // 8, 1) - 10)
    with np.errstate(over="ignore", invalid="ignore"):
        quotients = np.abs((bits << 16).view(np.float32) / np.float32(scale)).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    low, high = (np.searchsorted(middles, quotients, side) for side in ("left", "right"))
    wanted = np.where(low % 2 == 0, low, high) | bits >> 15 << 7  # ties to even, 448 beyond it
    wanted[np.isnan(quotients)] = 0x7F
    assert decode_layout["e4m3"][scale] == wanted.tolist()


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_rows_beyond_the_slots_only_pad(rotary: Any, rows: int) -> None:
    answer = rotary["compute"]["rows without slots"][str(rows)]
    assert answer["launches"] == LAUNCH
    assert max(answer["errors"]) < ROUNDED
    assert answer["written"] == _heads_written(rows - 1)


def test_without_a_cache_queries_are_rotated(rotary: Any) -> None:
    for case in ("no cache yet", "failed self-check, no cache yet"):
        answer = rotary["compute"][case]
        assert answer["launches"] == (LAUNCH if case == "no cache yet" else [])
        assert answer["errors"][0] < ROUNDED
        assert answer["written"] == 0


@pytest.mark.parametrize("rows", [0, 1, 5, 9])
def test_a_failed_self_check_leaves_the_usual_path(rotary: Any, rows: int) -> None:
    answer = rotary["compute"]["failed self-check"][str(rows)]
    assert answer["launches"] == []
    assert all(error < ROUNDED for error in answer["errors"])
    assert answer["values"]
    assert answer["written"] == _heads_written(rows)


@pytest.mark.parametrize("wrong", ["the last dimension", "an odd stride", "an odd address"])
def test_a_cache_that_the_kernel_cannot_write_is_an_error(rotary: Any, wrong: str) -> None:
    assert rotary["compute"][wrong].startswith("a KV cache with strides (")


def test_a_scale_for_each_head_is_an_error(rotary: Any) -> None:
    assert rotary["compute"]["a scale a head"] == "a KV cache with 2 scales"


def test_the_fake_gives_what_the_operator_gives(rotary: Any) -> None:
    assert rotary["compute"]["fake"] == [[5, 4, 64], "torch.bfloat16", [256, 64, 1]]


def test_a_model_compares_the_kernel_once(rotary: Any) -> None:
    for dtype, form in {"auto": "", "fp8": "FP8 "}.items():
        (line,), nothing = rotary["compute"]["said"][dtype]
        name = f"rotary embedding and {form}KV cache 4 x 2"
        assert line.startswith(f"INFO: Decode kernels are used for {name}: they differ by 0.0")
        assert nothing == []
