"""Machine code: cuobjdump's words into facts; facts against contracts."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from sparkforge.check import proofs
from sparkforge.check.proofs import Kernel, Library
from sparkforge.core.errors import CheckError
from sparkforge.pins.types import Contract
from tests.support import ROOT

DATA = ROOT / "tests" / "data" / "proofs"
QMMA = "QMMA.SF.16832.F32.E4M3.E4M3.E8"


def listings(name: str) -> tuple[str, str]:
    sass, usage = ((DATA / f"{name}.{kind}").read_text() for kind in ("sass", "usage"))
    return sass, usage


@pytest.fixture
def good() -> Kernel:
    (kernel,) = proofs.read(*listings("block_scaled-121a"))
    return kernel


def test_kernel_and_stub_are_read(good: Kernel) -> None:
    (stub,) = proofs.read(*listings("block_scaled-121"))
    assert good.name == "block_scaled"
    assert good.mma == {QMMA: 1}
    assert (good.registers, good.stack, good.shared, good.traps) == (24, 0, 0, False)
    assert {"QMMA", "LDG", "STG", "EXIT"} <= set(good.opcodes)
    assert "NOP" not in good.opcodes
    assert (stub.mma, stub.traps) == ({}, True)
    assert stub.opcodes == ("BPT", "BRA", "LDC")


def test_static_shared_memory() -> None:
    kernels = proofs.read(*listings("shared"))
    shared = {re.sub(r"^_Z2|Pi$", "", kernel.name): kernel.shared for kernel in kernels}
    # four ints; an array that is sized at the launch; none
    assert shared == {"st": 16, "dy": 0, "no": 0}


def test_predicates_do_not_hide_instructions() -> None:
    text = (
        "\t.target\tsm_121a\n\t\tFunction : k\n"
        "        /*0000*/              @!P0 BRA 0x10 ;   /* 0x0 */\n"
        "        /*0010*/              @UP1 UMOV UR4, 0x1 ;   /* 0x0 */\n"
        "        /*0020*/              @P0 STL.128 [R1], R4 ;   /* 0x0 */\n"
    )
    usage = " Function k:\n  REG:8 STACK:32 SHARED:0 LOCAL:0 CONSTANT[0]:928\n"
    (kernel,) = proofs.read(text, usage)
    assert (kernel.opcodes, kernel.stack) == (("BRA", "STL", "UMOV"), 32)


def test_unreadable_listings_are_refused() -> None:
    sass, usage = listings("block_scaled-121a")
    bare = re.sub(r"/\*[0-9a-f]{4}\*/.*", "", sass)
    for texts in (("", usage), (sass, ""), (bare, usage)):
        with pytest.raises(CheckError):
            proofs.read(*texts)


# -- contracts -------------------------------------------------------------------------------

LIMITS: Mapping[str, Any] = {
    "registers": 255,
    "shared": 101_376,
    "foreign": r"UTC\w*|LDTM|[HQ]GMMA",
}
BAD = "_Z3bad"


def broken(
    *kernels: Kernel,
    ptx: tuple[str, ...] = (),
    images: Mapping[str, int] | None = None,
    **rules: Any,
) -> list[tuple[str, str]]:
    """Return rule and kernel of each problem of a library that has rules of its own."""
    agreed = Contract.model_validate({**LIMITS, "libraries": [{"files": "demo/*.so", **rules}]})
    library = Library(images or {"120f": 1}, kernels, ptx)
    found = proofs.check("demo/kernels.so", library, agreed, "12.1")
    return [(problem.rule, problem.kernel) for problem in found]


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("", {"traps": True, "opcodes": ("BPT", "EXIT", "LDG", "STG")}),  # an assertion
        ("registers", {"registers": 256}),
        ("stack", {"stack": 8}),
        ("shared", {"shared": 101_377}),
        ("foreign", {"opcodes": ("EXIT", "LDTM", "STG")}),
        ("stub", {"traps": True, "opcodes": ("BPT", "CALL", "EXIT", "LDC"), "mma": {}}),
    ],
)
def test_each_limit_names_the_kernel(good: Kernel, rule: str, change: dict[str, Any]) -> None:
    wrong = [(rule, BAD)] if rule else []
    assert broken(good, replace(good, name=BAD, **change)) == wrong


def test_code_that_does_not_run_as_it_is(good: Kernel) -> None:
    assert broken(images={"90a": 3}) == [("loads", "")]
    assert broken(images={"90a": 3}, unused="for 9.0") == []
    assert broken(good, ptx=("_Z6repack",)) == [("native", "_Z6repack")]
    excuse = [{"kernels": "repack", "reason": "once"}]
    assert broken(good, ptx=("_Z6repack", BAD), jit=excuse) == [("native", BAD)]


def test_needed_kernels_have_their_instruction(good: Kernel) -> None:
    needs = [{"kernels": "scaled", "mma": r"[QO]MMA\.SF\..*", "least": 2}]
    plain = replace(good, name="scaled_2", mma={"HMMA.16816.F32.BF16": 4})
    assert broken(good, needs=needs) == [("mma", "")]
    assert broken(good, plain, needs=needs) == [("mma", "scaled_2")]
    assert broken(good, replace(good, name="scaled_2"), needs=needs) == []


def test_exceptions_apply_to_one_library(good: Kernel) -> None:
    bad = replace(good, name=BAD, stack=8)
    assert broken(bad, stack=8) == []
    assert broken(bad, stack=8, files="other/*.so") == [("stack", BAD)]
    stub = replace(good, traps=True, opcodes=("BPT",), mma={})
    assert broken(stub, stubs=[{"kernels": "scaled", "reason": "9.0"}]) == []
