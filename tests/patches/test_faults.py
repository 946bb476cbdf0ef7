"""The image's entrypoint with vLLM itself, and what goes wrong around a server.

A frozen engine: test_serving.py. Containers that are killed: tests/e2e/test_compose.py. ``-s``
prints the seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sparkforge.core.run import group_alive
from tests.disks import fill
from tests.patches.forks import known
from tests.patches.served import HANG_S, READY_S, Served, serving
from tests.support import PATIENCE_S, ROOT, wait_for

# the clock of the day, as far away as a file says, for a process and its children
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (failed || clock != CLOCK_REALTIME) return failed;
    char text[32] = {0};
    int file = open(getenv("TEST_CLOCK"), O_RDONLY);
    if (file >= 0 && read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
    if (file >= 0) close(file);
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""
DAY_S = 86_400
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount")
# a small disk of its own for temporary files, state and compiled kernels
ON_A_SMALL_DISK = 'mount -t tmpfs -o size=32m tmpfs "$0" && exec "$@"'


def tokens(one: Served) -> int:
    reply = one.complete(3)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["completion_tokens"])


@pytest.fixture(scope="module")
def server(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a small disk, with a clock that the test sets where that is possible."""
    if subprocess.run([*NAMESPACES, "mount", "-t", "tmpfs", "x", "/mnt"], check=False).returncode:
        pytest.skip("nobody may mount in a namespace of his own here")
    folder = tmp_path_factory.mktemp("faults")
    disk = folder / "disk"
    disk.mkdir()
    (folder / "clock").write_text("0")
    variables = {
        **known(patched_python),
        "TMPDIR": str(disk),
        "SPARKFORGE_JIT_DIR": str(disk / "jit"),
    }
    if (compiler := shutil.which("cc")) is not None:
        (folder / "clock.c").write_text(CLOCK)
        library = folder / "clock.so"
        words = (compiler, "-shared", "-fPIC", "-O2", "-o", library, folder / "clock.c", "-ldl")
        subprocess.run(words, check=True)
        variables |= {"LD_PRELOAD": str(library), "TEST_CLOCK": str(folder / "clock")}
    before = (*NAMESPACES, "sh", "-c", ON_A_SMALL_DISK, str(disk))
    with serving(patched_python, folder, variables, before=before) as one:
        one.wait_for("ready after", READY_S)
        yield one


def health(one: Served) -> subprocess.CompletedProcess[str]:
    """Run the health check where the server's disk is."""
    inside = ("nsenter", "--target", str(one.process.pid), "--user", "--mount")
    return subprocess.run(
        [*inside, "--preserve-credentials", one.python, ROOT / "scripts/healthcheck.py"],
        env=one.env,
        capture_output=True,
        text=True,
        check=False,
    )


def clock_of(one: Served) -> int:
    """Return how far vLLM's clock is from this machine's, in seconds, to the hour."""
    away = int(one.complete(1).json()["created"]) - time.time()
    return round(away / 3600) * 3600


def stays_well(one: Served, seconds: float) -> None:
    """Ask and look for as long as the entrypoint has patience with a server that hangs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert tokens(one) == 3
        said = health(one)
        assert said.returncode == 0, said.stdout + said.stderr
        time.sleep(1)
    assert one.process.poll() is None


def test_a_full_disk_stops_no_server(server: Served) -> None:
    stays_well(server, 0.1)
    disk = Path(f"/proc/{server.process.pid}/root{server.folder}/disk")
    filler = fill(disk)
    assert shutil.disk_usage(disk).free == 0
    stays_well(server, HANG_S + 5)
    filler.unlink()
    stays_well(server, 0.1)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("offset", [DAY_S, -DAY_S])
def test_a_clock_that_jumps_stops_no_server(server: Served, offset: int) -> None:
    (server.folder / "clock").write_text(f"{offset}")
    wait_for(lambda: clock_of(server) == offset, every_s=0.2)
    stays_well(server, HANG_S + 5)


@pytest.mark.parametrize("piece", [9 << 20, 1 << 16], ids=["with its length", "in pieces"])
def test_a_huge_body_is_refused(server: Served, piece: int) -> None:
    """vLLM by itself parses it, and answers nobody meanwhile."""
    body = b" " * (9 << 20)
    pieces = (body[i : i + piece] for i in range(0, len(body), piece))
    reply = requests.post(
        f"http://127.0.0.1:{server.port}/v1/completions",
        data=body if piece == len(body) else pieces,
        headers={"Authorization": "Bearer the-key"},
        timeout=PATIENCE_S,
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, 413)
    stays_well(server, 0.1)


def test_an_engine_that_is_killed_ends_the_server(server: Served) -> None:
    """The last one: Docker would start it anew."""
    engine = int(re.findall(r"EngineCore pid=(\d+)", server.output())[0])
    began = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    code = server.process.wait(READY_S)
    print(f"engine killed: exit code {code} after {time.monotonic() - began:.0f} s")
    assert code != 0
    assert not group_alive(server.group())
