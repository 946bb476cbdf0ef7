"""Proofs: cuobjdump's words into facts, facts against promises. The listings are recorded ones."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.core import typed
from sparkforge.core.errors import ProofError, UsageError
from sparkforge.inspect.proofs import (
    checks,
    listing,
    report,
    runner,
    sass,
    toolchain,
    triton_aot,
    units,
)
from sparkforge.inspect.proofs.checks import Promise
from sparkforge.inspect.proofs.runner import Job, Verdict
from sparkforge.inspect.proofs.sass import Kernel
from sparkforge.inspect.proofs.units import UNITS, Unit
from sparkforge.store.store import Store
from tests.codecopy import CodeCopy
from tests.results import context_of
from tests.support import make_wheel

DATA = Path(__file__).resolve().parents[2] / "data" / "proofs"
QMMA = "QMMA.SF.16832.F32.E4M3.E4M3.E8"
PROMISE = Promise(units.MXFP8_MXFP8, kernels=1)


def read(name: str) -> list[Kernel]:
    return sass.read((DATA / f"{name}.sass").read_text(), (DATA / f"{name}.usage").read_text())


@pytest.fixture
def good() -> Kernel:
    (kernel,) = read("block_scaled-121a")
    return kernel


@pytest.fixture
def stub() -> Kernel:
    (kernel,) = read("block_scaled-121")
    return kernel


def test_a_kernel_is_read(good: Kernel) -> None:
    assert good.name == "block_scaled"
    assert good.target == "sm_121a"
    assert good.mma == {QMMA: 1}
    assert (good.registers, good.stack, good.local, good.shared) == (24, 0, 0, 0)
    assert (good.spill_loads, good.spill_stores, good.traps) == (0, 0, False)
    assert {"QMMA", "LDG", "STG", "EXIT"} <= set(good.opcodes)
    assert "NOP" not in good.opcodes
    assert typed.load(Kernel, typed.as_json(good)) == good


def test_a_stub_is_read_as_one(stub: Kernel) -> None:
    assert stub.target == "sm_121"
    assert stub.mma == {}
    assert stub.traps
    assert stub.opcodes == ("BPT", "BRA", "LDC")


def test_static_shared_memory_is_told_from_what_the_system_keeps() -> None:
    shared = {re.sub(r"^_Z2|Pi$", "", kernel.name): kernel.shared for kernel in read("shared")}
    # four ints; an array that is sized at the launch; none
    assert shared == {"st": 16, "dy": 0, "no": 0}


def test_dynamic_shared_memory_stands_in_the_name() -> None:
    name = "_ZN7cutlass24sparkforge_device_kernelINS_4gemm3FooILi7EEELi98304EEEvNT_6ParamsE"
    text = (DATA / "block_scaled-121a.sass").read_text().replace("block_scaled", name)
    usage = (DATA / "block_scaled-121a.usage").read_text().replace("block_scaled", name)
    (kernel,) = sass.read(text, usage)
    assert kernel.shared_dynamic == 98304


def test_predicates_do_not_hide_instructions() -> None:
    text = (
        "\t.target\tsm_121a\n\t\tFunction : k\n"
        "        /*0000*/              @!P0 BRA 0x10 ;   /* 0x0 */\n"
        "        /*0010*/              @UP1 UMOV UR4, 0x1 ;   /* 0x0 */\n"
        "        /*0020*/              @P0 STL.128 [R1], R4 ;   /* 0x0 */\n"
        "        /*0030*/              @!PT LDL R4, [R1+0x8] ;   /* 0x0 */\n"
    )
    usage = " Function k:\n  REG:8 STACK:32 SHARED:0 LOCAL:0 CONSTANT[0]:928\n"
    (kernel,) = sass.read(text, usage)
    assert kernel.opcodes == ("BRA", "LDL", "STL", "UMOV")
    assert (kernel.spill_stores, kernel.spill_loads, kernel.stack) == (1, 1, 32)
    assert any("spills: 32 B" in one for one in checks.problems([kernel], Promise(None), "121a"))


def test_the_quick_reader_sees_what_the_other_does() -> None:
    for path in sorted(DATA.glob("*.sass")):
        text = path.read_text()
        quick = listing.words(text)
        assert quick.keys() == listing.functions(text).keys() != set()
        for name, body in listing.functions(text).items():
            assert [(one.strip(), word) for one, word in quick[name]] == [
                (instruction.text, instruction.word) for instruction in body
            ]


@pytest.mark.parametrize("missing", ["sass", "usage"])
def test_listings_that_disagree_are_refused(missing: str) -> None:
    text = (DATA / "block_scaled-121a.sass").read_text()
    usage = (DATA / "block_scaled-121a.usage").read_text()
    with pytest.raises(ProofError, match="disagree") as caught:
        sass.read("" if missing == "sass" else text, "" if missing == "usage" else usage)
    assert caught.value.exit_code == ProofError.exit_code


def test_a_listing_without_code_is_refused() -> None:
    text = re.sub(r"/\*[0-9a-f]{4}\*/.*", "", (DATA / "block_scaled-121a.sass").read_text())
    with pytest.raises(ProofError, match="no readable instruction"):
        sass.read(text, (DATA / "block_scaled-121a.usage").read_text())


def test_a_good_kernel_holds(good: Kernel) -> None:
    assert checks.problems([good], PROMISE, "121a") == []


def test_the_stub_of_a_plain_target_does_not_hold(stub: Kernel) -> None:
    (problem,) = checks.problems([stub], PROMISE, "121")
    assert checks.STUB in problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mma": {}}, "no matrix instruction"),
        ({"mma": {QMMA: 4, "HMMA.16816.F32.BF16": 2}}, "has 2 HMMA.16816.F32.BF16"),
        ({"mma": {"QMMA.SF.16832.F32.E4M3.E2M1.E8": 4}}, "which is not"),
        ({"target": "sm_121"}, "is for sm_121, not sm_121a"),
        ({"opcodes": ("QMMA", "UTCQMMA")}, "uses UTCQMMA"),
        ({"opcodes": ("LDTM", "QMMA")}, "uses LDTM"),
        ({"stack": 8}, "spills: 8 B stack"),
        ({"local": 16}, "spills: 0 B stack, 16 B local"),
        ({"shared_dynamic": checks.SHARED_LIMIT, "shared": 16}, "needs 101392 B"),
    ],
)
def test_every_fault_is_seen(good: Kernel, change: dict[str, object], said: str) -> None:
    bad = replace(good, **change)  # type: ignore[arg-type]
    assert any(said in problem for problem in checks.problems([bad], PROMISE, "121a"))


def test_tma_loads_and_stores_are_allowed(good: Kernel) -> None:
    fine = replace(good, opcodes=("QMMA", "UTMALDG", "UTMASTG"), shared_dynamic=checks.SHARED_LIMIT)
    assert checks.problems([fine], PROMISE, "121a") == []


def test_a_family_target_is_its_number_in_machine_code(good: Kernel) -> None:
    assert checks.problems([replace(good, target="sm_120")], PROMISE, "120f") == []
    assert checks.problems([good], PROMISE, "120f") != []


def test_a_missing_kernel_and_a_missing_size_are_seen(good: Kernel) -> None:
    assert checks.problems([], PROMISE, "121a") == ["has no kernel"]
    assert any(
        "has 2 kernels, not 1" in one for one in checks.problems([good, good], PROMISE, "121a")
    )
    sized = replace(PROMISE, sized=True)
    assert any("dynamic shared memory" in one for one in checks.problems([good], sized, "121a"))


def verdict(kernel: Kernel, *, control: bool, arch: str = "121a") -> Verdict:
    unit = next(one for one in UNITS if one.control == control and one.upstream is None)
    job = Job(unit, arch, f"{unit.name} {arch}", "", PROMISE)
    return Verdict(job, (kernel,), tuple(checks.problems([kernel], PROMISE, arch)), 1.0, True)


def test_a_control_holds_only_by_being_a_stub(good: Kernel, stub: Kernel) -> None:
    assert verdict(stub, control=True, arch="121").ok
    assert not verdict(good, control=True).ok
    assert not verdict(replace(good, stack=8), control=True).ok, "fails, for another reason"
    assert verdict(good, control=False).ok
    assert not verdict(stub, control=False, arch="121").ok


def test_the_report_names_what_does_not_hold(good: Kernel, stub: Kernel) -> None:
    verdicts = [
        verdict(good, control=False),
        verdict(replace(good, target="sm_120"), control=False, arch="120f"),
        verdict(stub, control=False, arch="121"),
    ]
    text = report.markdown(verdicts, "nvcc 13.0")
    assert f"1 `{QMMA}`" in text
    assert "**does not hold**" in text
    assert f"121: block\\_scaled: has no matrix instruction in 4 registers: {checks.STUB}" in text
    assert "Other instructions from target to target: block-scaled-mma." in text
    assert "same instructions on all their targets: block-scaled-mma." in report.markdown(
        verdicts[:2], "nvcc 13.0"
    )
    document = report.document(verdicts, "nvcc 13.0")
    assert document["ok"] is False
    assert [proof["ok"] for proof in document["proofs"]] == [True, True, False]


def test_the_list_of_units_is_sound() -> None:
    names = [unit.name for unit in UNITS]
    assert len(set(names)) == len(names)
    for unit in UNITS:
        sources = [unit.text, unit.file, unit.generated, unit.triton or None, unit.stage or None]
        assert sum(source is not None for source in sources) == 1, unit.name
        assert set(unit.ci) <= set(unit.archs)
        if unit.upstream is None and unit.file:
            assert (units.HERE / unit.file).is_file()
        if unit.promise.mma is not None:
            re.compile(unit.promise.mma)
    chosen = units.choose([], ci=True)
    assert {unit.name for unit in chosen} == {unit.name for unit in UNITS if unit.ci}
    assert all(unit.archs == unit.ci for unit in chosen)


def test_a_wrong_name_is_told_with_the_right_ones() -> None:
    with pytest.raises(UsageError, match="no such proof: moe-typo") as caught:
        units.choose(["moe-typo"], ci=False)
    assert "block-scaled-mma" in str(caught.value)


def test_generated_files_are_told_apart_by_their_operands() -> None:
    text = (
        "#if defined(ENABLE_FP8)\n"
        "        INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, __nv_fp8_e4m3, SafeFP4, half,\n"
        "        void, EpilogueOpDefault, NONE,\n        128, 32, 128, 1, 1, 1,\n"
        "        INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, half, half, half,\n"
    )
    assert units.generated_kernels(text) == [("__nv_fp8_e4m3", "SafeFP4")]


@pytest.mark.parametrize(
    ("free_gib", "cpus", "width"), [(64, 8, 7), (22, 8, 2), (22, 1, 1), (1, 8, 1)]
)
def test_compilers_are_as_many_as_memory_holds(
    free_gib: int, cpus: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkforge.build.jobs.available_gib", lambda: free_gib)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
    assert runner.width(None) == width
    assert runner.width(3) == 3


NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "nvcc 13"; exit; fi
echo "$@" >>"$0.calls"
while [ "$1" != -o ]; do shift; done
echo compiled >"$2"
"""


