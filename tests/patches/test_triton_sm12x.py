"""The Triton MoE of gpt-oss compiles and fits on SM12x: built ahead of time, not run.

No GPU is at hand, so what a kernel computes is not tested here; that it can be built for the
device by the real triton_kernels, in the variant that vLLM asks for, and fits its shared memory is.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.patches.probes.fake_cuda import SHARED_MEMORY
from tests.patches.probing import ask
from tests.patches.trees import release_file, unpack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("triton")
    prefix = "vllm/third_party/triton_kernels/"
    unpack(release_file("vllm", "cuda-arm64"), prefix, folder / "packages" / "triton_kernels")
    variables = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'packages'}",
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    return ask(patched_python, "probe_triton", "12.1", folder=folder, variables=variables)


@pytest.mark.parametrize("tokens", ["1", "64", "512"])
def test_kernels_build_and_fit(built: dict[str, Any], tokens: str) -> None:
    """Of --moe-backend triton_unfused."""
    case = built[tokens]
    assert case["error"] == ""
    products = [kernel for kernel in case["kernels"] if kernel["mma"]]
    # Gate and up together, then down.
    assert len(products) == 2
    assert all(kernel["name"].startswith("_p_matmul_ogs") for kernel in products)
    assert products[0]["gather4"], "the persistent kernel gathers by TMA, which SM12x has"
    for kernel in case["kernels"]:
        assert kernel["shared"] <= SHARED_MEMORY[12]
        assert not kernel["scatter4"]


def test_a_fused_scatter_would_not_build(built: dict[str, Any]) -> None:
    """The control: why the patch forbids it."""
    assert "scatter4' not supported" in built["with fused scatter"]["error"]
