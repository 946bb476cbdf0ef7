"""The share of a unified memory, and what a container's limit has to do with it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.pins import pins
from sparkforge.serving import memory
from sparkforge.serving.memory import GIB, MemoryShortError, Reading
from sparkforge.serving.profile import MemoryPlan, Profile
from tests.support import ROOT

SPARK_GIB = 119.7  # MemTotal of a Spark as its owners report it
TOTAL = int(SPARK_GIB * GIB)
PLAN = MemoryPlan(keep_free_gib=12, most_percent=80, least_gib=75)


def machine(root: Path, *, available_gib: float, **group: str) -> Path:
    """A root folder with the files that are read: total memory is a Spark's."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {int(SPARK_GIB * (1 << 20))} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {int(available_gib * (1 << 20))} kB\nHugePages_Total:       0\n"
    )
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in group.items():
        (root / "sys/fs/cgroup" / name.replace("_", ".")).write_text(text)
    return root


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    reading = memory.read(machine(tmp_path, available_gib=114, memory_max="max\n"))
    assert (reading.total, reading.limit) == (int(SPARK_GIB * (1 << 20)) * 1024, None)
    assert reading.room == reading.available == 114 * GIB
    assert memory.utilisation(PLAN, reading) == 0.80


def test_page_cache_does_not_count_as_used(tmp_path: Path) -> None:
    stat = f"anon {3 * GIB}\nshmem 1\nactive_file {GIB}\ninactive_file {5 * GIB}\n"
    reading = memory.read(
        machine(
            tmp_path,
            available_gib=114,
            memory_max=f"{100 * GIB}\n",
            memory_current=str(9 * GIB),
            memory_stat=stat,
        )
    )
    assert (reading.limit, reading.used, reading.room) == (100 * GIB, 3 * GIB, 97 * GIB)
    assert reading.available == 114 * GIB


def grouped(root: Path, membership: str, folder: str, **files: str) -> None:
    """Add a control group to a machine, of which we are a member."""
    (root / "proc/self").mkdir(exist_ok=True)
    (root / "proc/self/cgroup").write_text(membership)
    place = root / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)


def test_the_tightest_of_several_limits_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, available_gib=114)
    ours = "0::/user.slice/session\n"
    files = {"memory__current": str(5 * GIB), "memory__stat": f"inactive_file {GIB}\n"}
    grouped(root, ours, "user.slice/session", memory__max="max\n", **files)
    assert memory.read(root).limit is None
    grouped(root, ours, "user.slice", memory__max=str(24 * GIB), **files)
    assert memory.read(root) == Reading(TOTAL // 1024 * 1024, 114 * GIB, 24 * GIB, 4 * GIB)
    grouped(root, ours, "user.slice/session", memory__max=str(20 * GIB), **files)
    assert memory.read(root).room == 16 * GIB
    grouped(root, ours, "user.slice", memory__max=str(12 * GIB), **files)
    assert memory.read(root).room == 8 * GIB


def test_lines_that_are_no_bytes_do_not_count() -> None:
    assert memory.meminfo("MemTotal: 12 kB\nHugePages_Total: 0\n") == {"MemTotal": 12288}
    assert memory.meminfo("what is this") == {}


def test_a_moment_has_the_reading_s_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        available_gib=114,
        memory_max=f"{100 * GIB}\n",
        memory_current=str(9 * GIB),
        memory_stat="",
    )
    reading = memory.read(root)
    assert (reading.limit, reading.used) == (100 * GIB, 9 * GIB)
    assert memory.line("start", root) == (
        "memory at start, GiB: total 119.70, available 114.00, free 0.00, container 9.00,"
        " limit 100.00"
    )
    (root / "sys/fs/cgroup/memory.max").write_text("plenty\n")
    assert "cannot be read" in memory.line("start", root)
    with pytest.raises(ValueError, match="plenty"):
        memory.read(root)


def test_this_machines_memory_can_be_read() -> None:
    reading = memory.read()
    assert 0 < reading.room <= reading.available <= reading.total


# -- worked examples ------------------------------------------------------------------

# GiB available, the container's limit in GiB, and the row's last three cells on a Spark (where the
# GPU is integrated) and where the GPU's memory would count in the limit
CASES: list[tuple[float, int | None, str, str]] = [
    (115.85, None, "0.80, 95.8, 20.1", "0.80, 95.8, 20.1"),
    (108, None, "0.76, 91.0, 17.0", "0.76, 91.0, 17.0"),
    (104, None, "0.73, 87.4, 16.6", "0.73, 87.4, 16.6"),
    (95, None, "0.65, 77.8, 17.2", "0.65, 77.8, 17.2"),
    (91.5, None, "0.63, 75.4, 16.1", "0.63, 75.4, 16.1"),
    (87.5, None, "refused", "refused"),
    (115.85, 112, "0.80, 95.8, 20.1", "0.80, 95.8, 20.1"),
    (115.85, 100, "0.80, 95.8, 20.1", "0.70, 83.8, 32.1"),
    (115.85, 64, "0.80, 95.8, 20.1", "refused: the limit"),
    (115.85, 32, "0.80, 95.8, 20.1", "refused: the limit"),
    (115.85, 24, "0.80, 95.8, 20.1", "refused: the limit"),
    (115.85, 12, "refused: the limit", "refused: the limit"),
    (87.5, 112, "refused", "refused"),
]


