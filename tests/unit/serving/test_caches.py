"""Folders of compiled kernels: whose they are, who holds them, which go; steps and records."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import cachefiles, caches, record, state, steps, warmup
from sparkforge.serving.steps import Shape
from tests.support import python, wait_for

INPUTS: dict[str, Any] = {
    "wheels": {"wheel vllm": "a"},
    "wheelhouse": "b",
    "base": "sha256:c",
    "absent": ["nvcc"],
    "system_packages": [],
    "python": "3.12",
    "platform": "linux/arm64",
    "release": "0.31.0+spark.1",
    "labels": {"x": "y"},
}


def share(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = json.dumps({"target": "spark", "image": {**INPUTS, **changes}})
    (folder / "inputs.json").write_text(text)
    return folder


# -- which folder -----------------------------------------------------------------------------


def test_a_key_names_the_release_and_what_compiles(tmp_path: Path) -> None:
    key = caches.build_key(share(tmp_path), "0.31.0+spark.1")
    assert key.startswith("0.31.0+spark.1-")
    assert caches.build_key(share(tmp_path, labels={}), "0.31.0+spark.1") == key
    for changed in ({"wheels": {"wheel vllm": "z"}}, {"base": "sha256:z"}, {"wheelhouse": "z"}):
        assert caches.build_key(share(tmp_path, **changed), "0.31.0+spark.1") != key


@pytest.mark.parametrize("text", ["", "{", "[]", '{"image": {}}'])
def test_without_a_note_the_installed_packages_make_the_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "inputs.json").write_text(text)
    key = caches.build_key(tmp_path, "")
    assert key == caches.build_key(tmp_path / "nosuch", "")
    assert key.startswith("unreleased-")


def test_no_release_leads_out_of_the_folder(tmp_path: Path) -> None:
    assert "/" not in caches.build_key(tmp_path, "../../etc/x y")


def test_the_device_is_told_in_the_same_way_each_time() -> None:
    assert caches.device_key() == caches.device_key()


# -- held ----------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from sparkforge.serving import caches
held = caches.occupy(Path(sys.argv[1]), sys.argv[2], {}, print)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three keys of 1000 bytes, c used longest ago; b has been without a lock file."""
    folder = tmp_path / "jit with a space"
    for age, name in enumerate("abc"):
        (folder / name / "triton").mkdir(parents=True)
        (folder / name / "triton" / "k.cubin").write_bytes(b"x" * 1000)
        used = 1_700_000_000 - age
        (folder / f"{name}.lock").touch()
        os.utime(folder / f"{name}.lock", (used, used))
        os.utime(folder / name, (used, used))
    return folder


