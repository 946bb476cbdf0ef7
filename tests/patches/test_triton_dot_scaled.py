"""Triton's products on SM 12.1 take the instructions that they take on 12.0: built, not run.

The real Triton 3.7.1, with our series and without, compiles kernels for four devices.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparkforge.build.context import Context
from sparkforge.core.run import call
from sparkforge.inspect.proofs import toolchain, triton_aot
from sparkforge.inspect.proofs.toolchain import Readers
from tests.patches.checkout import ROOT

PROBE = ROOT / "tests" / "patches" / "probes" / "probe_dot_scaled.py"
KERNELS = ("mxfp8-mxfp8", "mxfp8-mxfp4", "fp8-fp8", "bf16-bf16", "bf16-tma")
OTHERS = ("90", "100", "120")


@pytest.fixture(scope="module")
def readers(cpu_context: Context) -> Readers:
    context = cpu_context
    return toolchain.readers(context.store, context.root, context.platform, context.access)


def _built(context: Context, python: Path, out: Path, *, triton: bool) -> Path:
    folder = triton_aot.packages(context, triton=triton)
    env = {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(out / "cache")}
    call(python, "-P", PROBE, out, *OTHERS, "121", env=env)
    return out


@pytest.fixture(scope="module")
def patched(
    cpu_context: Context, patched_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return _built(cpu_context, patched_python, tmp_path_factory.mktemp("patched"), triton=True)


@pytest.fixture(scope="module")
def released(
    cpu_context: Context, patched_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return _built(cpu_context, patched_python, tmp_path_factory.mktemp("released"), triton=False)


def ptx(folder: Path, kernel: str, capability: str) -> str:
    return (folder / f"{kernel}.{capability}.ptx").read_text()


@pytest.mark.parametrize("kernel", KERNELS)
def test_12_1_is_lowered_as_12_0(patched: Path, kernel: str) -> None:
    text = ptx(patched, kernel, "121")
    assert ".target sm_121a" in text
    assert text.replace("sm_121a", "sm_120a") == ptx(patched, kernel, "120")
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
    patched: Path, readers: Readers, kernel: str, mma: str
) -> None:
    (found,) = readers.read(patched / f"{kernel}.121.cubin")
    assert found.target == "sm_121a"
    assert set(found.mma) == {mma}


@pytest.mark.parametrize("capability", OTHERS)
def test_other_devices_keep_their_code(patched: Path, released: Path, capability: str) -> None:
    for kernel in KERNELS:
        assert ptx(patched, kernel, capability) == ptx(released, kernel, capability)


def test_the_release_widens_both_products(released: Path, readers: Readers) -> None:
    """The control: why the patch is there."""
    (scaled,) = readers.read(released / "mxfp8-mxfp8.121.cubin")
    (plain,) = readers.read(released / "fp8-fp8.121.cubin")
    assert set(scaled.mma) == {"HMMA.16816.F32.BF16"}
    assert set(plain.mma) == {"HMMA.16816.F32"}