def spark_plan() -> MemoryPlan:
    loaded = pins.load(ROOT / "pins.yaml")
    plan = Profile.model_validate(loaded.profile_of(loaded.target("spark"))).memory
    assert plan is not None
    return plan


def outcome(available_gib: float, limit_gib: int | None, *, integrated: bool) -> str:
    """Return share, GiB asked for and GiB left of what was available, or what refuses."""
    limit = None if limit_gib is None else limit_gib * GIB
    reading = Reading(TOTAL, int(available_gib * GIB), limit)
    try:
        share = memory.utilisation(spark_plan(), reading, TOTAL if integrated else None)
    except MemoryShortError as error:
        named = "SPARKFORGE_MEMORY_LIMIT" in str(error)
        return "refused: the limit" if named else "refused"
    asked = share * SPARK_GIB
    return f"{share:.2f}, {asked:.1f}, {available_gib - asked:.1f}"


@pytest.mark.parametrize(("available", "limit", "spark", "elsewhere"), CASES)
def test_worked_examples(available: float, limit: int | None, spark: str, elsewhere: str) -> None:
    assert outcome(available, limit, integrated=True) == spark
    assert outcome(available, limit, integrated=False) == elsewhere


def test_too_little_is_an_error() -> None:
    with pytest.raises(MemoryShortError):
        memory.utilisation(PLAN, Reading(TOTAL, 80 * GIB))


def test_the_share_is_of_what_cuda_counts() -> None:
    """VLLM multiplies it by that; owners report 121.7 GiB where MemTotal says 119.7."""
    reading, cuda = Reading(TOTAL, 98 * GIB), int(121.7 * GIB)
    assert memory.utilisation(PLAN, reading) == 0.71  # (98 - 12) / 119.7 = 0.718
    assert memory.utilisation(PLAN, reading, cuda) == 0.70  # (98 - 12) / 121.7 = 0.707


@given(
    total=st.integers(GIB, 4096 * GIB),
    share=st.floats(0, 1),
    keep=st.integers(1, 64),
    least=st.integers(1, 512),
    most=st.integers(1, 95),
)
def test_never_more_than_there_is(
    total: int, share: float, keep: int, least: int, most: int
) -> None:
    reading = Reading(total, int(total * share))
    plan = MemoryPlan(keep_free_gib=keep, most_percent=most, least_gib=least)
    try:
        percent = round(memory.utilisation(plan, reading) * 100)
    except MemoryShortError:
        return
    taken = total * percent // 100
    assert least * GIB <= taken <= reading.available - keep * GIB
    assert 1 <= percent <= most


@pytest.mark.parametrize(
    ("options", "own", "unified", "jobs"),
    [
        (["--gpu-memory-utilization", "0.8"], "", True, "2"),  # vLLM may choose FlashInfer's MoE
        (["--gpu-memory-utilization", "0.8", "--moe-backend=marlin"], "", True, "8"),
        (["--gpu-memory-utilization", "0.99"], "", True, "1"),
        (["--gpu-memory-utilization", "0.9"], "", False, "13"),
        ([], "5", True, "5"),
    ],
)
def test_compilers_at_once_fit_beside_the_model(
    monkeypatch: pytest.MonkeyPatch, options: list[str], own: str, unified: bool, jobs: str
) -> None:
    monkeypatch.setattr(memory, "read", lambda: Reading(TOTAL, int(115.85 * GIB)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(20)))
    profile = Profile(memory=PLAN if unified else None)
    assert memory.max_jobs(profile, options, {"MAX_JOBS": own}) == jobs


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder on a real disk: files of a tmpfs are never dropped."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        yield Path(folder)


def test_files_leave_the_page_cache_and_keep_their_bytes(on_disk: Path) -> None:
    weights = on_disk / "model-00001-of-00002.safetensors"
    with weights.open("wb") as out:
        out.write(os.urandom(1 << 20) * 8)
        os.fsync(out.fileno())  # a page that is not on the disk yet stays
    before = weights.read_bytes()
    assert memory.resident(weights) == 8 << 20
    memory.drop([weights])
    assert memory.resident(weights) < 1 << 20
    assert weights.read_bytes() == before
