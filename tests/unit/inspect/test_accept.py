"""`build.py accept` against a stand-in that keeps every promise, or breaks one."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.build.context import profile_of
from sparkforge.cli import main
from sparkforge.inspect.accept import behind, command, gpqa, load, together
from sparkforge.inspect.accept.behind import Behind
from sparkforge.inspect.accept.row import Row, Subject, Unmet, judged
from sparkforge.pins import pins
from sparkforge.runtime import client
from sparkforge.runtime.client import Model, Place
from sparkforge.serving.profile import Profile
from tests.diamond import diamond
from tests.openai_server import KEY, MAX_LEN, Fake, serving
from tests.support import ROOT, linked_checkout

PINS = pins.load(ROOT / "pins.yaml")
_SPARK = profile_of(PINS, "spark")
# as a user's own profile may have it
SPARK = _SPARK.model_copy(update={"expect": {**_SPARK.expect, "experts": "DECODE"}})
CHOSE = """\
(EngineCore_DP0 pid=9999999) INFO 11-21 [mxfp4.py:8] Using 'MARLIN' Mxfp4 MoE backend.
(EngineCore_DP0 pid=9999999) INFO 11-21 [cuda.py:8] Using AttentionBackendEnum.FLASHINFER backend.
(EngineCore_DP0 pid=9999999) INFO 11-21 [selfcheck.py:8] Decode kernels are used for MXFP4 experts 1
"""
# each sin, and the checks that see it
SINS = {
    "dies": "chat",
    "is empty": "chat",
    "counts wrong": "chat",
    "no usage": "chat",
    "never ends a stream": "streamed chat",
    "streams one piece": "streamed chat",
    "streams no usage": "streamed chat",
    "reasons last": "streamed chat",
    "breaks a stream": "streamed chat",
    "splits nothing": "reasoning",
    "shows Harmony": "reasoning",
    "repeats reasoning": "reasoning",
    "calls no tool": "tool call",
    "calls another tool": "tool call",
    "cuts arguments": "tool call",
    "ends a call with stop": "tool call",
    "streams no call": "tool call",
    "no answer to a result": "tool call",
    "writes no JSON": "structured output",
    "breaks the schema": "structured output",
    "responds without a message": "responses",
    "responds in part": "responses",
    "streams another response": "responses",
    "cuts a response": "responses",
    "forgets turns": "two turns",
    "forgets words": "two turns",
    "cuts prompts": "long prompt",
    "ignores stop": "stop",
    "keeps the stop word": "stop",
    "calls a stop length": "stop",
    "ignores max_tokens": "max_tokens",
    "gives few logprobs": "logprobs",
    "gives positive logprobs": "logprobs",
    "gives few alternatives": "logprobs",
    "takes unlikely tokens": "logprobs",
    "serves any model": "refusals",
    "fails at broken JSON": "refusals",
    "takes any number": "refusals",
    "needs no key": "refusals",
    "is empty at once": "eight at once",
    "reads and does nothing else": "unbroken text",
    "fails at long text": "unbroken text",
    "leaks a request": "gauges",
    "leaks KV cache": "gauges",
    "a kernel is off": "decode kernels",
    "grows": "memory",
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "IDLE_S", 0.3)


def subject(fake: Fake, log: Path | None = None) -> Subject:
    place = Place(f"{fake.url}/v1", KEY)
    return Subject(place, client.model_of(place), SPARK, Behind(log=log), 500)


def states(one: Subject) -> dict[str, str]:
    return {check.name: judged(check, one).state for check in command.CHECKS}


def test_a_good_server_passes_every_check(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(CHOSE)
    with serving() as fake:
        one = subject(fake, tmp_path / "log")
        assert one.model == Model("m", MAX_LEN)
        assert states(one) == {check.name: "ok" for check in command.CHECKS}


def test_eight_users_are_there_at_once() -> None:
    (check,) = (one for one in command.CHECKS if one.name == "eight at once")
    with serving("waits for eight") as fake:
        assert judged(check, subject(fake)).state == "ok"


@pytest.mark.parametrize("sin", SINS)
def test_a_broken_promise_fails_its_check(sin: str) -> None:
    (check,) = (one for one in command.CHECKS if one.name == SINS[sin])
    with serving(sin) as fake:
        one = subject(fake)
        if check.name == "gauges":
            client.chat(one.place, one.body("Hello"))
        row = judged(check, one)
    assert row.state == "fail", row
    assert row.expected
    assert row.got
    assert row.hint
    assert "\n" not in row.words + row.hint


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            CHOSE.replace("MARLIN", "TRITON"),
            "expected moe MARLIN, got TRITON",
        ),
        (CHOSE.splitlines()[0], "expected a line about attention, experts, got none in the log"),
        (
            CHOSE.replace(
                "used for MXFP4 experts 1", "not used for MXFP4 experts: LoRA is enabled."
            ),
            "expected experts DECODE, got MARLIN",
        ),
        (
            f"{CHOSE} INFO [x.py:1] Using MarlinMxFp4LinearKernel for MXFP4 GEMM\n",
            "expected linear DECODE, got MARLIN",
        ),
    ],
    ids=["other experts", "no attention", "no decode kernels", "other dense layers"],
)
def test_another_backend_than_the_profile_s_fails(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "log").write_text(log)
    (check,) = (one for one in command.CHECKS if one.name == "backends")
    with serving() as fake:
        row = judged(check, subject(fake, tmp_path / "log"))
    assert (row.state, row.words) == ("fail", words)


def test_what_cannot_be_seen_is_not_checked(tmp_path: Path) -> None:
    with serving("no kernels") as fake:
        one = subject(fake)
        found = {check.name: judged(check, one) for check in command.CHECKS[-3:]}
    assert {name: row.state for name, row in found.items()} == {
        "backends": "not checked",
        "decode kernels": "not checked",
        "memory": "ok",
    }
    assert found["memory"].seen.endswith("(the process that answers HTTP)")
    with serving("no statistics") as fake:
        row = judged(next(c for c in command.CHECKS if c.name == "gauges"), subject(fake))
        assert row.state == "not checked"
        assert "vllm:num_requests_running" in row.seen
    (tmp_path / "log").write_text("vLLM without a line about backends\n")
    with serving() as fake:
        one = subject(fake, tmp_path / "log")
        row = judged(next(c for c in command.CHECKS if c.name == "backends"), one)
    assert row.state == "not checked"


def test_a_model_of_random_words_is_not_judged_by_them() -> None:
    (check,) = (one for one in command.CHECKS if one.name == "chat")
    with serving("counts wrong") as fake:
        one = subject(fake)
        assert judged(check, replace(one, profile=Profile())).state == "ok"
        assert judged(check, one).got.startswith("42 is not in the answer")


def test_every_check_has_a_sin() -> None:
    by_log = {"backends"}
    assert {*SINS.values(), *by_log} == {check.name for check in command.CHECKS}


# -- what is behind a URL ---------------------------------------------------------------------

DOCKER = """#!/bin/sh
case "$1" in
ps) echo c0ffee;;
inspect) cat "$(dirname "$0")/inspected";;
logs) [ "$3" = 2026-11-23T10:00:00Z ] || exit 1; echo 'of this start';;
exec) printf 'anon 1048576\\nfile 99999999\\nshmem 1048576\\n';;
esac
"""


def inspected(port: int, mode: str = "bridge", *more: str) -> str:
    binds = {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}], "9/tcp": None}
    env = [f"SPARKFORGE_LISTEN_PORT={port}", "SPARKFORGE_EXTRA_ARGS=--moe-backend triton", *more]
    other = {
        "Id": "0ther",
        "Config": {"Image": "x"},
        "HostConfig": {"NetworkMode": "y"},
        "NetworkSettings": {"Ports": None},
    }
    one = {
        "Id": "c0ffee",
        "Config": {"Env": env, "Cmd": ["--max-num-seqs", "16"], "Image": "sparkforge/cpu:1"},
        "HostConfig": {"NetworkMode": mode},
        "NetworkSettings": {"Ports": binds if mode == "bridge" else {}},
        "State": {"StartedAt": "2026-11-23T10:00:00Z"},
    }
    return json.dumps([other, one])


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "inspected"


@pytest.mark.parametrize("mode", ["bridge", "host"])
def test_the_container_with_the_server_s_port_is_read(docker: Path, mode: str) -> None:
    docker.write_text(inspected(8123, mode))
    place = Place("http://127.0.0.1:8123/v1")
    found = behind.find(place, None)
    assert (found.container, found.image) == ("c0ffee", "sparkforge/cpu:1")
    # an address of this machine that is not called localhost, as of its network
    assert behind.find(Place("http://127.0.0.77:8123/v1"), None) == found
    assert found.text() == "of this start\n"
    assert behind.memory(found, place) == behind.Memory(2 << 20, "the container")
    # a backend that the user chose is not the profile's
    assert "moe" not in SPARK.expectations((), found.options)


@pytest.mark.parametrize(
    ("text", "url", "words"),
    [
        (inspected(8001), "http://127.0.0.1:8000/v1", "no container of Compose has port 8000"),
        ("[]", "http://127.0.0.1:8000/v1", "no container of Compose"),
        ("none", "http://127.0.0.1:8000/v1", "docker inspect"),
        ("[{}]", "http://127.0.0.1:8000/v1", "docker inspect"),
        (inspected(8000), "http://192.0.2.1:8000/v1", "is another machine"),
        (
            inspected(8080, "bridge", "SPARKFORGE_REPLICAS=spark-2:8000"),
            "http://127.0.0.1:8080/v1",
            "the router has port 8080: check each server by itself",
        ),
        (inspected(8000), "http://a..b:8000/v1", "is another machine"),
    ],
)
def test_another_server_s_container_is_left_alone(
    docker: Path, text: str, url: str, words: str
) -> None:
    docker.write_text(text)
    found = behind.find(Place(url), None)
    assert not found.container
    with pytest.raises(behind.Unseen, match=words):
        found.text()


def test_the_processes_that_a_log_names_are_measured(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"(APIServer pid={os.getpid()}) INFO x\n(EngineCore_DP0 pid=9999999) y\n")
    found = behind.memory(Behind(log=log), Place("http://127.0.0.1:9/v1"))
    assert found.whose == "1 processes"
    assert found.size > 1 << 20


# -- the command ------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's folder, in which Compose serves the spark target with a key."""
    folder = linked_checkout(tmp_path / "checkout")
    (folder / "key").write_text(f"{KEY}\n")
    monkeypatch.chdir(tmp_path)
    for name in ("COMPOSE_PROFILES", "SPARKFORGE_PORT", "SPARKFORGE_BIND"):
        monkeypatch.delenv(name, raising=False)
    return folder


