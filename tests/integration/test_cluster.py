"""Two entrypoints that serve one model: how they meet, and that none outlives the other.

Real processes and sockets on two loopback addresses; `vllm` is the usual stand-in. With
vLLM itself and containers: tests/e2e/nightly/test_cluster.py.
"""

import ast
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from sparkforge.runtime.servers import free_port
from sparkforge.serving import cluster
from sparkforge.serving.options import (
    EX_CONFIG,
    EX_PROTOCOL,
    EX_TEMPFAIL,
    StartError,
)
from tests.haproxy import needs_haproxy
from tests.integration import test_supervise, test_warmup
from tests.support import PATIENCE_S, ROOT, wait_for

pytestmark = needs_haproxy

# an address of its own: on 127.0.0.1 the head's front door may get the port of the link or the next
HEAD, WORKER = "127.0.0.4", "127.0.0.2"
# the worker's half answers for each token of the head's, which is the usual stand-in
VLLM = f"""#!{sys.executable}
import os, socket, sys, time

words = sys.argv[1:]
where = [words[words.index("--master-" + name) + 1] for name in ("addr", "port")]
nvls = os.environ["NCCL_NVLS_ENABLE"]
print("words", *words, "nvls", nvls, "host", os.environ["VLLM_HOST_IP"], flush=True)
print("pid", os.getpid(), flush=True)
while "--headless" in words:
    try:
        head = socket.create_connection(where)
    except ConnectionRefusedError:
        time.sleep(0.1)
        continue
    while byte := head.recv(1):
        head.sendall(byte)
    time.sleep(300)
os.environ["FAKE_PEER"] = ":".join(where)
at = words[words.index("--uds") + 1]
os.execv(sys.executable, [sys.executable, {str(ROOT / "tests/fake_server.py")!r}, at, "0"])
"""


Start = Callable[..., "Node"]


