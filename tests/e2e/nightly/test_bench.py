"""`bench --vs unpatched` with llama-benchy: the figures mean nothing, the mechanism is real."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.conftest import Build
from tests.e2e.test_cpu_build import item


@contextmanager
def slow_engines() -> Iterator[None]:
    """Slow down the engines of vLLM below this process, while llama-benchy measures them.

    A toy's answer of 31 tokens takes a tenth of a second. On a busy machine llama-benchy gets all
    of it at once, and such an answer has no speed. So each step of the engine takes 30 ms here.
    """
    ends = threading.Event()

    def engines() -> list[int]:
        parents, found, measured = {}, [], False
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                measured |= b"--base-url" in (folder / "cmdline").read_bytes()
                if (folder / "comm").read_text().startswith("VLLM::Engine"):
                    found.append(folder.name)
            except OSError:
                pass  # it has ended

        def ours(pid: str) -> bool:
            return pid == str(os.getpid()) or (pid in parents and ours(parents[pid]))

        return [int(pid) for pid in found if ours(pid)] if measured else []

    def work() -> None:
        while not ends.is_set():
            found = engines()
            for number, seconds in [(signal.SIGSTOP, 0.03), (signal.SIGCONT, 0.01)] * 10:
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(seconds)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_the_build_is_measured_against_the_release(build: Build) -> None:
    """Two rounds in turns; the figures mean nothing."""
    words = ("--target", "cpu", "--engine", "none", "--table", "quick", "--vs", "unpatched")
    receipt = build("--target", "cpu", "--engine", "none", VLLM_CPU_OMP_THREADS_BIND="auto")
    with slow_engines():
        document = build("bench", *words, "--runs", "2")
    release, ours = document["results"]
    assert [one["identity"]["origin"] for one in (release, ours)] == ["release", "build"]
    # the same model, the same options
    for name in ("checkpoint", "options", "pins"):
        assert release["identity"][name] == ours["identity"][name]
    assert ours["identity"]["release"].startswith(release["identity"]["release"])
    assert release["identity"]["release"] != ours["identity"]["release"]
    wheels = [item(receipt, label)["outputs"] for label in ("wheel vllm", "plugin")]
    assert ours["identity"]["wheels"] == {one["file"]: one["sha256"] for one in wheels}
    for one in (release, ours):
        for test in ("pp512 tg32 (c1)", "pp512 tg32 (c2)"):
            # no speed: the tiny model's answer may come in one piece
            assert len(one["tests"][f"{test}: first token, ms"]) == 2
    changes = document["changes"]
    assert all(one["ratio"] > 0 for one in changes)
    assert {one["name"].partition(":")[0] for one in changes} == {
        "pp512 tg32 (c1)",
        "pp512 tg32 (c2)",
    }
    # CI's machine is seldom idle; the tolerance is more than any ratio could be
    again = build("bench", "compare", *document["folders"], "--tolerance", "100")
    assert [one["ratio"] for one in again["changes"]] == [one["ratio"] for one in changes]
