"""The TMA scatter that SM12x lacks: triton_kernels does without, and Triton says what is missing.

The real triton_kernels 3.5.1 and Triton 3.7.1, with our series and without, build gpt-oss's down
projection with a fused scatter. Nothing is run: no GPU is at hand.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.context import Context
from sparkforge.check.proofs import Readers
from tests.patches import triton_aot
from tests.patches.triton_aot import SHARED_LIMIT

Build = Callable[[str, bool, bool], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def build(
    cpu_context: Context, patched_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Build:
    """Build for a capability, with our series of Triton and of triton_kernels or without."""
    readers = Readers(cpu_context)

    def go(capability: str, triton: bool, kernels: bool) -> list[dict[str, Any]]:
        folder = triton_aot.packages(cpu_context, triton=triton, kernels=kernels)
        out = tmp_path_factory.mktemp("scatter")
        cases = triton_aot.build(patched_python, folder, capability, readers, out)
        assert [case["block_m"] for case in cases] == [16, 32]
        return cases

    return go


def test_fused_scatter_builds_without_tma(build: Build) -> None:
    for case in build("121", False, True):
        assert case["error"] == ""
        (kernel,), (code,) = case["kernels"], case["code"]
        assert kernel["scatter4"] == 0
        assert kernel["gather4"] > 0, "SM12x gathers by TMA, and goes on doing so"
        assert 0 < kernel["shared"] <= SHARED_LIMIT
        # as measured with Triton 3.8.0, to notice more
        assert code.stack == (48 if case["block_m"] == 32 else 0)
        assert set(code.mma) == {"HMMA.16816.F32.BF16"}


def test_sm10x_still_scatters_by_tma(build: Build) -> None:
    for case in build("100", True, True):
        assert case["error"] == ""
        assert sum(kernel["scatter4"] for kernel in case["kernels"]) > 0


def test_a_tma_scatter_is_refused_by_its_name(build: Build) -> None:
    for case in build("121", True, False):
        assert case["error"].startswith("PTXASError")  # which autotuners skip
        assert "SM 12.1" in case["error"]
        assert "_p_matmul_ogs" in case["error"]
        assert "tl.store" in case["error"]
        assert "ptxas-blackwell" not in case["error"]
        assert len(case["error"]) < 500


def test_the_releases_end_in_ptxas(build: Build) -> None:
    """The control: why the patches are there."""
    for case in build("121", False, False):
        assert "'.tile::scatter4' not supported on .target 'sm_121a'" in case["error"]
        assert "Repro command" in case["error"]