@pytest.fixture
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another server, which uses c."""
    child = python(HOLD, root, "c")
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def keys(root: Path) -> set[str]:
    return {one.name for one in root.iterdir() if one.is_dir()}


@pytest.mark.parametrize(
    ("budget", "left"),
    [(3000, "abc"), (2999, "ab"), (1000, "a"), (0, "a")],
)
def test_the_longest_unused_go_first_and_ours_never(root: Path, budget: int, left: str) -> None:
    said: list[str] = []
    caches.prune(root, "a", budget, said.append)
    assert keys(root) == set(left)
    assert len(said) == 3 - len(left)
    assert {one.stem for one in root.glob("*.lock")} == set(left)


def test_what_a_running_server_uses_stays(root: Path, holder: subprocess.Popen[str]) -> None:
    os.utime(root / "c.lock", (1, 1))
    caches.prune(root, "a", 0, print)
    assert keys(root) == {"a", "c"}
    holder.kill()  # the operating system drops its lock
    holder.wait()
    caches.prune(root, "a", 0, print)
    assert keys(root) == {"a"}


def test_a_folder_that_no_server_made_stays(root: Path) -> None:
    (root / "huggingface" / "hub").mkdir(parents=True)
    (root / "huggingface" / "hub" / "model.safetensors").write_bytes(b"x" * 5000)
    caches.prune(root, "a", 3000, print)  # nor does it count
    assert keys(root) == {"a", "b", "c", "huggingface"}
    caches.prune(root, "a", 0, print)
    assert keys(root) == {"a", "huggingface"}
    assert not (root / "huggingface.lock").exists()


def test_a_killed_removal_is_finished_by_the_next(root: Path) -> None:
    (root / ".gone-x-1" / "triton").mkdir(parents=True)
    (root / "note.txt").write_text("not ours")
    (root / "link").symlink_to(root.parent)
    caches.prune(root, "a", 1 << 30, print)
    assert not (root / ".gone-x-1").exists()
    assert keys(root) >= {"a", "b", "c"}
    assert (root / "note.txt").exists()


def test_variables_point_into_the_folder_unless_the_user_has_said_otherwise(
    tmp_path: Path,
) -> None:
    own = {"TRITON_CACHE_DIR": str(tmp_path / "mine"), "HOME": "/root", "HF_HOME": "/models"}
    held = caches.occupy(tmp_path / "jit", "k", own, print)
    assert held.variables["TRITON_CACHE_DIR"] == own["TRITON_CACHE_DIR"]
    assert held.variables["HOME"] == str(tmp_path / "jit/k/home")
    assert "HF_HOME" not in held.variables
    assert {*caches.VARIABLES, *caches.ALWAYS} == held.variables.keys()
    assert held.watched == (tmp_path / "jit/k", tmp_path / "mine")


def test_locks_and_logs_are_no_kernels(tmp_path: Path) -> None:
    held = caches.occupy(tmp_path, "k", {}, print)
    for name in (
        "triton/AB/f.cubin",
        "triton/tmp.pid_1_2/f.cubin",
        "triton/AB/f.lock",
        "vllm/modelinfos/x.json",
        "vllm/torch_compile_cache/h/inductor_cache/locks/c.lock",
        "vllm/torch_compile_cache/h/inductor_cache/aotautograd/a/b",
        "vllm/torch_compile_cache/h/inductor_cache/c/c.so",
        "flashinfer/.cache/flashinfer/121a/cached_ops/m/.ninja_log",
        "warm-up-1.json",
        "flashinfer/.cache/flashinfer/121a/cached_ops/m/m.so",
        "flashinfer/flashinfer_jit.log",
    ):
        (held.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (held.folder / name).touch()
    assert sorted(held.shown(one) for one in held.files()) == [
        "flashinfer/.cache/flashinfer/121a/cached_ops/m/m.so",
        "triton/AB/f.cubin",
        "vllm/torch_compile_cache/h/inductor_cache/c/c.so",
    ]


def test_kernels_have_names(tmp_path: Path) -> None:
    graph = tmp_path / "cabc.py"
    graph.write_text("triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0')\n")
    paths = [
        "/c/triton/AB/_fwd_kernel.cubin",
        "/c/triton/AB/__grp___fwd_kernel.json",
        str(graph),
        "/c/triton/AB/_fwd_kernel.ptx",
        "/c/flashinfer/121a/cached_ops/batch_prefill/b.cuda.o",
        "/c/vllm/x.so",
    ]
    assert cachefiles.kernels(paths) == [
        "FlashInfer batch_prefill",
        "Triton _fwd_kernel",
        "torch.compile triton_poi_fused_add_0",
    ]
    assert cachefiles.kernels(["/c/cuda/a/b/0123"]) == ["0123"]
    assert cachefiles.kernels([]) == []


# -- after a power cut --------------------------------------------------------------------------


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the machine's boot, which a test may change."""
    path = tmp_path / "boot"
    path.write_text("first\n")
    monkeypatch.setattr(caches, "BOOT", path)
    return path


def kept(root: Path) -> dict[str, int]:
    """Start a server and let it end; returns the sizes of the compiled files it has found."""
    held = caches.occupy(root, "k", {}, print)
    found = {held.shown(path): size for path, size in cachefiles.sizes(held.files()).items()}
    held.close(print)
    return found


