"""`build.py accept` against a stand-in that keeps every promise, or breaks one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.check import accept
from sparkforge.check.accept import CHECKS, judge
from sparkforge.check.subject import Container, Subject, container_of
from sparkforge.cli import main
from sparkforge.core.errors import ServerError
from sparkforge.pins import pins
from sparkforge.runtime import client
from sparkforge.runtime.client import Model, Place
from sparkforge.serving.profile import Profile
from tests.openai_server import KEY, MAX_LEN, Fake, serving
from tests.support import ROOT, linked_checkout

PINS = pins.load(ROOT / "pins.yaml")
SPARK = PINS.profile_of(PINS.target("spark"))
CHOSE = """\
(EngineCore_DP0 pid=9999999) INFO 11-21 [mxfp4.py:8] Using 'MARLIN' Mxfp4 MoE backend.
(EngineCore_DP0 pid=9999999) INFO 11-21 [cuda.py:8] Using AttentionBackendEnum.FLASHINFER backend.
(EngineCore_DP0 pid=9999999) INFO 11-21 [selfcheck.py:8] Decode kernels are used for MXFP4 experts 1
"""
START = "entrypoint: profile fast: vllm serve m --moe-backend marlin --moe-backend {} --port 8\n"
FAULTS = {
    "dies": "chat",
    "is empty": "chat",
    "counts wrong": "chat",
    "splits nothing": "chat",
    "shows Harmony": "chat",
    "never ends a stream": "streamed chat",
    "reasons last": "streamed chat",
    "breaks a stream": "streamed chat",
    "calls no tool": "tool call",
    "cuts arguments": "tool call",
    "streams no call": "tool call",
    "no answer to a result": "tool call",
    "writes no JSON": "structured output",
    "cuts prompts": "long prompt",
    "ignores max_tokens": "limits",
    "serves any model": "limits",
    "needs no key": "limits",
    "is empty at once": "eight at once",
    "leaks a request": "idle afterwards",
    "a kernel is off": "decode kernels",
    "leaks a header": "cut chat",
    "ends a cut call": "cut call",
    "completes a cut": "cut call",
    "keeps stop strings": "stop string",
    "ends for ever": "ignore eos",
    "makes ids twice": "ids of responses",
    "refuses other tools": "tools of codex",
    "drops images": "images",
    "ignores options": "options of templates",
    "ends a turn with a call": "tool of messages",
    "allows all tools": "allowed tools",
}
"""Each fault of the stand-in, and the check that sees it."""


def subject(fake: Fake, container: Container = Container(problem="none")) -> Subject:
    place = Place(f"{fake.url}/v1", KEY)
    return Subject(place, client.served_model(place), SPARK, container, long_tokens=500)


def test_good_server_passes_every_check() -> None:
    with serving() as fake:
        one = subject(fake, Container(CHOSE))
        assert one.model == Model("m", MAX_LEN)
        rows = [judge(name, one) for name in CHECKS]
    assert [row for row in rows if row.state != "ok"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_promise_fails_its_check(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "IDLE_S", 0.3)  # a request that leaks runs for ever
    with serving(fault) as fake:
        one = subject(fake)
        if FAULTS[fault] == "idle afterwards":
            one.chat("Hello")
        row = judge(FAULTS[fault], one)
    assert row.state == "fail", row
    assert re.match("expected .+, got .+", row.seen)
    assert row.hint
    assert "\n" not in row.seen


@pytest.mark.parametrize(
    ("log", "state"),
    [
        (CHOSE.replace("MARLIN", "TRITON"), "fail"),
        (f"{START.format('flashinfer_cutlass')}{CHOSE.replace('MARLIN', 'CUTLASS')}", "ok"),
        (f"{START.format('marlin')}{CHOSE.replace('MARLIN', 'CUTLASS')}", "fail"),
        (CHOSE.splitlines()[0], "fail"),
        (f"{CHOSE} INFO [x.py:1] Using MarlinMxFp4LinearKernel for MXFP4 GEMM\n", "fail"),
        ("vLLM without a line about backends\n", "not checked"),
    ],
    ids=[
        "other experts",
        "tried experts",
        "untried experts",
        "no attention",
        "other dense layers",
        "no line",
    ],
)
def test_backends_are_those_of_the_profile(log: str, state: str) -> None:
    with serving() as fake:
        assert judge("backends", subject(fake, Container(log))).state == state


def test_backend_of_the_user_is_not_the_profile_s() -> None:
    with serving() as fake:
        one = subject(fake, Container(CHOSE.replace("MARLIN", "TRITON")))
        own = replace(one, options=["--moe-backend", "triton"])
        assert judge("backends", own).state == "ok"


def test_unseen_readings_are_not_checked() -> None:
    with serving("no kernels") as fake:
        one = subject(fake)
        assert {judge(name, one).state for name in list(CHECKS)[-2:]} == {"not checked"}
    with serving("no statistics") as fake:
        assert judge("idle afterwards", subject(fake)).state == "not checked"


def test_words_are_checked_only_with_the_real_model() -> None:
    with serving("counts wrong") as fake:
        assert judge("chat", replace(subject(fake), profile=Profile())).state == "ok"


COMPOSE = {"SPARKFORGE_BIND": "::1", "SPARKFORGE_PORT": "8123"}


# -- the container behind an address ------------------------------------------------------------

SEEN = {
    "Id": "c0ffee",
    "State": {"StartedAt": "2026-11-23T10:00:00Z"},
    "Config": {"Image": "sparkforge/cpu:1", "Labels": {"com.docker.compose.service": "cpu"}},
}
DOCKER = f"""#!/bin/sh
case "$1" in
ps) case "$*" in *project=sparkforge*oneoff=False) echo c0ffee;; esac;;
inspect) echo '[{json.dumps(SEEN)}]';;
logs) [ "$3" = 2026-11-23T10:00:00Z ] || exit 1; echo 'of this start';;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A docker with one container of Compose, of the cpu target."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("docker")
def test_container_of_compose_is_read() -> None:
    found = container_of(Place("http://[::1]:8123/v1"), COMPOSE, "cpu")
    assert found == Container("of this start\n", "sparkforge/cpu:1")


