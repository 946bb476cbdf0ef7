"""The decode kernels of the plugin, compiled as a build compiles them: no GPU is needed."""

import json
from typing import Any

import pytest

from sparkforge.build import cached
from sparkforge.build.graph import Build
from tests.patches.checkout import context

QUANTISED = ("mxfp4", "mxfp8", "int8", "int6", "nvfp4")
DENSE = {
    f"dense_{weights}_{form}_{rows}"
    for weights in ("bf16", "lossless", *QUANTISED)
    for form in ("narrow_12", "narrow_16", "wide")
    for rows in (8, 16)
}
BY_ROWS = {
    f"experts_{product}_{rows}"
    for product, most in {
        **dict.fromkeys(("gate_up", "down"), (1, 2, 8, 16)),
        **dict.fromkeys(("rows_gate_up", "rows_down"), (1, 8, 16)),
    }.items()
    for rows in most
}
OTHERS = {
    *("add_norm", "experts_combine", "rotate_and_cache", "rotate_and_cache_fp8", "route"),
    *(f"expand_{weights}" for weights in ("lossless", *QUANTISED)),
}


@pytest.fixture(scope="module")
def cubins() -> dict[str, dict[str, Any]]:
    """What the manifest says of each architecture."""
    rtx = context("rtx")
    item = Build(rtx).graph.kernels
    assert item is not None
    cached.run(rtx, [item])
    made = item.artefact
    document = json.loads((made.path / "manifest.json").read_text())
    return {cubin["architecture"]: cubin for cubin in document["cubins"]}


@pytest.mark.parametrize("architecture", ["90a", "120a", "121a"])
def test_all_kernels_keep_to_registers(cubins: Any, architecture: str) -> None:
    kernels = {kernel["name"]: kernel for kernel in cubins[architecture]["kernels"]}
    assert set(kernels) == DENSE | BY_ROWS | OTHERS
    assert not {name for name, kernel in kernels.items() if kernel["spills"] or kernel["local"]}


def test_a_multiprocessor_of_a_spark_holds_every_block(cubins: dict[str, dict[str, Any]]) -> None:
    """Shared memory of a block is at most 99 KiB on 12.x. gpt-oss has 2,880 columns."""
    row = (2880 + 32) * 2
    for kernel in cubins["121a"]["kernels"]:
        if kernel["name"] == "route":  # four rows, beside a block of o with as many registers
            assert kernel["registers"] <= 64
            assert kernel["shared"] + 4 * row <= 99 * 1024 // 2
            continue
        form, _, rows = kernel["name"].rpartition("_")
        if form.startswith("experts_rows"):  # columns in whole 128; one or two rows a block
            assert kernel["shared"] + 2 * (2944 + 32) * 2 <= 99 * 1024 // 2
            continue
        experts = min(int(rows), 8) if form.startswith("experts_") and rows.isdigit() else 0
        dynamic = (int(rows) if "wide" in form else experts) * row
        assert kernel["shared"] + dynamic <= 99 * 1024, kernel["name"]
