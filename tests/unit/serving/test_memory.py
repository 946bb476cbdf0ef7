"""The share of a unified memory, and what a container's limit has to do with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.pins import pins
from sparkforge.serving import memory, moments
from sparkforge.serving.document import Document
from sparkforge.serving.memory import GIB, MemoryPlan, MemoryShortError, Reading
from sparkforge.serving.profile import Profile
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


@pytest.mark.parametrize("folder", ["memory/docker/1", "memory"])  # outside and in a container
def test_limits_of_version_1(tmp_path: Path, folder: str) -> None:
    root = machine(tmp_path, available_gib=114)
    ours = "5:cpu,cpuacct:/\n4:memory:/docker/1\n0::/\n"
    files = {
        "memory__usage_in_bytes": str(5 * GIB),
        "memory__stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    grouped(root, ours, folder, memory__limit_in_bytes="9223372036854771712\n", **files)
    assert memory.read(root).limit is None
    grouped(root, ours, folder, memory__limit_in_bytes=f"{8 * GIB}\n", **files)
    assert (memory.read(root).limit, memory.read(root).used) == (8 * GIB, 4 * GIB)


def test_files_of_version_2_count_on_a_host_with_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, available_gib=114)
    files = {"memory__current": str(5 * GIB), "memory__stat": f"inactive_file {GIB}\n"}
    ours = "4:memory:/docker/1\n0::/\n"
    grouped(root, ours, "", memory__max=str(24 * GIB), **files)
    assert (memory.read(root).limit, memory.read(root).used) == (24 * GIB, 4 * GIB)


def test_lines_that_are_no_bytes_do_not_count() -> None:
    assert memory.meminfo("MemTotal: 12 kB\nHugePages_Total: 0\n") == {"MemTotal": 12288}
    assert memory.meminfo("what is this") == {}


def test_a_moment_has_the_reading_s_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        available_gib=114,
        memory_max=f"{100 * GIB}\n",
        memory_current=str(9 * GIB),
        memory_peak=str(10 * GIB),
        memory_stat="",
    )
    reading = memory.read(root)
    assert (reading.limit, reading.used) == (100 * GIB, 9 * GIB)
    assert moments.line("start", root) == (
        "memory at start, GiB: total 119.70, available 114.00, free 0.00, container 9.00,"
        " container's peak 10.00, limit 100.00"
    )
    (root / "sys/fs/cgroup/memory.max").write_text("plenty\n")
    assert "cannot be read" in moments.line("start", root)
    with pytest.raises(ValueError, match="plenty"):
        memory.read(root)


def test_this_machines_memory_can_be_read() -> None:
    reading = memory.read()
    assert 0 < reading.room <= reading.available <= reading.total


# -- the table of docs/memory.md ------------------------------------------------

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
    plan = Profile.of(Document("spark", loaded.profile_of(loaded.target("spark")))).memory
    assert plan is not None
    return plan


def outcome(available_gib: float, limit_gib: int | None, *, integrated: bool) -> str:
    """Return share, GiB asked for and GiB left of what was available, or what refuses."""
    limit = None if limit_gib is None else limit_gib * GIB
    reading = Reading(TOTAL, int(available_gib * GIB), limit)
    try:
        share = memory.utilisation(spark_plan(), reading, TOTAL if integrated else None)
    except MemoryShortError as error:
        named = f"limit of {limit_gib}.0 GiB" in str(error) or "limit is" in str(error)
        # whoever is to change the limit reads its value and its variable
        assert named == ("SPARKFORGE_MEMORY_LIMIT" in str(error)), error
        assert named != ("end other programs" in str(error)), error
        return "refused: the limit" if named else "refused"
    asked = share * SPARK_GIB
    return f"{share:.2f}, {asked:.1f}, {available_gib - asked:.1f}"


@pytest.mark.parametrize(("available", "limit", "spark", "elsewhere"), CASES)
def test_worked_examples(available: float, limit: int | None, spark: str, elsewhere: str) -> None:
    assert outcome(available, limit, integrated=True) == spark
    assert outcome(available, limit, integrated=False) == elsewhere


def test_the_docs_have_these_examples_and_no_others() -> None:
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    table = page.partition("| MemAvailable | limit |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\d.*) \|$", table, re.MULTILINE)
    wanted = [
        f"{available} | {f'{limit}g' if limit else 'none'} | {spark} | {elsewhere}"
        for available, limit, spark, elsewhere in CASES
    ]
    assert rows == wanted


def test_too_little_is_an_error_with_numbers() -> None:
    with pytest.raises(MemoryShortError, match=r"80\.0 of 119\.7 GiB are available; 12 are kept"):
        memory.utilisation(PLAN, Reading(TOTAL, 80 * GIB))


def test_a_limit_that_is_too_small_is_named_with_its_variable() -> None:
    reading = Reading(TOTAL, 115 * GIB, 64 * GIB, GIB)
    with pytest.raises(MemoryShortError) as error:
        memory.utilisation(PLAN, reading)
    assert str(error.value) == (
        "the container's memory limit of 64.0 GiB leaves 63.0 of the 115.0 GiB that are available;"
        " 12 are kept for the system, and the model needs 75: raise SPARKFORGE_MEMORY_LIMIT, or"
        " set your own share in SPARKFORGE_GPU_MEMORY_UTILIZATION"
    )
    with pytest.raises(MemoryShortError, match=r"limit is 12\.0 GiB.*: set \w+=16g or more"):
        memory.utilisation(PLAN, Reading(TOTAL, 115 * GIB, 12 * GIB), TOTAL)


def test_the_share_is_of_what_cuda_counts() -> None:
    """VLLM multiplies it by that; owners report 121.7 GiB where MemTotal says 119.7."""
    reading, cuda = Reading(TOTAL, 98 * GIB), int(121.7 * GIB)
    assert memory.utilisation(PLAN, reading) == 0.71  # (98 - 12) / 119.7 = 0.718
    assert memory.utilisation(PLAN, reading, cuda) == 0.70  # (98 - 12) / 121.7 = 0.707


def test_the_log_says_what_the_share_was_computed_from() -> None:
    reading = Reading(TOTAL, 115 * GIB, 64 * GIB, GIB)
    assert memory.described(reading, TOTAL) == (
        "115.0 of 119.7 GiB are available, CUDA counts 119.7 for its integrated device,"
        " the container's limit is 64.0 of host memory"
    )
    said = "63.0 of 119.7 GiB are available, the container's limit is 64.0"
    assert memory.described(reading, None) == said
    assert memory.described(Reading(TOTAL, GIB), None) == "1.0 of 119.7 GiB are available"


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
    plan = MemoryPlan(keep, most, least)
    try:
        percent = round(memory.utilisation(plan, reading) * 100)
    except MemoryShortError:
        return
    taken = total * percent // 100
    assert least * GIB <= taken <= reading.available - keep * GIB
    assert 1 <= percent <= most
