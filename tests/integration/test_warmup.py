"""The image's entrypoint with its warm-up, on a stand-in that only pretends to compile.

Processes, signals, locks and files are real. With vLLM's own compiler:
tests/patches/test_serving.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from sparkforge.runtime.servers import free_port
from sparkforge.serving.errors import EX_CONFIG
from tests.haproxy import needs_haproxy
from tests.integration.test_supervise import end_group
from tests.support import PATIENCE_S, ROOT, health_check, wait_for

pytestmark = needs_haproxy

RARE = "a_rare_option"
COMPILED = f"prompt_logprobs {RARE}"


class Started:
    """The entrypoint; the program named vllm is the stand-in."""

    def __init__(
        self,
        folder: Path,
        sockets: Path,
        variables: dict[str, str],
        before: Sequence[str | Path] = (),
    ) -> None:
        self.folder, self.sockets = folder, sockets
        self.port = free_port(0)
        tools = folder / "bin with a space"
        tools.mkdir(exist_ok=True)
        (tools / "vllm").write_text(
            '#!/bin/sh\nfor one; do [ "$last" = --uds ] && at=$one; last=$one; done\n'
            'echo "the stand-in gets $*"\n'
            f'exec "{sys.executable}" "{ROOT}/tests/fake_server.py" "$at"\n'
        )
        (tools / "vllm").chmod(0o755)
        (folder / "profile.json").write_text(json.dumps({"warm_up": "full"}))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SPARKFORGE_")}
        self.env = {
            **kept,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(sockets),
            "SPARKFORGE_LISTEN_PORT": str(self.port),
            "SPARKFORGE_LISTEN_HOST": "127.0.0.1",
            "SPARKFORGE_MODEL": "some/model",
            "SPARKFORGE_DOWNLOAD": "vllm",
            "SPARKFORGE_PROFILE": str(folder / "profile.json"),
            "SPARKFORGE_JIT_DIR": str(folder / "jit"),
            "SPARKFORGE_RELEASE": "1.0+a",
            "FAKE_COMPILES": COMPILED,
            **variables,
        }
        self.output = folder / f"output-{self.port}"
        command: list[str | Path] = [
            *before,
            sys.executable,
            ROOT / "scripts/entrypoint.py",
            "--max-num-seqs",
            "3",
        ]
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

    def record(self) -> Any:
        (path,) = self.folder.glob("jit/*/warm-up-*.json")
        return json.loads(path.read_text())

    def health(self) -> str:
        done = health_check(self.env)
        return "well" if done.returncode == 0 else done.stderr

    def ask(self, **body: Any) -> None:
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        requests.post(url, json={"model": "m", **body}, timeout=PATIENCE_S).raise_for_status()

    def kill(self) -> None:
        """End it with all its processes."""
        self.process.kill()
        self.process.wait()
        for engine in re.findall(r"^engine (\d+)", self.text(), re.MULTILINE):
            end_group(int(engine))


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


def test_the_first_start_makes_all_of_it_and_the_next_a_short_one(start: Start) -> None:
    first = start()
    said = first.ready()
    assert "warm-up: in full: no complete warm-up is on record" in said
    assert re.search(r"logprobs of the prompt: 0\.[3-9] s, 1 files: Triton prompt_logprobs_k", said)
    assert "prompt of 596 tokens" in said  # the server takes 600, four are for the answer
    assert "3 at once" in said
    first.stop()
    record = first.record()
    assert record["complete"]
    assert record["files"] == ["triton/A1B2/prompt_logprobs_kernel.cubin"]
    (run,) = record["runs"]
    assert run["outcome"] == "well"
    (made,) = (one for one in run["steps"] if one.get("compiled"))
    assert made["kernels"] == ["Triton prompt_logprobs_kernel"]

    second = start()
    said = second.ready()
    assert "all of it" not in said
    assert "the caches gained 0 files" in said
    second.stop()
    assert len(second.record()["runs"][1]["steps"]) < len(run["steps"])
    assert "waited for a compiler" not in first.text() + second.text()


@pytest.mark.parametrize("damage", ["gone", "empty", "short", "record"])
def test_what_is_gone_or_cut_short_is_made_again(start: Start, tmp_path: Path, damage: str) -> None:
    first = start()
    first.ready()
    (record,) = tmp_path.glob("jit/*/warm-up-*.json")
    (kernel,) = tmp_path.glob("jit/*/triton/*/*.cubin")
    content = kernel.read_bytes()
    first.stop()
    if damage == "gone":
        kernel.unlink()
    elif damage == "record":
        record.write_bytes(record.read_bytes()[:40])
    else:
        kernel.write_bytes(content[: len(content) // 2 if damage == "short" else 0])
    said = start().ready()
    reason = "no complete warm-up is" if damage == "record" else "1 of 1 recorded files are gone"
    assert f"warm-up: in full: {reason}" in said
    assert kernel.read_bytes() == content


def test_a_short_one_that_compiles_something_becomes_a_whole_one(start: Start) -> None:
    start(FAKE_COMPILES="").ready()
    said = start().ready()
    assert said.index("logprobs of the prompt: ") < said.index("in full: something was comp")
    assert said.count("logprobs of the prompt") == 2


def test_another_build_and_other_options_have_records_of_their_own(
    start: Start, tmp_path: Path
) -> None:
    start().ready()
    for changed in ({"SPARKFORGE_RELEASE": "1.0+b"}, {"SPARKFORGE_MXFP4_LAYERS": "qkv"}):
        assert "no complete warm-up is on record" in start(**changed).ready()
    names = sorted(one.name for one in (tmp_path / "jit").iterdir() if one.is_dir())
    assert [name.partition("-")[0] for name in names] == ["1.0+a", "1.0+b"]
    assert [len(list((tmp_path / "jit" / one).glob("warm-up-*.json"))) for one in names] == [2, 1]


def test_health_says_starting_until_the_warm_up_has_ended(start: Start) -> None:
    one = start(FAKE_COMPILES="logprobs JSON top_k seed stop bad_words n stream regex choice")
    wait_for(lambda: "warm-up 2/" in one.text())
    assert (
        requests.get(f"http://127.0.0.1:{one.port}/health", timeout=PATIENCE_S).status_code == 503
    )
    assert re.match(r"starting: (loading|warm-up \d+/\d+: .*)\n$", one.health())
    one.ready()
    assert one.health() == "well"


@pytest.mark.parametrize(("policy", "serves"), [("", False), ("fail", False), ("warn", True)])
def test_a_request_that_fails_is_named(start: Start, policy: str, serves: bool) -> None:
    one = start(FAKE_FAILS="min_p", SPARKFORGE_WARM_UP_FAILURE=policy)
    words = "warm-up failed: min-p: StatusError: POST /v1/completions: 500 so it was asked for"
    if serves:
        assert f"warning: {words}" in one.ready()
        assert one.health() == "well"
    else:
        assert one.process.wait(PATIENCE_S) == EX_CONFIG
        assert f"error: {words}" in one.text()
        assert "to serve anyway: SPARKFORGE_WARM_UP_FAILURE=warn" in one.text()
        assert "ready after" not in one.text()
    assert not one.record()["complete"]
    assert one.record()["runs"][0]["steps"][-1]["name"] == "min-p"
    assert "Traceback" not in one.text()


@pytest.mark.parametrize("answer", ["42", ""])
def test_a_server_is_healthy_once_its_model_answers(
    start: Start, tmp_path: Path, answer: str
) -> None:
    (tmp_path / "asks.json").write_text(json.dumps({"warm_up": "quick", "answers": True}))
    one = start(SPARKFORGE_PROFILE=str(tmp_path / "asks.json"), FAKE_ANSWER=answer)
    if answer:
        assert "'What is 17 + 25?', 8 at once: correct answer" in one.ready()
        assert one.health() == "well"
    else:
        assert one.process.wait(PATIENCE_S) == EX_CONFIG
        assert "error: warm-up failed: 'What is 17 + 25?', asked alone: status 200" in one.text()
        assert "ready after" not in one.text()
    assert one.record()["runs"][0]["steps"][-1]["name"] == "answers"


def test_what_the_server_refuses_is_told_and_no_failure(start: Start) -> None:
    one = start(FAKE_REFUSES="tool")
    refused = r"chat with tools: \d+\.\d s; refused: POST /v1/chat/completions: 400"
    assert re.search(refused, one.ready())
    assert one.record()["complete"]


def test_it_has_its_time_and_no_more(start: Start) -> None:
    one = start(FAKE_HANGS="repetition_penalty", SPARKFORGE_WARM_UP_SECONDS="4")
    said = one.ready()
    assert re.search(r"warning: warm-up: its 4 s are over in step \d+ of \d+, penalties;", said)
    assert not one.record()["complete"]
    assert one.record()["runs"][0]["outcome"] == "time"


def test_it_can_be_told_to_end_in_the_middle(start: Start) -> None:
    one = start(FAKE_HANGS="repetition_penalty")
    wait_for(lambda: "bad words" not in one.text() and "logprobs of the prompt" in one.text())
    one.process.terminate()
    assert one.process.wait(PATIENCE_S) == 0
    assert "ready after" not in one.text()


def test_an_engine_that_dies_in_it_ends_the_start(start: Start) -> None:
    one = start(FAKE_HANGS="repetition_penalty")
    wait_for(lambda: "logprobs of the prompt" in one.text())
    os.kill(int(one.text().split("engine ")[1].split()[0]), signal.SIGKILL)
    server = int(re.findall(r"engine \d+ of (\d+)", one.text())[0])
    os.kill(server, signal.SIGKILL)
    assert one.process.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert "ready after" not in one.text()


def test_off_means_off(start: Start, tmp_path: Path) -> None:
    one = start(SPARKFORGE_WARM_UP="off")
    wait_for(lambda: "first token" in one.text())
    assert one.health() == "well"
    assert "warm-up" not in one.stop()
    assert not list(tmp_path.glob("jit/*/warm-up-*.json"))


def test_what_users_wait_for_is_told_and_is_in_the_next_warm_up(start: Start) -> None:
    one = start()
    one.ready()
    one.ask(prompt=[7] * 150, max_tokens=1, user=RARE)
    wait_for(lambda: "warning: a request waited for a compiler: Triton a_rare_opt" in one.text())
    one.stop()
    (late,) = one.record()["late"]
    assert late["kernels"] == [f"Triton {RARE}_kernel"]
    assert late["prompts_up_to"] == [200]
    assert one.record()["lengths"] == [200]
    next_one = start()
    said = next_one.ready()
    assert "prompt of 200 tokens" in said
    assert "all of it" not in said


def test_another_servers_warm_up_is_no_users_wait(start: Start) -> None:
    one = start(SPARKFORGE_WARM_UP="quick", FAKE_COMPILES="")
    one.ready()
    other = start(FAKE_COMPILES="seed top_k min_p bad_words stream regex choice bias penalty")
    other.ready()
    assert other.stop().count("Triton") > 4
    assert "waited for a compiler" not in one.stop()  # it looks once more at its end


def test_a_folder_that_goes_while_it_serves_ends_no_server(start: Start, tmp_path: Path) -> None:
    one = start()
    one.ready()
    (tmp_path / "jit").rename(tmp_path / "gone")
    wait_for(lambda: "warning: compiled kernels are no longer watched" in one.text())
    one.ask(prompt=[7] * 9, max_tokens=1)
    one.stop()


def test_a_killed_entrypoint_leaves_a_folder_that_the_next_can_use(start: Start) -> None:
    one = start(FAKE_HANGS="repetition_penalty")
    wait_for(lambda: "logprobs of the prompt" in one.text())
    one.process.kill()
    one.process.wait()
    assert "no complete warm-up is on record" in start().ready()
    assert start().record()["complete"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("WARM_UP", "on", "SPARKFORGE_WARM_UP is 'on': use off, quick or full"),
        ("WARM_UP_SECONDS", "long", "SPARKFORGE_WARM_UP_SECONDS is 'long': use a number"),
        ("JIT_BUDGET_GIB", "-1", "SPARKFORGE_JIT_BUDGET_GIB is '-1': use a number"),
        ("JIT_DIR", "/dev/null/x", "compiled kernels cannot be stored in /dev/null/x: "),
        ("JIT_DIR", "/proc", "compiled kernels cannot be stored in /proc: "),
    ],
)
def test_settings_that_make_no_sense(start: Start, name: str, value: str, words: str) -> None:
    one = start(**{f"SPARKFORGE_{name}": value})
    assert one.process.wait(PATIENCE_S) == EX_CONFIG
    assert f"error: {words}" in one.text()
    assert "Traceback" not in one.text()
