"""Proofs of the decode kernels: a real kernel holds, and each rule refuses one that breaks it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.build.cubins import Kernel as Listed
from sparkforge.core import typed
from sparkforge.core.errors import ProofError
from sparkforge.inspect.proofs import decode, flow, listing
from sparkforge.inspect.proofs.decode import RULES, Decoded, Rule

DATA = Path(__file__).resolve().parents[2] / "data" / "proofs"
SASS, USAGE, ELF = ((DATA / f"decode-121a.{kind}").read_text() for kind in ("sass", "usage", "elf"))
DENSE, COMBINE = "dense_mxfp8_narrow_12_8", "experts_combine"
LISTED = (Listed(DENSE, 80, 6144, 0, 0), Listed(COMBINE, 40, 64, 0, 0))
WEIGHTS = r"LDG\.E\.EF\.128"


def problems(sass: str = SASS, usage: str = USAGE, elf: str = ELF, arch: str = "121a") -> list[str]:
    return decode.problems(decode.decode(sass, usage, elf), LISTED, arch)


def dense(sass: str = SASS) -> Decoded:
    return decode.decode(sass, USAGE, ELF)[0]


def test_real_kernels_hold_and_are_read() -> None:
    assert problems() == []
    kernel = dense()
    assert (kernel.kernel.name, kernel.threads) == (DENSE, 384)
    assert kernel.once == {"LDG.E.EF": 4, "LDG.E.EF.128": 8}
    assert kernel.turns == ("PREEXIT", "ACQBULK")
    assert typed.load(Decoded, typed.as_json(kernel)) == kernel


def test_the_work_of_a_real_kernel() -> None:
    """Counted by hand in the listing: its loop is 0x480 to 0x1230, two tiles a warp and pass."""
    work = dense().work
    assert work is not None
    # one of 16 bytes is a NOP
    assert (work.instructions, work.beside) == ((0x1230 - 0x480) // 16 + 1 - 1, 0)
    assert work.looped
    assert work.weights == 4 * 16 * 32  # two parts a tile
    assert work.in_flight == 4 * 16 * 32
    assert work.matrix == 8
    # weights, rows (16 bytes, four times) and two words of scales, of 32 threads each
    assert work.loaded == (4 * 16 + 4 * 16 + 2 * 4) * 32
    assert work.shared == 0
    assert work.early
    assert work.narrow == ("LDG.E.EF",)
    assert work.conversions == ()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # weights in 8 bytes instead of 16; without the mark; one of them only
        (r"LDG\.E\.EF\.128", "LDG.E.EF.64", "has 8 LDG.E.EF.64, which is not"),
        (r"LDG\.E\.EF\.128", "LDG.E.128", "no load of 16 bytes of weights"),
        (r"LDG\.E\.128", "LDG.E.64", "LDG.E.64 in its main loop, which is narrower"),
        (r"HMMA\.16816\.F32\.BF16", "FFMA", "has no matrix instruction"),
        (r"HMMA\.16816\.F32\.BF16", "HMMA.16816.F32", "HMMA.16816.F32, which is not"),
        (r"HMMA\.16816\.F32\.BF16", "UTCHMMA", "uses UTCHMMA, which sm_121a lacks"),
        (r"STG\.E\.U16 desc\S+ ", "STL ", "uses STL: local memory"),
        (r"STG\.E\.U16 desc\S+ ", "LDL R0, ", "uses LDL: local memory"),
        (r"PREEXIT", "NOP", "lets no next kernel begin"),
        (r"ACQBULK", "NOP", "does not wait for the one before"),
        (r"HMUL2\.BF16_V2", "I2F.RP", "has I2F.RP in its main loop: a slow conversion"),
        (r"sm_121a", "sm_120a", "is for sm_120a, not sm_121a"),
    ],
)
def test_every_fault_of_the_code_is_seen(old: str, new: str, said: str) -> None:
    changed = re.sub(old, new, SASS)
    assert changed != SASS
    found = problems(changed)
    assert any(one.startswith(f"{DENSE}: ") and said in one for one in found), found


def test_weights_behind_the_wait_are_seen() -> None:
    words = SASS.split("Function : ")
    # the wait comes first
    words[1] = words[1].replace("ACQBULK", "NOP").replace("S2R R10, SR_TID.X", "ACQBULK", 1)
    (found,) = problems("Function : ".join(words))
    assert found == f"{DENSE}: loads no weights before it waits for the kernel before"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("STACK:0 SHARED:7168", "STACK:16 SHARED:7168", "spills: 16 B stack"),
        ("LOCAL:0", "LOCAL:8", "spills: 0 B stack, 8 B local"),
        ("REG:80", "REG:81", "has 81 registers, the manifest 80"),
        ("SHARED:7168", "SHARED:7172", "has 6148 bytes of shared memory, the manifest 6144"),
        ("SHARED:7168", "SHARED:102404", "needs 101380 B of shared memory"),
    ],
)
def test_every_fault_of_the_usage_is_seen(old: str, new: str, said: str) -> None:
    found = problems(usage=USAGE.replace(old, new, 1))
    assert any(one.startswith(f"{DENSE}: ") and said in one for one in found), found


def test_threads_have_to_be_stated() -> None:
    found = problems(elf=ELF.replace("MAX_THREADS", "OTHER"))
    assert f"{DENSE}: does not state the threads of a block" in found


def test_code_and_manifest_have_the_same_kernels() -> None:
    found = decode.problems(decode.decode(SASS, USAGE, ELF), LISTED[:1], "121a")
    assert found == [f"{COMBINE}: in the code, not in the manifest"]
    found = decode.problems([dense()], LISTED, "121a")
    assert found == [f"{COMBINE}: in the manifest, not in the code"]
    spilling = (replace(LISTED[0], spills=8), LISTED[1])
    found = decode.problems(decode.decode(SASS, USAGE, ELF), spilling, "121a")
    assert found == [f"{DENSE}: spills 8 B, says the manifest"]


def test_what_another_family_has_is_refused_there() -> None:
    hopper = re.sub("sm_121a", "sm_90a", SASS)
    assert problems(hopper, arch="90a") == []
    wrong = hopper.replace("HMMA.16816.F32.BF16", "QMMA.SF.16832.F32.E4M3.E2M1.E8")
    assert any("uses QMMA, which sm_90a lacks" in one for one in problems(wrong, arch="90a"))
    warps = SASS.replace("HMMA.16816.F32.BF16", "HGMMA.64x8x16.F32.BF16")
    assert any("uses HGMMA, which sm_121a lacks" in one for one in problems(warps))


def test_a_kernel_that_needs_no_matrix_instruction_has_none() -> None:
    head, _, tail = SASS.rpartition("FADD.FTZ")
    (found,) = problems(f"{head}HMMA.16816.F32.BF16{tail}")
    assert found == f"{COMBINE}: has HMMA.16816.F32.BF16, and needs no matrix instruction"


def test_a_loop_has_to_be_where_one_is_promised() -> None:
    rules = (replace(RULES[0], looped=False), *RULES[1:])
    found = decode.decode(SASS, USAGE, ELF, rules)
    assert decode.problems(found, LISTED, "121a", rules) == [f"{DENSE}: has a main loop"]
    straight = re.sub(r"BRA 0x480\b", "NOP", SASS)
    assert any("no main loop" in one for one in problems(straight))


def test_every_kernel_needs_exactly_one_rule() -> None:
    sass, usage, elf = (text.replace(COMBINE, "brand_new") for text in (SASS, USAGE, ELF))
    with pytest.raises(ProofError, match="brand_new: 0 rules cover this kernel"):
        decode.decode(sass, usage, elf)
    with pytest.raises(ProofError, match=f"{DENSE}: 2 rules"):
        decode.rule_of(DENSE, (*RULES, Rule(r"dense_.*")))


# -- the path of a warp, on a listing made by hand --------------------------------------------


def code(*lines: str) -> str:
    text = "\n".join(f" /*{16 * i:04x}*/ {line} ;" for i, line in enumerate(lines))
    return f"\t\tFunction : k\n{text}\n"


def work_of(*lines: str) -> flow.Flow:
    found = flow.flow(listing.functions(code(*lines))["k"], WEIGHTS)
    assert found is not None
    return found


MADE = (
    "LDG.E.EF.128 R4, desc[UR4][R2.64]",  # 00
    "LDG.E.EF.128 R8, desc[UR4][R2.64]",  # 10
    "ACQBULK",  # 20
    "IADD3 R20, PT, PT, R20, 0x1, RZ",  # 30: the loop
    "@P0 BRA 0xf0",  # 40: leaves it
    "LOP3.LUT R12, R5, 0x3, RZ, 0xc0, !PT",  # 50: uses the first
    "LDG.E.EF.128 R4, desc[UR4][R2.64]",  # 60
    "@P1 BRA 0x90",  # 70: a row ends, or not
    "STG.E [R14], R12",  # 80
    "IMAD.SHL.U32 R13, R9, 0x10, RZ",  # 90: uses the second
    "LDS.128 R16, [R15]",  # a0
    "HMMA.16816.F32.BF16 R24, R12, R16, RZ",  # b0
    "NOP",  # c0
    "LDG.E.EF.128 R8, desc[UR4][R2.64]",  # d0
    "@!P0 BRA 0x30",  # e0
    "STG.E [R14], R24",  # f0
    "EXIT",  # 100
    "BRA 0x110",  # 110
)


def test_a_path_leaves_out_what_a_row_ends_with() -> None:
    work = work_of(*MADE)
    assert work.looped
    # 30 to e0 are 12; without the STG at 80 and the NOP
    assert (work.instructions, work.beside, work.once) == (10, 1, 6)
    assert (work.integer, work.multiply, work.matrix, work.float32) == (2, 1, 1, 0)
    assert work.weights == 2 * 512
    assert (work.loaded, work.shared) == (2 * 512, 512)
    assert work.early


def test_loads_in_flight_end_at_their_first_use() -> None:
    assert work_of(*MADE).in_flight == 2 * 512
    # the second is used before the first is loaded again, and nothing waits with it
    early = (*MADE[:5], MADE[9], *MADE[5:9], "NOP", *MADE[10:])
    assert work_of(*early).in_flight == 2 * 512
    once = ("NOP", *MADE[1:5], "NOP", "NOP", *MADE[7:])
    assert work_of(*once).in_flight == 512
    # a load of another width, or one whose registers nothing names, stays
    third = ("LDG.E.EF.128 R32, desc[UR4][R2.64]", *MADE[1:])
    assert work_of(*third).in_flight == 3 * 512


def test_the_wait_decides_what_is_early() -> None:
    assert not work_of("ACQBULK", *MADE[1:2], "NOP", *MADE[3:]).early
    assert not work_of(*MADE[:2], "NOP", *MADE[3:]).early


def test_slow_paths_behind_the_end_are_no_loops() -> None:
    out_of_line = (*MADE[:15], "BRA.DIV UR4, 0x120", "EXIT", "NOP", "WARPSYNC R1", "BRA 0x100")
    assert work_of(*out_of_line).instructions == work_of(*MADE).instructions


def test_a_kernel_without_a_loop_is_one_path() -> None:
    work = work_of(*MADE[:3], "HMMA.16816.F32.BF16 R24, R4, R8, RZ", "EXIT")
    assert (work.looped, work.instructions, work.once, work.in_flight) == (False, 5, 0, 1024)


def test_a_barrier_goes_on_where_its_begin_says() -> None:
    lines = (
        "BSSY.RECONVERGENT B0, 0x40",
        "@P0 BRA 0x30",
        "LDG.E.EF.128 R4, desc[UR4][R2.64]",
        "BSYNC.RECONVERGENT B0",
        "EXIT",
    )
    assert work_of(*lines).instructions == 5
    # out of line: the barrier at 0x50 leads to 0x70, past what is between
    moved = (*lines[:1], "@!P0 BRA 0x40", "NOP", "EXIT", lines[2], lines[3], "EXIT", "EXIT")
    moved = ("BSSY.RECONVERGENT B0, 0x70", *moved[1:])
    assert work_of(*moved).instructions == 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("BRX R4 -0x80", "target is not in the code"),
        ("BRA `(.L_x_1)", "no address"),
    ],
)
def test_what_cannot_be_followed_is_an_error(line: str, said: str) -> None:
    with pytest.raises(ProofError, match=said):
        work_of(MADE[0], line, "EXIT")


def test_weights_that_fill_no_registers_are_an_error() -> None:
    body = listing.functions(code("LDGSTS.E.BYPASS.128 [R4], desc[UR4][R2.64]", "EXIT"))["k"]
    with pytest.raises(ProofError, match="fills no registers"):
        flow.flow(body, r"LDGSTS\.E\.BYPASS\.128")
    assert flow.flow(body, WEIGHTS) is None