@pytest.mark.parametrize(
    ("url", "changed"),
    [
        ("http://[::1]:8000/v1", {}),
        ("http://192.0.2.1:8123/v1", {}),
        ("http://[::1]:8123/v1", {"target": "rtx"}),
        ("http://[::1]:8123/v1", {"COMPOSE_PROJECT_NAME": "another"}),
    ],
)
@pytest.mark.usefixtures("docker")
def test_container_of_another_server_is_not_read(url: str, changed: dict[str, str]) -> None:
    variables = {**COMPOSE, **changed}
    assert container_of(Place(url), variables, changed.get("target", "cpu")).problem


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which Compose serves the spark target with a key."""
    folder = linked_checkout(tmp_path / "checkout")
    (folder / "key").write_text(f"{KEY}\n")
    monkeypatch.chdir(tmp_path)
    for name in ("COMPOSE_PROFILES", "SPARKFORGE_PORT", "SPARKFORGE_BIND"):
        monkeypatch.delenv(name, raising=False)
    return folder


def accepted(project: Path, *words: str) -> int:
    return main.main(["accept", "--pins", str(project / "pins.yaml"), *words])


def compose(project: Path, fake: Fake) -> None:
    (project / ".env").write_text(
        f"COMPOSE_PROFILES=spark\nSPARKFORGE_PORT={fake.server_address[1]}\n"
        f"SPARKFORGE_API_KEY_FILE={project / 'key'}\n"
    )


def test_server_of_compose_is_found_and_reported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = project / "log"
    log.write_text(CHOSE)
    with serving() as fake:
        compose(project, fake)
        assert accepted(project, "--json", "--long-prompt", "500", "--log", str(log)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["ok"], found["model"]) == ("spark", True, "m")
    assert found["counts"] == {"ok": len(CHECKS), "fail": 0, "not checked": 0}
    file = Path(found.pop("report"))
    assert file.parent == project / "dist" / "spark" / "accept"
    assert json.loads(file.read_text()) == found


def test_failed_check_has_a_hint_and_a_code(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("writes no JSON") as fake:
        compose(project, fake)
        assert accepted(project, "--long-prompt", "500") == ServerError.exit_code
    seen = capsys.readouterr()
    assert re.search("✗ structured output.*\n +hint: ", seen.out)
    assert ": structured output" in seen.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--url", "http://127.0.0.1:9"], ServerError.exit_code),
        (["--url", "ftp://127.0.0.1"], 2),
        (["--url", "http://user:hunter2@127.0.0.1:9"], 2),
        (["--log", "missing"], 2),
        (["--target", "none"], 2),
    ],
)
def test_bad_input_is_one_error(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    assert accepted(project, *words) == code
    error = capsys.readouterr().err
    assert "hint: " in error
    assert "hunter2" not in error


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:8000/v1"),
        ({"SPARKFORGE_BIND": "0.0.0.0", "SPARKFORGE_PORT": "81"}, "http://127.0.0.1:81/v1"),
        ({"SPARKFORGE_BIND": "::"}, "http://[::1]:8000/v1"),
    ],
)
def test_address_of_compose(variables: dict[str, str], url: str) -> None:
    assert client.place_of(variables).url == url


def test_wrong_key_is_not_printed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as fake:
        compose(project, fake)
        (project / "key").write_text("hunter2\n")
        assert accepted(project, "--json") == ServerError.exit_code
    seen = capsys.readouterr()
    assert "hunter2" not in seen.out + seen.err
    assert "401" in seen.err
    assert "SPARKFORGE_API_KEY_FILE" in seen.err


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        "[]",
        '{"choices": [{"message": {"content": 7, "tool_calls": 7}}], "usage": "x"}',
        '{"type": 7, "choices": [{"delta": {"content": 7}}]}',
    ],
    ids=range(4),
)
def test_answer_of_another_shape_fails_and_ends_no_check(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    reply = client.Reply(200, text)
    monkeypatch.setattr(client, "post", lambda *words: reply)
    monkeypatch.setattr(client, "look", lambda *words: reply)
    monkeypatch.setattr(client, "events", lambda *words: iter([reply.json()]))
    one = Subject(Place("http://127.0.0.1:9/v1"), Model("m", MAX_LEN))
    states = {judge(name, one).state for name in CHECKS}
    assert states == {"fail", "not checked"}
    with pytest.raises(ServerError):
        client.served_model(one.place)