def accept(project: Path, *words: str) -> int:
    return main.main(["accept", "--pins", str(project / "pins.yaml"), *words])


def compose(project: Path, fake: Fake) -> None:
    (project / ".env").write_text(
        f"COMPOSE_PROFILES=spark\nSPARKFORGE_PORT={fake.server_address[1]}\n"
        f"SPARKFORGE_API_KEY_FILE={project / 'key'}\n"
    )


def test_the_server_of_compose_is_found_and_reported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = project / "log"
    log.write_text(CHOSE)
    with serving() as fake:
        compose(project, fake)
        assert accept(project, "--json", "--long-prompt", "500", "--log", str(log)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["ok"], found["model"]) == ("spark", True, "m")
    assert found["counts"] == {"ok": len(command.CHECKS), "fail": 0, "not checked": 0}
    page = Path(found["report"])
    assert page.parent == project / "dist" / "spark" / "accept"
    assert "| tool call | ok |" in page.read_text()
    kept = json.loads(page.with_suffix(".json").read_text())
    assert kept["checks"] == found["checks"]


def test_a_failed_check_is_one_line_with_a_hint_and_a_code(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("writes no JSON") as fake:
        compose(project, fake)
        assert accept(project, "--long-prompt", "500") == 26
    said = capsys.readouterr()
    (row,) = (line for line in said.out.splitlines() if "structured output  fail" in line)
    assert row.endswith("expected JSON, got 21 degrees")
    assert "hint for structured output: " in said.out
    assert "the server fails 1 of the checks: structured output" in said.err
    (page,) = (project / "dist/spark/accept").glob("*.md")
    assert "## Failed" in page.read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--url", "http://127.0.0.1:9"], 26, "nothing answers at http://127.0.0.1:9/v1"),
        (["--url", "ftp://127.0.0.1"], 2, "is not the URL of a server"),
        (["--url", "http://127.0.0.1:99999"], 2, "is not the URL of a server"),
        (["--url", "http://127.0.0.1:9/?v1"], 2, "is not the URL of a server"),
        (["--url", "http://a..b"], 26, "http://a..b/v1/models"),
        (["--log", "missing"], 2, "--log missing: no such file"),
        (["--target", "none"], 2, "none"),
    ],
)
def test_bad_input_is_one_error(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert accept(project, *words) == code
    error = capsys.readouterr().err
    assert said in error
    assert "hint: " in error


def test_a_key_that_is_missing_is_said(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as fake:
        assert accept(project, "--url", fake.url) == 26
    error = capsys.readouterr().err
    assert "401" in error
    assert "SPARKFORGE_API_KEY_FILE" in error


def test_no_password_or_key_is_printed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accept(project, "--url", "http://user:hunter2@127.0.0.1:9", "--json") == 2
    (project / "key").write_text("first\nhunter2\n")
    monkeypatch.setenv("SPARKFORGE_API_KEY_FILE", str(project / "key"))
    with serving() as fake:
        assert accept(project, "--url", fake.url, "--json") == 26
    seen = capsys.readouterr()
    assert "hunter2" not in seen.out + seen.err
    assert "401" in seen.err


ODD = (
    "<html>",
    "[" * 100_000,
    "[]",
    "null",
    "7",
    '"x"',
    '{"status": "completed"}',
    '{"status": "completed", "output": 7}',
    '{"data": ["x"]}',
    '{"data": [{"id": "m", "max_model_len": 1e999}]}',
    '{"choices": [{"message": {"content": "42"}}], "usage": {"completion_tokens": 1e999}}',
    '{"choices": [{"logprobs": {"content": ["x"]}}], "usage": {"completion_tokens": 1}}',
)


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_no_answer_of_another_shape_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    reply = client.Reply(200, text)
    monkeypatch.setattr(client, "post", lambda *words: reply)
    monkeypatch.setattr(client, "look", lambda *words: reply)
    monkeypatch.setattr(
        client, "events", lambda *words: (one for one in [reply.json()] if isinstance(one, dict))
    )
    one = Subject(Place("http://127.0.0.1:9/v1"), Model("m", MAX_LEN))
    read = (
        check for check in command.CHECKS if check.name != "unbroken text"
    )  # a status is enough
    states = {judged(check, one).state for check in read}
    assert states == {"fail", "not checked"}
    with pytest.raises(ValueError, match=r"names no model|nested|Expecting"):
        client.model_of(one.place)


def test_numbers_that_are_none_are_not_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "process_resident_memory_bytes NaN\na +Inf\nb 1e3\n"
    monkeypatch.setattr(client, "look", lambda *words: client.Reply(200, text))
    place = Place("http://127.0.0.1:9/v1")
    assert behind.Metrics.of(place).found == (behind.Metric("b", {}, 1000),)
    with pytest.raises(behind.Unseen):
        behind.memory(Behind(), place)


@pytest.mark.parametrize("path", ["models", "chat/completions", "events"])
def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(client, "_MOST_BYTES", 1 << 18)
    with serving("has no end") as fake:
        place = Place(f"{fake.url}/v1", KEY)
        with pytest.raises(OSError, match="an answer of more than"):
            if path == "models":
                client.model_of(place)
            elif path == "events":
                client.streamed(place, {})
            else:
                client.chat(place, {})


def test_an_endless_line_of_a_stream_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MOST_BYTES", 1 << 18)
    with serving("has no line") as fake, pytest.raises(OSError, match="an answer of more than"):
        client.streamed(Place(f"{fake.url}/v1", KEY), {})


# -- accuracy ---------------------------------------------------------------------------------


def test_accuracy_is_measured_as_vllm_does(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = diamond(project / "gpqa.csv")
    words = ("--long-prompt", "500", "--gpqa", str(file), "--gpqa-repeats", "2", "--json")
    with serving(model="openai/gpt-oss-20b") as fake:
        compose(project, fake)
        assert accept(project, *words) == 0
    found = json.loads(capsys.readouterr().out)["accuracy"]
    assert (found["score"], found["unclear"], found["repeats"]) == (1.0, 0, 2)
    assert found["threshold"] == 0.518
    assert found["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert found["source"].endswith("/gpqa_diamond.csv")
    files = list((project / "dist/spark/accept").iterdir())
    assert {path.suffix for path in files} == {".json", ".md"}  # no answers of a part
    kept = "".join(path.read_text() for path in files)
    assert "accuracy" in kept
    assert "How, and" not in kept  # the questions are not published


def test_a_model_that_guesses_is_below_the_threshold(tmp_path: Path) -> None:
    questions = gpqa.Questions.load(diamond(tmp_path / "gpqa.csv"))
    kept = gpqa.Kept(tmp_path / "part")
    with serving("guesses", model="gpt-oss-120b-mxfp4") as fake:
        score = gpqa.run(subject(fake), questions, 0.6, kept, 1)
    assert 0.1 < score.score < 0.4
    assert 0.01 < score.error < 0.05
    with pytest.raises(Unmet, match=r"0\.600 at least"):
        score.judge()


def test_a_server_that_dies_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpqa, "_PAUSE_S", 0.0)
    questions = gpqa.Questions.load(diamond(tmp_path / "gpqa.csv"))
    kept = gpqa.Kept(tmp_path / "part")
    with serving("dies", model="gpt-oss-20b") as fake, pytest.raises(Unmet) as error:
        gpqa.run(subject(fake), questions, 0.5, kept, 1)
    assert error.value.got == "ConnectionError"


def test_an_interrupted_measurement_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = gpqa.Questions.load(diamond(tmp_path / "gpqa.csv"))
    asked, ends = [], [150]
    ask = gpqa._ask

    def until_it_ends(one: Subject, text: str, stopping: threading.Event) -> str:
        asked.append(text)
        if len(asked) > ends[0]:
            raise KeyboardInterrupt
        return ask(one, text, stopping)

    monkeypatch.setattr(gpqa, "_ask", until_it_ends)
    with serving(model="gpt-oss-20b") as fake:
        one = subject(fake)
        kept = gpqa.Kept.of(tmp_path / "accept", one, questions, 2)
        with pytest.raises(KeyboardInterrupt):
            gpqa.run(one, questions, 0.5, kept, 2)
        done = len(kept.letters())
        assert 50 < done <= 150
        assert "How, and" not in kept.path.read_text()
        number, said = next(iter(kept.letters().items()))
        with kept.path.open("a") as file:
            file.write(f"\n{number} {said} 1000.0;\n199 A 1")  # the last: a power cut within a line
        asked.clear()
        ends[0] = 1000
        score = gpqa.run(one, questions, 0.5, kept, 2)
    assert score.score == 1.0
    assert score.seconds > 1000  # those of the interrupted run count
    assert len(asked) == 2 * 198 - done
    assert f"continuing with {done} answers from" in capsys.readouterr().out
    assert len(kept.letters()) == 2 * 198  # until the report is written


def test_answers_of_another_server_or_task_are_not_taken(tmp_path: Path) -> None:
    questions = gpqa.Questions.load(diamond(tmp_path / "gpqa.csv"))
    one = Subject(Place("http://127.0.0.1:9/v1"), Model("m", 1))
    others = [
        (replace(one, place=Place("http://127.0.0.1:8/v1")), 8),
        (replace(one, model=Model("n", 1)), 8),
        (replace(one, behind=Behind(image="sparkforge/spark:2")), 8),
        (replace(one, behind=Behind(layers=("SPARKFORGE_PROFILE=fast",))), 8),
        (one, 1),
    ]
    paths = {gpqa.Kept.of(tmp_path, *pair[:1], questions, pair[1]).path for pair in others}
    assert gpqa.Kept.of(tmp_path, one, questions, 8).path not in paths
    assert len(paths) == len(others)


@pytest.mark.parametrize(
    ("count", "changes", "words"),
    [
        (100, {}, "100 questions, GPQA diamond has 198"),
        (0, {}, "a row without 'Question'"),
        (198, {"Correct Answer": ""}, "a row without 'Correct Answer'"),
    ],
)
def test_another_data_set_is_refused(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    count: int,
    changes: dict[str, str],
    words: str,
) -> None:
    file = diamond(project / "gpqa.csv", count, **changes)
    assert accept(project, "--gpqa", str(file)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "nothing is downloaded here" in error


def test_a_missing_data_set_and_a_model_without_a_threshold_are_errors(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accept(project, "--gpqa", str(project / "none.csv")) == 2
    assert gpqa.SOURCE in capsys.readouterr().err
    (project / "binary.csv").write_bytes(b"\xff\xfe")
    assert accept(project, "--gpqa", str(project / "binary.csv")) == 2
    assert accept(project, "--gpqa-repeats", "2") == 2
    capsys.readouterr()
    with serving() as fake:
        compose(project, fake)
        file = diamond(project / "gpqa.csv")
        assert accept(project, "--gpqa", str(file)) == 2
        assert "no threshold for m" in capsys.readouterr().err
        assert accept(project, "--gpqa-threshold", "0.6") == 2
        assert accept(project, "--gpqa", str(file), "--gpqa-threshold", "60") == 2
    assert "not a number from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("The answer is B", "B"),
        ("Answer: (C)", "C"),
        ("**Answer:** D", "D"),
        ("**D) the last**", "D"),
        ("\\boxed{\\text{A}}", "A"),
        ("I choose option B.", "B"),
        ("A or B? At first A.\n\nC", "C"),
        ("A good answer needs time.", "A"),  # as gpt-oss's own search: the first letter
        ("It is (A), no: (B)", "B"),
        ("No idea", ""),
        ("", ""),
    ],
)
def test_the_letter_of_an_answer(text: str, chosen: str) -> None:
    assert gpqa.letter(text) == chosen


def test_the_choices_come_in_another_order_each_time() -> None:
    cases = gpqa._cases([("q", "right", "w1", "w2", "w3")], 8)
    assert {best for _, _, best in cases} > {cases[0][2]}
    for _, text, best in cases:
        assert f"({best}) right" in text
        assert text.startswith("q\n\n(A) ")


# -- load -------------------------------------------------------------------------------------


def under_load(fake: Fake) -> dict[str, Row]:
    rows = load.run(subject(fake), 0.5, clients=4)
    return {row.name.removeprefix("load: "): row for row in rows}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MEMORY_EVERY_S", 0.1)
    monkeypatch.setattr(load, "_SLOW_S", 0.01)
    monkeypatch.setattr(load, "_HUGE_BYTES", 1 << 18)


def test_a_good_server_stands_the_load(quick: None) -> None:
    with serving() as fake:
        found = under_load(fake)
    assert {name: row.words for name, row in found.items() if row.state == "fail"} == {}
    assert list(found) == ["answers", "requests left", "memory", "a chat after it"]
    for kind in load.KINDS:
        assert kind in found["answers"].seen


@pytest.mark.parametrize(
    ("sin", "row", "words"),
    [
        ("dies at times", "answers", "ConnectionError"),
        ("fails at odd bodies", "answers", "malformed: expected status 400"),
        ("fails at broken JSON", "answers", "malformed: expected status 400"),
        ("takes huge prompts", "answers", "huge: expected status 400"),
        ("is empty", "answers", "an empty one"),
        ("leaks a request", "requests left", "running 1"),
        ("is empty", "a chat after it", "expected content"),
    ],
)
def test_what_breaks_under_load_is_seen(quick: None, sin: str, row: str, words: str) -> None:
    with serving(sin) as fake:
        found = under_load(fake)[row]
    assert found.state == "fail"
    assert words in found.words


NOISE = [0, 110, 40, 90, 170, 20, 60, 130, 10, 150]
"""MiB, of a heap that is given back in part."""


def memory_row(mib: Sequence[float]) -> Row:
    tally = load.Tally(sizes=[behind.Memory(int(one * (1 << 20)), "me") for one in mib])
    return judged(load._memory(tally), Subject(Place(""), Model("m", 1)))


@pytest.mark.parametrize(
    ("mib", "state", "words"),
    [
        ([9, 99, 99, 100, 101, 100], "ok", "100 MiB, then +1 and -1 MiB, of me; most 101 MiB"),
        ([9, 99, 98, 170, 240, 330], "fail", "of the time, got 170 MiB, then +70 and +90 MiB"),
        ([99, 99, 99], "not checked", "more minutes are needed"),
    ],
)
def test_memory_has_to_be_flat(mib: list[int], state: str, words: str) -> None:
    row = memory_row(mib)
    assert row.state == state
    assert words in row.words


def test_memory_is_that_of_the_same_processes() -> None:
    tally = load.Tally(sizes=[behind.Memory(1, "me")] * 8 + [behind.Memory(1, "another")])
    assert judged(load._memory(tally), Subject(Place(""), Model("m", 1))).state == "fail"


@pytest.mark.parametrize("readings", [12, 120, 123])
def test_a_leak_is_told_from_a_step_and_from_noise(readings: int) -> None:
    """Ten minutes with a reading every five seconds are 120; the server holds some GiB."""
    noise = [3600 + NOISE[at % len(NOISE)] for at in range(readings)]
    flat = [3600.0] * readings
    assert memory_row(noise).state == "ok"
    for at in range(readings):  # one step of any size, whenever it is, and what the start adds
        step = [1000.0 * (one >= at) for one in range(readings)]
        start = [100.0 * min(one, readings // 4) for one in range(readings)]
        assert memory_row(list(map(sum, zip(flat, step, start, strict=True)))).state == "ok"
    for much, state in ((0.9, "ok"), (1.1, "fail")):  # of the limit, in each quarter
        leak = [much * load.GROWTH_MIB * one / (readings // 4) for one in range(readings)]
        assert memory_row(list(map(sum, zip(flat, leak, strict=True)))).state == state
    leak = [3 * load.GROWTH_MIB * one / (readings // 4) for one in range(readings)]
    assert memory_row(list(map(sum, zip(noise, leak, strict=True)))).state == "fail"


def test_a_guard_that_refuses_is_no_failure(quick: None) -> None:
    with serving("is short of memory") as fake:
        found = under_load(fake)["answers"]
    assert found.state == "ok"
    assert "malformed (503, refused by the memory guard)" in found.seen
    assert "huge (503, refused by the memory guard)" in found.seen


def test_load_is_a_command(project: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as fake:
        compose(project, fake)
        assert accept(project, "--load", "0.02", "--clients", "3", "--json") == 0
    names = [one["name"] for one in json.loads(capsys.readouterr().out)["checks"]]
    assert names[0] == "load: answers"
    assert accept(project, "--clients", "3") == 2


# -- Ctrl-C -----------------------------------------------------------------------------------

FEW = gpqa.Questions((("first", *"rabc"), ("more", *"rabc")), "")


@pytest.mark.parametrize(
    "run",
    [
        together.crowd,
        lambda one: gpqa.run(one, FEW, 0.5, gpqa.Kept(Path("/dev/null/none")), 9),
        lambda one: load.run(one, 3600, clients=2),
    ],
    ids=["crowd", "accuracy", "load"],
)
def test_an_interrupted_run_does_not_wait_for_answers(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Subject], object]
) -> None:
    """The first thread is interrupted, which in_parallel passes on as Ctrl-C; all others hang."""
    end = threading.Event()

    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    def hanging(*words: object) -> None:
        end.wait()

    def asked(one: Subject, text: str, *words: object) -> None:
        (interrupted if text.startswith("first") else hanging)()

    monkeypatch.setattr(together, "hang_up", interrupted)
    monkeypatch.setattr(load, "_measure", interrupted)
    monkeypatch.setattr(client, "streamed", hanging)
    monkeypatch.setattr(load, "_one", hanging)
    monkeypatch.setattr(gpqa, "_ask", asked)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(Subject(Place(""), Model("gpt-oss-20b", MAX_LEN)))
    finally:
        end.set()
