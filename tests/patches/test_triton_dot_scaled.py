"""Triton's products on SM 12.1 take the instructions that they take on 12.0: built, not run.

The pinned Triton as released compiles kernels for two devices. Until 3.8.0 a patch of ours did it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparkforge.build.context import Context
from sparkforge.check import machinecode
from sparkforge.check.machinecode import Readers
from sparkforge.core.run import call
from tests.patches import triton_aot
from tests.patches.checkout import ROOT

PROBE = ROOT / "tests" / "patches" / "probes" / "probe_dot_scaled.py"
KERNELS = ("mxfp8-mxfp8", "mxfp8-mxfp4", "fp8-fp8", "bf16-bf16", "bf16-tma")


@pytest.fixture(scope="module")
def readers(cpu_context: Context) -> Readers:
    return machinecode.readers(cpu_context)


@pytest.fixture(scope="module")
def released(
    cpu_context: Context, patched_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = triton_aot.packages(cpu_context, triton=False)
    out = tmp_path_factory.mktemp("released")
    env = {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(out / "cache")}
    call(patched_python, "-P", PROBE, out, "120", "121", env=env)
    return out


def ptx(folder: Path, kernel: str, capability: str) -> str:
    return (folder / f"{kernel}.{capability}.ptx").read_text()


@pytest.mark.parametrize("kernel", KERNELS)
def test_12_1_is_lowered_as_12_0(released: Path, kernel: str) -> None:
    text = ptx(released, kernel, "121")
    assert ".target sm_121a" in text
    assert text.replace("sm_121a", "sm_120a") == ptx(released, kernel, "120")
    if kernel == "mxfp8-mxfp8":
        assert re.search(r"mma\.sync\S*\.kind::mxf8f6f4\.block_scale", text)


@pytest.mark.parametrize(
    ("kernel", "mma"),
    [
        ("mxfp8-mxfp8", "QMMA.SF.16832.F32.E4M3.E4M3.E8"),
        ("fp8-fp8", "QMMA.16832.F32.E4M3.E4M3"),
        ("mxfp8-mxfp4", "HMMA.16816.F32.BF16"),  # no mixed form, on 12.0 neither
        ("bf16-bf16", "HMMA.16816.F32.BF16"),
    ],
)
def test_the_machine_code_has_its_instructions(
    released: Path, readers: Readers, kernel: str, mma: str
) -> None:
    (found,) = readers.read(released / f"{kernel}.121.cubin")
    assert found.target == "sm_121a"
    assert set(found.mma) == {mma}