class Listed(toolchain.Readers):
    """Readers that find a recorded kernel in everything."""

    def dump(self, what: str, cubin: Path) -> str:
        assert cubin.read_text() == "compiled\n"
        ending = "sass" if what == "-sass" else "usage"
        return (DATA / f"block_scaled-121a.{ending}").read_text()


def test_machine_code_is_kept_until_what_compiles_it_changes(
    store: Store, code: CodeCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    plain = Unit("plain", "", ("121a",), PROMISE, text="// source", upstream=None)
    on_tree = replace(plain, name="on tree", text=None, file="csrc/a.cu", upstream="flashinfer")
    tree = runner.Tree(tmp_path, {"csrc": "1" * 40})
    jobs = [Job(one, "121a", one.name, "// source", PROMISE) for one in (plain, on_tree)]

    def fresh() -> list[bool]:
        readers = Listed(tmp_path, "readers")
        found = runner.prove(store, jobs, {"flashinfer": tree}, readers, 1)
        assert all(verdict.ok for verdict in found)
        return [verdict.fresh for verdict in found]

    assert (fresh(), fresh()) == ([True, True], [False, False])
    for what in ("cubin.py", "include/sparkforge_shared_bytes.h"):
        code.change(f"inspect/proofs/{what}")
        assert fresh() == [True, True]
    first, second, *_ = Path(f"{nvcc}.calls").read_text().splitlines()
    assert first.startswith("-std=c++17 -arch=sm_121a -cubin ")
    assert "-DENABLE_FP4 " in second
    assert f"-isystem {tmp_path}/csrc " in second
    assert f"-cubin {tmp_path}/csrc/a.cu " in second


def test_tritons_release_is_unpacked_again_by_other_code(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path, "triton", files={"triton/a.py": b"a", "other/b.py": b"b"})
    context = context_of("cpu", store=store)

    def unpacked() -> Path:
        found = triton_aot._release(context, wheel)
        assert {path.name for path in found.iterdir()} == {"triton", "triton-1.0.dist-info"}
        return found

    before = unpacked()
    assert unpacked() == before
    changed = tmp_path / "triton_aot.py"
    changed.write_bytes(Path(triton_aot.__file__).read_bytes() + b"changed = 1\n")
    monkeypatch.setattr(triton_aot, "__file__", str(changed))
    assert unpacked() != before
