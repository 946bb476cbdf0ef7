"""Conditions under which a patch leaves its series."""

from __future__ import annotations

import pytest

from sparkforge.series import lint


@pytest.mark.parametrize(
    ("text", "versions", "holds"),
    [
        ("vllm>=0.33.0; as upstream does", {"vllm": "0.33.0"}, True),
        ("vllm>=0.33.0", {"vllm": "0.34.0rc1"}, True),
        ("vllm>=0.33.0; as upstream does", {"vllm": "0.32.1"}, False),
        ("flashinfer>=0.7.2; as upstream does", {"flashinfer": "0.7.2.post1"}, True),
        ("triton_kernels>=3.6,<4", {"triton-kernels": "3.7"}, True),
        ("vllm>=0.33.0", {"triton": "3.8.0"}, False),
        ("test; upstream has it", {"vllm": "9.9"}, False),  # its test says so, no version
    ],
)
def test_a_condition_is_evaluated(text: str, versions: dict[str, str], holds: bool) -> None:
    read = lint.drop_when(text)
    assert read is not None
    assert read.holds(versions) is holds
