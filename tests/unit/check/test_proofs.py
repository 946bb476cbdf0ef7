"""Proofs of units: cuobjdump's words into facts, facts against promises, on recorded listings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.build.cubins import Kernel as Listed
from sparkforge.check.perf import kernelrecord
from sparkforge.check.perf.kernelrecord import Recorded
from sparkforge.check.proofs import machinecode
from sparkforge.check.proofs.machinecode import Kernel
from sparkforge.core import plain
from sparkforge.core.errors import CheckError, PinsError, UsageError
from sparkforge.pins import pins
from tests.support import ROOT
from tools.proofs import __main__ as command
from tools.proofs import checks, decode, nvcc, units
from tools.proofs.checks import Promise
from tools.proofs.decode import Stage
from tools.proofs.units import UNITS

DATA = ROOT / "tests" / "data" / "proofs"
QMMA = "QMMA.SF.16832.F32.E4M3.E4M3.E8"
PROMISE = Promise(units.MXFP8_MXFP8, kernels=1)


def read(name: str) -> list[Kernel]:
    sass, usage = ((DATA / f"{name}.{kind}").read_text() for kind in ("sass", "usage"))
    return machinecode.read(sass, usage)


@pytest.fixture
def good() -> Kernel:
    (kernel,) = read("block_scaled-121a")
    return kernel


@pytest.fixture
def stub() -> Kernel:
    (kernel,) = read("block_scaled-121")
    return kernel


def test_kernel_and_stub_are_read(good: Kernel, stub: Kernel) -> None:
    assert (good.name, good.target) == ("block_scaled", "sm_121a")
    assert good.mma == {QMMA: 1}
    assert (good.registers, good.stack, good.local, good.shared, good.traps) == (24, 0, 0, 0, False)
    assert {"QMMA", "LDG", "STG", "EXIT"} <= set(good.opcodes)
    assert "NOP" not in good.opcodes
    assert plain.load(Kernel, plain.as_json(good)) == good
    assert (stub.target, stub.mma, stub.traps) == ("sm_121", {}, True)
    assert stub.opcodes == ("BPT", "BRA", "LDC")


def test_static_and_dynamic_shared_memory() -> None:
    shared = {re.sub(r"^_Z2|Pi$", "", kernel.name): kernel.shared for kernel in read("shared")}
    # four ints; an array that is sized at the launch; none
    assert shared == {"st": 16, "dy": 0, "no": 0}
    name = "_ZN7cutlass24sparkforge_device_kernelINS_4gemm3FooILi7EEELi98304EEEvNT_6ParamsE"
    sass, usage = ((DATA / f"block_scaled-121a.{kind}").read_text() for kind in ("sass", "usage"))
    (kernel,) = machinecode.read(
        sass.replace("block_scaled", name), usage.replace("block_scaled", name)
    )
    assert kernel.shared_dynamic == 98304


def test_predicates_do_not_hide_instructions() -> None:
    text = (
        "\t.target\tsm_121a\n\t\tFunction : k\n"
        "        /*0000*/              @!P0 BRA 0x10 ;   /* 0x0 */\n"
        "        /*0010*/              @UP1 UMOV UR4, 0x1 ;   /* 0x0 */\n"
        "        /*0020*/              @P0 STL.128 [R1], R4 ;   /* 0x0 */\n"
    )
    usage = " Function k:\n  REG:8 STACK:32 SHARED:0 LOCAL:0 CONSTANT[0]:928\n"
    (kernel,) = machinecode.read(text, usage)
    assert (kernel.opcodes, kernel.stack) == (("BRA", "STL", "UMOV"), 32)
    assert any("spills: 32 B" in one for one in checks.problems([kernel], Promise(None), "121a"))


@pytest.mark.parametrize("damage", ["no sass", "no usage", "no instructions"])
def test_unreadable_listings_are_refused(damage: str) -> None:
    sass, usage = ((DATA / f"block_scaled-121a.{kind}").read_text() for kind in ("sass", "usage"))
    if damage == "no instructions":
        sass = re.sub(r"/\*[0-9a-f]{4}\*/.*", "", sass)
    with pytest.raises(CheckError):
        machinecode.read("" if damage == "no sass" else sass, "" if damage == "no usage" else usage)


def test_good_kernel_passes_and_stub_fails(good: Kernel, stub: Kernel) -> None:
    assert checks.problems([good], PROMISE, "121a", 1) == []
    (problem,) = checks.problems([stub], PROMISE, "121", 1)
    assert checks.STUB in problem
    # the machine code of a family target has its number
    assert checks.problems([replace(good, target="sm_120")], PROMISE, "120f") == []


@pytest.mark.parametrize(
    "change",
    [
        {"mma": {}},
        {"mma": {QMMA: 4, "HMMA.16816.F32.BF16": 2}},
        {"mma": {"QMMA.SF.16832.F32.E4M3.E2M1.E8": 4}},
        {"target": "sm_121"},
        {"opcodes": ("QMMA", "UTCQMMA")},
        {"opcodes": ("LDTM", "QMMA")},
        {"stack": 8},
        {"local": 16},
        {"shared_dynamic": checks.SHARED_LIMIT, "shared": 16},
    ],
)
def test_every_fault_is_found(good: Kernel, change: dict[str, object]) -> None:
    bad = replace(good, **change)  # type: ignore[arg-type]
    (problem,) = checks.problems([bad], PROMISE, "121a")
    assert problem.startswith("block_scaled: ")


def test_missing_kernels_and_sizes_are_found(good: Kernel) -> None:
    assert checks.problems([], PROMISE, "121a")
    assert checks.problems([good, good], PROMISE, "121a", 1)
    assert checks.problems([good], replace(PROMISE, sized=True), "121a")
    fine = replace(good, opcodes=("QMMA", "UTMALDG", "UTMASTG"), shared_dynamic=checks.SHARED_LIMIT)
    assert checks.problems([fine], PROMISE, "121a") == []  # SM12x has TMA's loads and stores


def test_control_passes_only_as_a_stub(good: Kernel, stub: Kernel) -> None:
    def ok(kernel: Kernel, arch: str, *, control: bool) -> bool:
        problems = tuple(checks.problems([kernel], PROMISE, arch))
        return command.Verdict("", control, (kernel,), problems).ok

    assert ok(stub, "121", control=True)
    assert not ok(good, "121a", control=True)
    assert not ok(replace(good, stack=8), "121a", control=True)
    assert ok(good, "121a", control=False)
    assert not ok(stub, "121", control=False)


def test_units_are_sound() -> None:
    assert len({unit.name for unit in UNITS}) == len(UNITS)
    for unit in UNITS:
        sources = [unit.text, unit.file, unit.generated, unit.stage or None]
        assert sum(source is not None for source in sources) == 1, unit.name
        assert set(unit.ci) <= set(unit.archs)
        if unit.file and not unit.tree:
            assert (nvcc.INCLUDE / unit.file).is_file()
        re.compile(unit.promise.mma or "")
    chosen = units.choose([], ci=True)
    assert {unit.name for unit in chosen} == {unit.name for unit in UNITS if unit.ci}
    with pytest.raises(UsageError):
        units.choose(["moe-typo"], ci=False)


# -- decode kernels --------------------------------------------------------------------------

LISTED = (Listed("dense", 80, 6144, 0, 0), Listed("combine", 40, 64, 0, 0))
USAGES = {"dense": (80, 0, 6144, 0), "combine": (40, 0, 64, 0)}


@pytest.mark.parametrize(
    ("usages", "wrong"),
    [
        (USAGES, []),
        ({}, ["no machine code for sm_121a"]),
        ({**USAGES, "dense": (81, 0, 6144, 0)}, ["dense"]),
        ({**USAGES, "dense": (80, 8, 6144, 0)}, ["dense", "dense"]),
        ({**USAGES, "combine": (40, 0, 64, 4)}, ["combine"]),
        ({**USAGES, "more": (1, 0, 0, 0)}, ["more"]),
        ({"dense": USAGES["dense"]}, ["combine"]),
    ],
)
def test_decode_kernels_match_their_manifest(
    usages: dict[str, tuple[int, int, int, int]], wrong: list[str]
) -> None:
    stage = Stage(Recorded({}, "", {"121a": LISTED}), {"121a": usages}, ())
    assert [one.partition(":")[0] for one in decode.problems(stage, "121a")] == wrong


def test_listed_spills_are_allowed() -> None:
    listed = {"121a": (Listed("dense", 80, 0, 8, 16),)}
    stage = Stage(Recorded({}, "", listed), {"121a": {"dense": (80, 8, 0, 0)}}, ("dense",))
    assert decode.problems(stage, "121a") == []
    assert decode.problems(replace(stage, spills=()), "121a")


def test_record_is_of_these_sources_and_architectures(tmp_path: Path) -> None:
    recorded = kernelrecord.load()
    plugin = pins.load(ROOT / "pins.yaml").plugin
    assert plugin is not None
    assert set(recorded.kernels) == set(plugin.architectures)
    kernelrecord.check(recorded, ROOT, plugin)
    assert kernelrecord.FILE.read_text() == kernelrecord.text(recorded)
    (source, *_) = recorded.sources
    with pytest.raises(PinsError):
        kernelrecord.check(replace(recorded, sources={source: "0"}), ROOT, plugin)
    with pytest.raises(PinsError):
        kernelrecord.load(tmp_path / "none.json")


def test_record_is_a_table() -> None:
    recorded = Recorded({}, "", {"90a": LISTED, "121a": (Listed("dense", 90, 8192, 0, 12),)})
    lines = kernelrecord.markdown(recorded).splitlines()
    assert lines[2:4] == ["| `combine` | 40 | - | 64 |", "| `dense` | 80 | 90 | 6,144 to 8,192 |"]
    assert lines[-1].endswith(": `dense`: 12 bytes.")