class Node(test_warmup.Started):
    """One machine's entrypoint."""

    vllm = VLLM

    def __init__(self, folder: Path, sockets: Path, role: str, port: int, **variables: str) -> None:
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        for own in (folder := folder / role, sockets := sockets / role):
            own.mkdir()
        given = {
            "SPARKFORGE_CLUSTER_ROLE": role,
            "SPARKFORGE_CLUSTER": f"{HEAD},{WORKER},lo,{port}",
            "SPARKFORGE_MODEL": str(model),
            "SPARKFORGE_PROFILE": "",
        }
        super().__init__(folder, sockets, {**given, **variables})

    def said(self, text: str) -> bool:
        return text in self.text()

    @property
    def half(self) -> int:
        """The process of this machine's half of vLLM."""
        wait_for(lambda: self.said("pid "))
        return int(self.output.read_text().split("pid ")[1].split()[0])

    @property
    def engine(self) -> int:
        """The process of the head's engine."""
        wait_for(lambda: bool(self.engines()))  # copied beside what the entrypoint says
        return self.engines()[0]

    def ended(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for number in re.findall(r"^(?:pid|engine) (\d+)", self.text(), re.MULTILINE):
            test_supervise.end_group(int(number))


@pytest.fixture
def node(tmp_path: Path, sockets: Path) -> Iterator[Start]:
    started: list[Node] = []
    port = free_port(0)

    def start(role: str, **variables: str) -> Node:
        started.append(Node(tmp_path, sockets, role, port, **variables))
        return started[-1]

    yield start
    for one in started:
        one.close()


def both(node: Start, **variables: str) -> tuple[Node, Node]:
    head, worker = node("head", **variables), node("worker", **variables)
    wait_for(lambda: head.said("first token") and worker.health() == "well")
    return head, worker


def test_each_half_gets_its_place_and_the_worker_is_well_while_the_head_is(
    node: Start, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"evict_page_cache": true}')
    worker = node("worker", SPARKFORGE_PROFILE=str(profile))
    wait_for(lambda: worker.said("waiting for the head"))
    assert "starting: waiting for the other machine" in worker.health()
    assert not worker.said("words ")  # nothing is started alone
    head = node("head", SPARKFORGE_PROFILE=str(profile), NCCL_NVLS_ENABLE="1")
    wait_for(lambda: head.said("first token") and worker.health() == "well")
    # before vLLM starts, and again when the weights have been read
    wait_for(lambda: worker.text().count("page cache: ") == 2)
    assert f"--nnodes 2 --master-addr {HEAD} --node-rank 0" in head.output.read_text()
    assert head.said(f"nvls 1 host {HEAD}\n")  # a user's own value
    assert f"--master-addr {HEAD} --node-rank 1" in worker.output.read_text()
    assert "--headless" in worker.output.read_text()
    assert worker.said(f"nvls 0 host {WORKER}\n")
    head.process.terminate()
    head.ended()
    assert worker.ended() == EX_TEMPFAIL
    assert worker.said("the head has gone")


@pytest.mark.parametrize(("role", "victim"), [("head", "half"), ("worker", "entrypoint")])
def test_none_outlives_the_other(node: Start, role: str, victim: str) -> None:
    head, worker = both(node)
    one, other = (head, worker) if role == "head" else (worker, head)
    left = other.half
    os.kill(one.half if victim == "half" else one.process.pid, signal.SIGKILL)
    assert other.ended() == EX_TEMPFAIL
    assert other.said(f"the {role} has gone")
    assert not Path(f"/proc/{left}").exists()
    if role == "head":
        assert "no link to the head" in worker.health()


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_stops_or_dies_ends_both(node: Start, role: str, number: int) -> None:
    head, worker = both(node, SPARKFORGE_CHECKS="hang=4")
    halves = head.half, worker.half
    os.kill(worker.half if role == "worker" else head.engine, number)
    ended = {"head": head.ended(), "worker": worker.ended()}
    if number == signal.SIGKILL:
        ended.pop(role)  # with vLLM's own code
    else:  # no entrypoint sees it, but the head's engine makes no token
        assert head.said("error: the server hangs: ")
    assert set(ended.values()) == {EX_TEMPFAIL}
    assert not any(Path(f"/proc/{half}").exists() for half in halves)


SILENT = """
import socket, subprocess, sys, threading
from sparkforge.serving import cluster
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
cluster.SILENCE_S = 3
ends = [cluster.Link(cluster.Settings(head, "127.0.0.1", "127.0.0.2", "lo", 29500), {})
        for head in (True, False)]
meetings = [threading.Thread(target=one.meet) for one in ends]
for one in meetings: one.start()
for one in meetings: one.join()
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)  # the cable
threading.Event().wait(float(sys.argv[1]))
print([one.problem for one in ends])
"""


SPACE = ("unshare", "--user", "--map-root-user", "--net")  # a cable of our own


@pytest.mark.skipif(
    subprocess.run((*SPACE, "ip", "link"), capture_output=True, check=False).returncode != 0,
    reason="this user may make no network namespace, or there is no program ip",
)
@pytest.mark.parametrize(("seconds", "ends"), [("1", False), ("8", True)])
def test_a_machine_that_falls_silent_is_left(sockets: Path, seconds: str, ends: bool) -> None:
    command = (*SPACE, sys.executable, "-c", SILENT, seconds)
    env = {**os.environ, "TMPDIR": str(sockets)}
    output = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    found = ast.literal_eval(output.stdout)
    assert [problem.partition(":")[0] for problem in found] == (
        ["the worker has gone", "the head has gone"] if ends else ["", ""]
    )


def test_two_that_differ_do_not_serve(node: Start) -> None:
    long = f"--override-generation-config {'x' * 50_000}"
    head, worker = node("head"), node("worker", SPARKFORGE_EXTRA_ARGS=long)
    assert head.ended() == worker.ended() == EX_PROTOCOL  # the other may change: no end of tries
    for one in (head, worker):
        assert one.said("error: options differs: here ")
        assert not one.said("words ")


def test_a_stranger_is_refused_and_nonsense_is_no_hello(node: Start) -> None:
    head = node("head")
    wait_for(lambda: head.said("waiting for the worker"))
    port = int(head.env["SPARKFORGE_CLUSTER"].rpartition(",")[2])
    with socket.create_connection((HEAD, port), source_address=("127.0.0.3", 0)) as stranger:
        stranger.settimeout(PATIENCE_S)
        assert stranger.recv(1 << 14) == b""
    wait_for(lambda: head.said("refused 127.0.0.3"))
    with socket.create_connection((HEAD, port), source_address=(WORKER, 0)) as liar:
        liar.sendall(b"\xff" * (1 << 15))
    node("worker")
    wait_for(lambda: head.said("first token"))


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("boss", f"{HEAD},{WORKER},lo"),
        *(("head", text) for text in ("", f"spark-1,{WORKER},lo")),
        *(("worker", f"{HEAD},{WORKER}{rest}") for rest in (",lo,65535", "")),
    ],
)
def test_settings_that_make_no_sense_are_refused(role: str, text: str) -> None:
    with pytest.raises(StartError, match="SPARKFORGE_CLUSTER is ") as error:
        cluster.settings({cluster.ROLE: role, cluster.VARIABLE: text})
    assert error.value.code == EX_CONFIG


@pytest.mark.parametrize(
    ("nccl", "issues"),
    [
        ("2.29.2", ["2353", "2393"]),
        ("2.29.7", ["2393"]),
        ("2.30.4", ["2167", "2393"]),
        ("2.30.7", ["2393"]),
        ("2.100.0", []),
    ],
)
def test_the_start_names_nccl_and_what_is_known_of_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nccl: str,
    issues: list[str],
) -> None:
    monkeypatch.setattr(metadata, "version", {cluster.NCCL: nccl}.__getitem__)
    monkeypatch.setattr(platform, "release", lambda: "7.0.0-1019-nvidia")
    cluster.say_nccl()
    said = capsys.readouterr().err
    assert f"NCCL {nccl}, kernel 7.0.0-1019-nvidia" in said
    assert re.findall(r"warning: NCCL .*nccl#(\d+)", said) == issues
    assert "boot it with kho=off" in said
