"""The supervisor and the health check, on a server that is stopped, killed, busy or slow to load.

The server is a small stand-in (fake_server.py), the processes and signals are real; the same with
vLLM itself: tests/patches/test_serving.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving.health import Client
from sparkforge.serving.options import EX_CONFIG, EX_OSERR, EX_TEMPFAIL
from sparkforge.serving.supervise import session
from tests.support import PATIENCE_S, ROOT, alive, health, inner, wait_for

FAKE = ROOT / "tests" / "fake_server.py"

# what scripts/entrypoint.py does with a plan, in a process of its own
RUN = """
import json, pathlib, sys, types
from sparkforge.serving import health, memory, supervise
asked = json.loads(sys.argv[1])
address, machine = pathlib.Path(asked.pop("address")), asked.pop("machine", None)
told = pathlib.Path(asked.pop("told"))
watch = None
if machine:
    memory.END_S = 1
    root = pathlib.Path(machine)
    watch = memory.Guard(read=lambda: memory.read(root))
if pair_s := asked.pop("pair_s", 0):
    supervise.LOAD_S = pair_s
    asked["link"] = types.SimpleNamespace(problem="", tell=lambda: None, close=lambda: None)
class Door:
    died = False
    def stall(self, stalled):
        told.write_text(str(stalled))
    def ready(self):
        pass
server = supervise.Server(client=health.Client(address, 1.5), guard=watch,
                          entrance=Door(), signals=supervise.Signals(), **asked)
sys.exit(server.run())
"""


Start = Callable[..., "Supervised"]


class Supervised:
    """A supervisor with its server."""

    def __init__(self, folder: Path, sockets: Path, load_s: float = 0, **plan: Any) -> None:
        self.address = inner(sockets)
        self.told = folder / "told"
        self.output = folder / "output"
        compiler = folder / "ptxas-blackwell"  # Triton's for a Spark; the kernel cuts longer names
        compiler.symlink_to("/bin/sleep")
        command = [sys.executable, str(FAKE), str(self.address), str(load_s), str(compiler)]
        asked = {
            "address": str(self.address),
            "told": str(self.told),
            "command": command,
            "variables": {},
            "expected": {},
            "hang_s": 4,
        } | plan
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, json.dumps(asked)],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(sockets)},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def stalled(self) -> bool:
        """Return what load balancers are told of the last check."""
        return self.told.exists() and self.told.read_text() == "True"

    def said(self, text: str) -> bool:
        return text in self.output.read_text()

    def ready(self) -> int:
        """Wait for the first token; returns the engine's process."""
        # two threads say this and the server's lines
        wait_for(lambda: self.said("first token") and self.said("engine "))
        return int(self.output.read_text().split("engine ")[1].split()[0])

    def post(self, path: str, seconds: float = PATIENCE_S) -> bytes:
        return post(self.address, path, seconds)


def post(address: Path, path: str, seconds: float = PATIENCE_S) -> bytes:
    return Client(address, seconds).ask(time.monotonic() + seconds, "POST", path, {"a": 1})


