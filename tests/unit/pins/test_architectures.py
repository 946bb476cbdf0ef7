"""Which devices load machine code and compile PTX: NVIDIA's rules."""

from __future__ import annotations

import pytest

from sparkforge.pins.compiling import compiles, loads


@pytest.mark.parametrize(
    ("code", "on_12_0", "on_12_1"),
    [
        ("120", True, True),
        ("120f", True, True),
        ("120a", True, False),
        ("121", False, True),
        ("121f", False, True),
        ("121a", False, True),
        ("90a", False, False),
        ("80", False, False),
    ],
)
def test_machine_code(code: str, on_12_0: bool, on_12_1: bool) -> None:
    assert loads(code, "12.0") is on_12_0
    assert loads(code, "12.1") is on_12_1


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [("80", True), ("121", True), ("120f", True), ("90a", False), ("120a", False), ("130", False)],
)
def test_ptx_on_12_1(ptx: str, expected: bool) -> None:
    assert compiles(ptx, "12.1") is expected
