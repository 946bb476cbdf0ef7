"""Wheels' machine code against a contract: each rule names the kernel that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from sparkforge.check.proofs import contract
from sparkforge.check.proofs.machinecode import Kernel
from sparkforge.check.proofs.wheelcode import CodeResult, Device, Library
from sparkforge.pins import pins
from sparkforge.pins.compiling import Contract
from tests.support import ROOT

DEVICE = Device("12.1", ("120f", "121a"))
SCALED = "QMMA.SF.16832.F32.E4M3.E2M1.E8"
GOOD = Kernel(
    name="_Z4gemm",
    target="sm_120",
    registers=168,
    stack=0,
    local=0,
    shared=1024,
    shared_dynamic=None,
    mma={SCALED: 32},
    opcodes=("EXIT", "LDG", "QMMA", "STG"),
    traps=False,
    code="c0de",
)
LIMITS: Mapping[str, Any] = {
    "registers": 255,
    "shared": 101_376,
    "foreign": r"UTC\w*|LDTM|[HQ]GMMA",
}


def problems(
    *kernels: Kernel,
    rules: Mapping[str, Any] | None = None,
    jit: tuple[str, ...] = (),
    images: Mapping[str, int] | None = None,
) -> list[tuple[str, str]]:
    libraries = [{"files": "demo/*.so", **rules}] if rules is not None else []
    agreed = Contract.model_validate({**LIMITS, "libraries": libraries})
    code = CodeResult(images or {"120f": 1}, {}, kernels, jit)
    found = contract.check(Library("demo/kernels.so", code), agreed, DEVICE)
    return [(problem.rule, problem.kernel) for problem in found]


def test_good_kernel_keeps_the_contract() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("registers", {"registers": 256}),
        ("stack", {"stack": 8}),
        ("stack", {"local": 8}),
        ("shared", {"shared": 101_377}),
        ("shared", {"shared_dynamic": 101_376}),
        ("foreign", {"opcodes": ("EXIT", "LDTM", "STG")}),
        ("stub", {"traps": True, "opcodes": ("BPT", "CALL", "EXIT", "LDC"), "mma": {}}),
    ],
)
def test_each_limit_names_the_kernel(rule: str, change: dict[str, Any]) -> None:
    assert problems(GOOD, replace(GOOD, name="_Z3bad", **change)) == [(rule, "_Z3bad")]


def test_assertion_is_no_stub() -> None:
    assert problems(replace(GOOD, traps=True, opcodes=("BPT", "EXIT", "LDG", "STG"))) == []


def test_code_for_other_devices_does_not_load() -> None:
    assert problems(images={"90a": 3}) == [("loads", "")]


def test_ptx_alone_is_not_native() -> None:
    assert problems(GOOD, jit=("_Z6repack",)) == [("native", "_Z6repack")]
    excuse = {"jit": [{"kernels": "repack", "reason": "once"}]}
    assert problems(GOOD, jit=("_Z6repack", "_Z5other"), rules=excuse) == [("native", "_Z5other")]


def test_needed_kernels_have_their_instruction() -> None:
    rules = {"needs": [{"kernels": "gemm", "mma": r"[QO]MMA\.SF\..*", "least": 2}]}
    plain = replace(GOOD, name="_Z5gemm2", mma={"HMMA.16816.F32.BF16": 4})
    assert problems(GOOD, rules=rules) == [("mma", "")]
    assert problems(GOOD, plain, rules=rules) == [("mma", "_Z5gemm2")]
    assert problems(GOOD, replace(GOOD, name="_Z5gemm2"), rules=rules) == []


def test_exceptions_apply_to_one_library() -> None:
    bad = replace(GOOD, name="_Z3bad", stack=8)
    assert problems(bad, rules={"stack": 8}) == []
    assert problems(bad, rules={"files": "other/*.so", "stack": 8}) == [("stack", "_Z3bad")]
    stub = replace(GOOD, traps=True, opcodes=("BPT",), mma={})
    assert problems(stub, rules={"stubs": [{"kernels": "gemm", "reason": "9.0"}]}) == []


def test_unused_library_is_not_checked() -> None:
    assert problems(images={"90a": 3}, rules={"unused": "for 9.0"}) == []


def test_contracts_in_pins_give_reasons() -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    assert {name for name, one in loaded.targets.items() if one.machine_code} == {"rtx", "spark"}
    for agreed in loaded.contracts.values():
        for library in agreed.libraries:
            excused = (*library.jit, *library.stubs)
            assert all(len(one.reason) > 10 for one in excused), library.files