def serves(root: Path, sizes: dict[str, int], *, settles: bool) -> None:
    """Have a server compile, perhaps sync, and end at once, as by a power cut."""
    code = (
        "import json, sys; from pathlib import Path; from sparkforge.serving import caches\n"
        "root, caches.BOOT = map(Path, sys.argv[1:3])\n"
        "sizes, settles = map(json.loads, sys.argv[3:])\n"
        "held = caches.occupy(root, 'k', {}, print)\n"
        "for name, size in sizes.items():\n"
        "    (held.folder / 'triton' / name).write_bytes(b'x' * size)\n"
        "if settles: held.settle()\n"
    )
    started = python(code, root, caches.BOOT, json.dumps(sizes), json.dumps(settles))
    out, _ = started.communicate()
    assert out == ""


@pytest.mark.parametrize("size", [0, 40])
def test_a_file_that_is_cut_short_counts_as_gone(tmp_path: Path, boot: Path, size: int) -> None:
    serves(tmp_path, {"a": 100, "b": 100, "c": 0}, settles=True)
    os.truncate(tmp_path / "k/triton/b", size)
    (tmp_path / "k/triton/new").touch()
    assert kept(tmp_path) == {"triton/a": 100, "triton/c": 0, "triton/new": 0}


def test_what_was_synced_survives_a_power_cut(tmp_path: Path, boot: Path) -> None:
    serves(tmp_path, {"a": 100}, settles=True)
    boot.write_text("second\n")
    assert kept(tmp_path) == {"triton/a": 100}


@pytest.mark.parametrize("after", [{"b": 0}, {"b": 100}, {"a": 40}, {"a": 200}])
def test_what_was_not_synced_is_compiled_anew_with_all_the_rest(
    tmp_path: Path, boot: Path, after: dict[str, int]
) -> None:
    """Caches are all or nothing: a compiler may not look for the part that is missing."""
    serves(tmp_path, {"a": 100}, settles=True)
    serves(tmp_path, after, settles=False)
    (tmp_path / "k" / "warm-up-x.json").write_text("{}")
    boot.write_text("second\n")
    said: list[str] = []
    held = caches.occupy(tmp_path, "k", {}, said.append)
    assert held.files() == set()
    assert (held.folder / "triton").is_dir()
    assert (held.folder / "warm-up-x.json").exists()  # the lengths in it are worth keeping
    assert "the machine went down while a server ran: 1 of" in said[0]
    assert not list(tmp_path.glob(".gone-*"))
    held.close(print)


def test_a_kill_is_no_power_cut(tmp_path: Path, boot: Path) -> None:
    serves(tmp_path, {"a": 100}, settles=False)
    assert kept(tmp_path) == {"triton/a": 100}


def test_after_a_server_that_ended_a_reboot_harms_nothing(tmp_path: Path, boot: Path) -> None:
    """Also without a warm-up, which would have listed the files."""
    serves(tmp_path, {"a": 100}, settles=False)
    kept(tmp_path)
    (tmp_path / "k" / cachefiles.LIST).unlink()
    boot.write_text("second\n")
    assert kept(tmp_path) == {"triton/a": 100}


def test_while_another_server_runs_nothing_is_removed_and_the_boot_stays(
    root: Path, holder: subprocess.Popen[str], boot: Path
) -> None:
    (root / "c" / "triton" / "k.cubin").write_bytes(b"")
    held = caches.occupy(root, "c", {}, print)
    assert len(held.files()) == 1
    held.close(print)
    assert (root / "c.lock").read_text()  # the other one goes on
    holder.kill()
    holder.wait()
    caches.occupy(root, "c", {}, print).close(print)
    assert not (root / "c.lock").read_text()


def test_a_disk_that_takes_no_list_is_a_warning(tmp_path: Path, boot: Path) -> None:
    held = caches.occupy(tmp_path, "k", {}, print)
    (tmp_path / "k" / cachefiles.LIST).mkdir()
    said: list[str] = []
    held.close(said.append)
    assert "warning: compiled kernels are not on the disk for sure: " in said[0]
    assert not list((tmp_path / "k").glob("*.tmp"))