@pytest.fixture
def supervised(tmp_path: Path, sockets: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def start(**plan: Any) -> Supervised:
        started.append(Supervised(tmp_path, sockets, **plan))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        for line in one.output.read_text().splitlines():
            if line.startswith("engine "):
                end_group(int(line.split()[1]))


def end_group(engine: int) -> None:
    """Kill an engine and the server in whose group it is, where a test has left them."""
    try:
        os.killpg(os.getpgid(engine), signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_a_stopped_engine_is_ended_with_all_its_processes(supervised: Start) -> None:
    one = supervised()
    engine = one.ready()
    os.kill(engine, signal.SIGSTOP)
    start = time.monotonic()
    assert one.process.wait(PATIENCE_S) == EX_TEMPFAIL
    # since the last look that went well: at most 0.5 s and a look before the stop
    assert time.monotonic() - start > 2
    assert not alive(engine)
    assert one.said(f"{engine} python")
    assert one.said("state T")
    with pytest.raises(ConnectionRefusedError):
        one.post("/health")


def test_a_busy_server_is_well_though_it_has_no_token_for_us(supervised: Start) -> None:
    one = supervised()
    one.ready()
    one.post("/busy")
    with pytest.raises(TimeoutError):
        one.post("/v1/completions", 1)
    time.sleep(3)  # more than a check takes
    assert not one.stalled()
    assert one.process.poll() is None


def test_a_compiler_at_work_is_waited_for(supervised: Start) -> None:
    one = supervised()
    engine = one.ready()
    one.post("/compile")
    server = os.getpgid(engine)
    wait_for(lambda: "ptxas-blackwell" in str(session(server)))
    os.kill(server, signal.SIGSTOP)
    # as many failed checks as end a server
    wait_for(lambda: one.output.read_text().count("a compiler is running") >= 3)
    assert one.process.poll() is None
    running = session(server).items()
    os.kill(next(pid for pid, (name, _) in running if name == "ptxas-blackwell"), signal.SIGKILL)
    assert one.process.wait(PATIENCE_S) == EX_TEMPFAIL
    wait_for(lambda: not session(server))  # ninja's jobs have groups of their own


def test_one_slow_request_ends_nothing(supervised: Start) -> None:
    one = supervised()  # a hang takes 4 s and a little, the request 8
    one.ready()
    one.post("/spin")
    assert one.said("no answer, but the server computes")
    wait_for(lambda: not one.stalled())
    assert one.process.poll() is None


def test_loading_is_not_ended(supervised: Start) -> None:
    one = supervised(load_s=5, hang_s=1)
    one.ready()
    wait_for(lambda: one.said("ready after"))


def test_sigterm_reaches_the_server_and_its_end_is_ours(supervised: Start) -> None:
    one = supervised()
    engine = one.ready()
    one.process.terminate()
    assert one.process.wait(PATIENCE_S) == 0
    wait_for(lambda: not alive(engine))


def test_an_end_without_reason_is_no_success(supervised: Start) -> None:
    one = supervised()
    engine = one.ready()
    os.kill(os.getpgid(engine), signal.SIGTERM)  # not through the supervisor
    assert one.process.wait(PATIENCE_S) == EX_TEMPFAIL
    assert one.said("error: the server ended by itself")


@pytest.mark.parametrize(
    ("load_s", "expected", "why"),
    [
        (60, {"moe": "TRITON"}, "vLLM chose the moe backend MARLIN; the profile says TRITON"),
        (
            0,
            {"moe": "MARLIN", "attention": "X"},
            "vLLM did not say which attention backend it uses",
        ),
    ],
)
def test_another_backend_ends_the_server(
    supervised: Start, load_s: int, expected: dict[str, str], why: str
) -> None:
    one = supervised(load_s=load_s, expected=expected)
    assert one.process.wait(PATIENCE_S) == EX_CONFIG
    assert one.said(f"error: {why}")
    assert not one.said("ready after")


def test_loosened_it_warns_once_and_serves(supervised: Start) -> None:
    one = supervised(expected={"moe": "TRITON", "attention": "X"}, strict=False)
    one.ready()
    wait_for(lambda: one.said("ready after"))
    text = one.output.read_text()
    assert text.count("warning: vLLM chose the moe backend MARLIN") == 1
    assert text.count("warning: vLLM did not say which attention backend") == 1
    assert one.process.poll() is None


def test_a_paused_container_is_not_taken_for_a_hang(supervised: Start) -> None:
    one = supervised(hang_s=2)
    engine = one.ready()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(engine, number)
        one.process.send_signal(number)
        time.sleep(3)
    assert one.process.poll() is None


def test_the_server_ends_before_the_machine_has_no_memory(
    supervised: Start, tmp_path: Path
) -> None:
    meminfo = tmp_path / "proc/meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text(f"MemTotal: {100 << 20} kB\nMemAvailable: {50 << 20} kB\n")
    one = supervised(machine=str(tmp_path), load_s=600)
    wait_for(lambda: one.said("engine "))
    engine = int(one.output.read_text().split("engine ")[1].split()[0])
    (tmp_path / "new").write_text(f"MemTotal: {100 << 20} kB\nMemAvailable: {1 << 20} kB\n")
    (tmp_path / "new").replace(meminfo)  # at once: half a file is no reading
    assert one.process.wait(PATIENCE_S) == EX_OSERR
    assert not alive(engine)
    assert one.output.read_text().count("error: memory is short: 1.0 of 100.0 GiB") == 1


@pytest.fixture
def fake(sockets: Path) -> Iterator[tuple[Path, int]]:
    """The stand-in alone: its address and its engine's process."""
    address = inner(sockets)
    with subprocess.Popen(
        [sys.executable, FAKE, str(address)], stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline().split()[1])
        yield address, engine
        os.killpg(server.pid, signal.SIGKILL)


def test_a_look_sees_progress_or_causes_it(fake: tuple[Path, int], sockets: Path) -> None:
    address, engine = fake
    client = Client(address, 1.5)
    first = client.observe(None)
    assert list(first.values()) == ["2"]  # no counter to compare with: two tokens were made
    second = client.observe(first)
    assert list(second.values()) == ["4"]  # no progress since: two more
    post(address, "/v1/completions")
    assert list(client.observe(second).values()) == ["5"]  # another's token was enough
    assert health(sockets).returncode == 0
    os.kill(engine, signal.SIGSTOP)
    said = health(sockets)
    assert said.returncode == 1
    assert said.stderr.startswith("unhealthy: ValueError: no step of the engine, and no token")
    os.kill(engine, signal.SIGCONT)
    assert health(sockets).returncode == 0


def test_a_pair_that_hangs_while_it_loads_ends(supervised: Start) -> None:
    one = supervised(load_s=PATIENCE_S, pair_s=3)
    assert one.process.wait(PATIENCE_S) == EX_TEMPFAIL
    assert one.said("error: a rank or NCCL hangs: no token within 3 s")
