"""The image's entrypoint with its warm-up, on a stand-in for vLLM; the processes are real."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from sparkforge.runtime.servers import free_port
from sparkforge.serving.options import EX_CONFIG
from tests.haproxy import needs_haproxy
from tests.integration.test_supervise import end_group
from tests.support import PATIENCE_S, ROOT, health_check, wait_for

pytestmark = needs_haproxy


class Started:
    """The entrypoint; the program named vllm is the stand-in."""

    vllm = (
        '#!/bin/sh\nfor one; do [ "$last" = --uds ] && at=$one; last=$one; done\n'
        'echo "the stand-in gets $*"\n'
        f'exec "{sys.executable}" "{ROOT}/tests/fake_server.py" "$at"\n'
    )

    def __init__(self, folder: Path, sockets: Path, variables: dict[str, str]) -> None:
        self.folder, self.sockets = folder, sockets
        self.port = free_port(0)
        tools = folder / "bin with a space"
        tools.mkdir(exist_ok=True)
        (tools / "vllm").write_text(self.vllm)
        (tools / "vllm").chmod(0o755)
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text("{}")
        (folder / "profile.json").write_text(json.dumps({"warm_up": "full"}))
        ours = ("SPARKFORGE_", "HF_", "HUGGING")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.env = {
            **kept,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(sockets),
            "SPARKFORGE_LISTEN": f"127.0.0.1:{self.port}",
            "SPARKFORGE_MODEL": str(folder / "model"),
            "SPARKFORGE_PROFILE": str(folder / "profile.json"),
            "SPARKFORGE_JIT_DIR": str(folder / "jit"),
            "SPARKFORGE_RELEASE": "1.0+a",
            **variables,
        }
        self.output = folder / f"output-{self.port}"
        command = [sys.executable, str(ROOT / "scripts/entrypoint.py"), "--max-num-seqs", "3"]
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                command, env=self.env, stdout=sink, stderr=subprocess.STDOUT, cwd=folder
            )

    def text(self) -> str:
        return self.output.read_text()

    def ready(self) -> str:
        """Wait until the server may be called healthy; returns what was said until then."""
        self.wait_until("ready after")
        return self.text()

    def wait_until(self, words: str) -> None:
        """Wait until the entrypoint has said that."""
        wait_for(lambda: words in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def stop(self) -> str:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, self.text()
        return self.text()

    def health(self) -> str:
        done = health_check(self.env)
        return "well" if done.returncode == 0 else done.stderr

    def kill(self) -> None:
        """End it with all its processes."""
        self.process.kill()
        self.process.wait()
        for engine in self.engines():
            end_group(engine)

    def engines(self) -> list[int]:
        """Return the processes of all engines that were started."""
        return [int(one) for one in re.findall(r"^engine (\d+)", self.text(), re.MULTILINE)]


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path, sockets: Path) -> Iterator[Start]:
    started: list[Started] = []

    def begin(**variables: str) -> Started:
        started.append(Started(tmp_path, sockets, variables))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


TIMES = """\
INFO 11-21 07:21:00 [default_loader.py:506] Loading weights took 11.10 seconds
INFO 11-21 07:21:00 [gpu_model_runner.py:5088] Model loading took 60.1 GiB memory and 12.345 seconds
INFO 11-21 07:21:00 [core.py:404] init engine (profile, x) took 9.25 s (compilation: 3.10 s)"""


def test_requests_come_before_the_server_is_healthy(start: Start, tmp_path: Path) -> None:
    one = start(FAKE_TOKEN_S="0.1", FAKE_REFUSES="tool", FAKE_SAYS=TIMES)
    wait_for(lambda: "warm-up 2/" in one.text())
    (engine,) = one.engines()
    os.kill(engine, signal.SIGSTOP)  # a busy machine takes longer for the looks than for the rest
    url = f"http://127.0.0.1:{one.port}/health"
    assert requests.get(url, timeout=PATIENCE_S).status_code == 503
    assert re.match(r"starting: (loading|warm-up \d+/\d+: .*)\n$", one.health())
    os.kill(engine, signal.SIGCONT)
    said = one.ready()
    assert re.search(r"warm-up: 13 requests in \d+ s", said)
    assert re.search(r"chat with tools: \d+\.\d s; refused: POST", said)  # no failure
    phases = r"ready after \d+ s: checks \d+, vLLM \d+ \(load 12, compile 3\), warm-up \d+; "
    assert re.search(phases, said)
    assert one.health() == "well"
    one.stop()
    (folder,) = (tmp_path / "jit").glob("1.0+a-*/triton_cache_dir")
    assert folder.is_dir()


def test_a_request_that_fails_ends_the_start(start: Start) -> None:
    one = start(FAKE_FAILS="min_p")
    assert one.process.wait(PATIENCE_S) == EX_CONFIG
    assert "error: warm-up failed: sampling: POST /v1/completions: 500" in one.text()
    assert "ready after" not in one.text()


@pytest.mark.parametrize("answer", ["42", ""])
def test_a_server_is_healthy_once_its_model_answers(
    start: Start, tmp_path: Path, answer: str
) -> None:
    keys = {"warm_up": "quick", "answers": True, "vocabulary": "harmony"}
    (tmp_path / "asks.json").write_text(json.dumps(keys))
    one = start(SPARKFORGE_PROFILE=str(tmp_path / "asks.json"), FAKE_ANSWER=answer)
    if answer:
        assert "'What is 17 + 25?', 8 at once: correct answer" in one.ready()
        assert one.health() == "well"
    else:
        assert one.process.wait(PATIENCE_S) == EX_CONFIG
        assert "error: warm-up failed: 'What is 17 + 25?', asked alone: status 200" in one.text()


def test_a_folder_for_kernels_that_cannot_be_written_is_one_error(start: Start) -> None:
    one = start(SPARKFORGE_JIT_DIR="/proc")
    assert one.process.wait(PATIENCE_S) == EX_CONFIG
    assert "error: compiled kernels cannot be stored in /proc " in one.text()
    assert "Traceback" not in one.text()