# -- steps and record -----------------------------------------------------------------------

SPARK = Shape(131072, 8192, 64, (*range(1, 11), 12, 16, 24, 32, 48, 64))


def test_lengths_and_batches_of_the_spark_profile() -> None:
    assert {1, 16, 17, 4096, 8191, 8192, 8193, 16401} <= set(SPARK.lengths())
    assert {*SPARK.captured, 17} == set(SPARK.batches())
    assert Shape(8, 8192, 1).lengths() == [1, 2, 4]
    assert Shape(8, 8192, 1).batches() == [1]


@pytest.mark.parametrize(
    "shape", [SPARK, Shape(600, 8192, 3), Shape(32, 16, 1), Shape(16, 16, 1), Shape(5, 16, 1)]
)
def test_no_prompt_is_longer_than_the_server_takes(shape: Shape) -> None:
    for step in [*steps.full(shape, [9999]), *steps.quick(shape, [9999])]:
        for request in step.requests:
            prompt = request.body.get("prompt", "")
            if isinstance(prompt, list):
                assert 1 <= len(prompt) + request.body["max_tokens"] <= shape.max_len, step.name
                assert all(32 <= one < 96 for one in prompt)


@pytest.mark.parametrize("max_len", [1, 2, 4])
def test_a_context_too_short_for_any_prompt_of_ours_ends_no_server(max_len: int) -> None:
    assert steps.quick(Shape(max_len, 16, 1))
    assert steps.full(Shape(max_len, 16, 1), [9999])


def test_a_short_warm_up_has_each_kind_and_what_users_waited_for() -> None:
    names = [step.name for step in steps.quick(SPARK, [2000])]
    assert "prompt of 2000 tokens" in names
    whole = [step.name for step in steps.full(SPARK, [2000])]
    assert set(names) <= set(whole)
    assert len(names) < len(whole)
    kinds = {"JSON schema", "logprobs", "penalties", "chat with tools", "responses", "streamed"}
    assert kinds <= set(names)


def test_another_warm_up_has_another_digest() -> None:
    assert steps.digest(SPARK) == steps.digest(SPARK)
    assert steps.digest(SPARK) != steps.digest(Shape(131072, 8192, 32))
    assert warmup.way(["a", "b"]) != warmup.way(["ab"])


def test_a_record_keeps_what_it_is_for_and_forgets_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "warm-up-x.json"
    for number in range(12):
        one = record.Record.load(path)
        one.add_run({"number": number}, [f"f{number}"])
        one.add_late(["k"], [f"l{number}"], [200])
        one.steps, one.complete = "d", True
        one.save()
    again = record.Record.load(path)
    assert [run["number"] for run in again.runs] == list(range(2, 12))
    assert len(again.files) == 24
    assert again.lengths == {200}
    assert again.lacks("d", again.files) == ""
    assert "another warm-up" in again.lacks("e", again.files)
    assert again.lacks("d", again.files - {"f1"}) == "1 of 24 recorded files are gone"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        '{"schema": 1}',
        '{"schema": 1, "steps": 1, "complete": "true", '
        '"files": 3, "runs": [], "late": [], "lengths": ["x"]}',
        "\x00\xff",
    ],
)
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "warm-up-x.json"
    path.write_bytes(text.encode("latin-1"))
    assert not record.Record.load(path).complete


def test_a_state_of_an_earlier_start_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert state.read() == state.State(state.READY)
    for one in (state.State("loading"), state.State("no model", given_up=True)):
        state.write(one)
        assert state.read() == one
    earlier = json.dumps({"start": "0", "state": "loading", "given_up": True})
    for text in (earlier, "[]", '{"start": 5}', "[" * 200_000, "\xff", ""):
        state.path().write_text(text)
        assert state.read() == state.State(state.READY)
    wait_for(lambda: [one.name for one in tmp_path.iterdir()] == [state.path().name])
