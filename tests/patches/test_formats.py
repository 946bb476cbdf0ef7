"""The formats of benchmarks/formats.py, and BF16 in 12 bits, in the interpreter they are for."""

from pathlib import Path
from typing import Any

import pytest

from tests.patches import probing

# Of normal weights: in docs/evidence/machine-code.md, or, of integers, the step that the largest
# of a block gives over the root of 12 (of 32 it is 2.37 standard deviations, of 64 2.63).
ERRORS = {
    "BF16": 0,
    "Q8_0": 0.0056,
    "INT8": 0.0060,
    "MXFP8": 0.0266,
    "INT6": 0.0221,
    "NVFP4": 0.095,
    "MXFP4": 0.1115,
}


@pytest.fixture(scope="module")
def seen(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return probing.ask(patched_python, "probe_formats", folder=tmp_path_factory.mktemp("formats"))


def test_formats_err_as_much_as_they_should(seen: Any) -> None:
    for name, wanted in ERRORS.items():
        assert seen["formats"][name]["errors"][0] == pytest.approx(wanted, rel=0.05), name


def test_zeros_stay_and_the_weight_s_size_does_not_matter(seen: Any) -> None:
    for name, found in seen["formats"].items():
        assert found["zeros"], name
        assert found["lone"] < 0.15, name
        normal, small, large = found["errors"]
        assert large == pytest.approx(normal, rel=0.02) or name == "Q8_0", name
        if name == "Q8_0":  # FP16 has no such scale
            assert small > 0.9, name
        else:
            assert small == pytest.approx(normal, rel=0.02), name


def test_every_pattern_survives_12_bits(seen: Any) -> None:
    assert all(found["equal"] for found in seen["patterns"].values())
    neighbours = seen["patterns"]["neighbours"]
    assert neighbours["listed"] == 2 * 128  # exponent 255: NaN and infinity
    assert neighbours["bits"] == 12 + 8 / 1024 + 32 * (128 + 1 + 256) / 65536
    assert seen["patterns"]["shuffled"]["listed"] > 50000
    assert seen["patterns"]["ranges"]["listed"] > 5000
    assert seen["patterns"]["small"]["listed"] == 0  # subnormals, where all are small


def test_permuted_channels_leave_the_function(seen: Any) -> None:
    same, wrong = seen["permuted"]
    assert same < 1e-4
    assert wrong > 0.1
