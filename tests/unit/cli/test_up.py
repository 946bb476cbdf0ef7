"""up, status: a program named docker has one container; the server behind it is a stand-in."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.cli import up
from sparkforge.cli.build import BuildOptions
from sparkforge.cli.main import main
from sparkforge.core.errors import Interrupted, MachineError, ServerError
from sparkforge.runtime import engine
from tests.openai_server import KEY, Fake, serving
from tests.support import linked_checkout

# each call of `docker inspect` shows the next state; the last one stays
DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >>calls
case "$1" in
ps) [ -e 1.json ] && echo c0ffee; exit 0;;
inspect) n=$(($(cat n) + 1)); [ -e $n.json ] || n=$((n - 1)); echo $n >n; cat $n.json;;
logs) cat log;;
compose) [ -e refuses ] && { echo 'no such volume' >&2; exit 1; }; echo Started;;
esac
"""
PUBLISHED = f"registry.example.org/team/spark@sha256:{'a' * 64}"
LOG = """\
entrypoint: profile exact: vllm serve /model
INFO [model.py:9] Kernels that failed their trial: INT8,NVFP4.
entrypoint: profile fast: vllm serve /model
"""


@dataclass
class Owner:
    """The checkout, and what docker does in it."""

    folder: Path
    bin: Path
    fake: Fake

    def states(self, *states: tuple[str, str, str], service: str = "spark") -> None:
        """Give the container states, each with the health check's word and line."""
        for number, (status, health, said) in enumerate(states, start=1):
            label = {"com.docker.compose.service": service}
            state: dict[str, Any] = {"Status": status, "StartedAt": "2026", "ExitCode": 69}
            if health:
                state["Health"] = {"Status": health, "Log": [{"Output": f"{said}\n"}]}
            config = {"Image": "sparkforge/spark:1", "Labels": label}
            seen = {
                "Id": "c0ffee",
                "RestartCount": 2 * (status == "restarting"),
                "State": state,
                "Config": config,
            }
            (self.bin / f"{number}.json").write_text(json.dumps([seen]))

    def calls(self, word: str) -> list[str]:
        lines = (self.bin / "calls").read_text().splitlines()
        return [line for line in lines if line.startswith(word)]

    def run(self, *words: str) -> int:
        return main([*words, "--pins", str(self.folder / "pins.yaml")])


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    folder, programs = linked_checkout(tmp_path / "checkout"), tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    (programs / "n").write_text("0")
    (programs / "log").write_text(LOG)
    (folder / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(up, "_SAMPLE_S", 0.01)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with serving() as fake:
        port = fake.url.rpartition(":")[2]
        (folder / ".env").write_text(
            f"COMPOSE_PROFILES=spark\nSPARKFORGE_IMAGE_SPARK=here\nSPARKFORGE_PORT={port}\n"
            f"SPARKFORGE_API_KEY_FILE={folder / 'key'}\n"
        )
        yield Owner(folder, programs, fake)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An engine; the list is of what was done to it, and of builds."""
    did: list[str] = []
    volumes = SimpleNamespace(create=lambda name: did.append(f"volume {name}"))
    has = {"here": "sha256:1"}
    found = SimpleNamespace(client=SimpleNamespace(volumes=volumes), image_id=has.get)
    monkeypatch.setattr(engine, "connect", lambda: found)
    monkeypatch.setattr(engine, "registry", lambda *words: did.append(" ".join(words)))

    def made(project: Any, options: BuildOptions) -> None:
        did.append(f"build {options.target} {options.variant.engine}")
        with (project.root / ".env").open("a") as env:
            env.write("SPARKFORGE_IMAGE_SPARK=built\n")

    monkeypatch.setattr(up, "made", made)
    return did


STARTS = (
    ("running", "starting", "starting: downloading 1.0 of 65.2 GB"),
    ("running", "starting", "starting: downloading 2.0 of 65.2 GB"),
    ("restarting", "", ""),
    ("running", "starting", "starting: warm-up 1/13: prompt of 1 token"),
    ("running", "healthy", ""),
)


def test_up_starts_waits_and_says_how_to_ask(
    owner: Owner, there: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    owner.states(*STARTS)
    assert owner.run("up", "--json") == 0
    seen = capsys.readouterr()
    found = json.loads(seen.out)
    assert (found["url"], found["model"]) == (f"{owner.fake.url}/v1", "m")
    assert found["curl"].endswith(f' -H "Authorization: Bearer $(cat {owner.folder / "key"})"')
    assert "/chat/completions" in found["curl"]
    assert KEY not in seen.out + seen.err
    assert "restarting; restarts: 2" in seen.err
    assert seen.err.count("downloading") == 1  # numbers alone make no line
    assert (
        seen.err.index("downloading") < seen.err.index("warm-up 1/13") < seen.err.index("healthy")
    )
    assert there == ["volume sparkforge-models"]
    (compose,) = owner.calls("compose")
    assert compose.endswith(f"{owner.folder} up --detach")


@pytest.mark.usefixtures("there")
def test_up_leaves_one_of_two_machines_its_role(owner: Owner) -> None:
    env = owner.folder / ".env"
    env.write_text(before := env.read_text().replace("=spark\n", "=spark-head,router\n"))
    owner.states(STARTS[-1], service="spark-head")
    assert owner.run("up", "--target", "spark") == 0
    assert env.read_text() == before


@pytest.mark.parametrize(
    ("image", "did"),
    [
        ("", "build spark docker"),
        ("gone", "build spark docker"),
        (PUBLISHED, f"pull {PUBLISHED}"),
    ],
)
def test_up_gets_the_image_that_is_missing(
    owner: Owner, there: list[str], image: str, did: str
) -> None:
    env = owner.folder / ".env"
    env.write_text(env.read_text().replace("=here", f"={image}").replace("spark\n", "cpu\n", 1))
    owner.states(STARTS[-1])
    assert owner.run("up", "--target", "spark") == 0
    assert there == [did, "volume sparkforge-models"]
    assert len(owner.calls("compose")) == 1
    assert env.read_text().splitlines().count("COMPOSE_PROFILES=spark") == 1
    assert "COMPOSE_PROFILES=cpu" not in env.read_text()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (("running", "starting", "unhealthy: waiting without a server: no memory"), "no memory"),
        (("exited", "", ""), "exited"),
    ],
)
@pytest.mark.usefixtures("there")
def test_a_server_that_gave_up_is_one_error(
    owner: Owner, capsys: pytest.CaptureFixture[str], state: tuple[str, str, str], said: str
) -> None:
    owner.states(STARTS[0], state)
    assert owner.run("up") == ServerError.exit_code
    error = capsys.readouterr().err
    assert "error: the server does not start: " in error
    assert said in error
    assert "hint: docker compose logs" in error


@pytest.mark.usefixtures("there")
def test_ctrl_c_leaves_the_server(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    owner.states(STARTS[0])
    assert owner.run("up") == Interrupted.exit_code
    assert "error: the server goes on starting\n  hint: see it: build.py status" in (
        capsys.readouterr().err
    )
    assert len(owner.calls("compose")) == 1  # it is neither stopped nor removed


@pytest.mark.usefixtures("there")
def test_compose_that_fails_is_one_error(owner: Owner, capsys: pytest.CaptureFixture[str]) -> None:
    (owner.bin / "refuses").touch()
    assert owner.run("up") == 12
    assert "no such volume" in capsys.readouterr().err


def test_up_without_docker(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert owner.run("up") == MachineError.exit_code
    # up has no such option
    assert "build and serve also work without one: --engine none" in capsys.readouterr().err


# -- status -------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["spark", "spark-head"])
def test_status_of_a_server_that_serves(
    owner: Owner, capsys: pytest.CaptureFixture[str], service: str
) -> None:
    owner.states(STARTS[-1], service=service)
    env = owner.folder / ".env"
    env.write_text(env.read_text().replace("=spark\n", f"={service}\n"))
    assert owner.run("status", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens/s"] > 0
    wanted: dict[str, Any] = {"target": "spark", "state": "healthy", "model": "m"}
    wanted |= {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    wanted |= {"profile": "fast", "failed_kernels": "INT8,NVFP4"}
    wanted |= {"image": "sparkforge/spark:1", "url": f"{owner.fake.url}/v1"}
    assert found.items() >= wanted.items()
    assert "GiB are available" in found["memory"]


@pytest.mark.parametrize("tried", [True, False])
def test_status_without_statistics(
    owner: Owner, capsys: pytest.CaptureFixture[str], tried: bool
) -> None:
    owner.fake.fault = "no statistics"
    (owner.bin / "log").write_text("entrypoint: trial: as before; failed: none\n" * tried)
    owner.states(STARTS[-1])
    assert owner.run("status") == 0
    shown = capsys.readouterr().out
    assert "/metrics has no vllm:generation_tokens_total" in shown
    assert ("failed_kernels  none" in shown) == ("failed_kernels" in shown) == tried


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (("running", "starting", "starting: loading"), 0),
        (("running", "unhealthy", "unhealthy: no token"), ServerError.exit_code),
        (("restarting", "", ""), ServerError.exit_code),
    ],
)
def test_status_of_a_server_that_does_not_serve(
    owner: Owner, capsys: pytest.CaptureFixture[str], state: tuple[str, str, str], code: int
) -> None:
    owner.states(state)
    assert owner.run("status") == code
    seen = capsys.readouterr()
    assert state[2] in seen.out
    assert state[1] in seen.out
    assert owner.fake.looked == 0


def test_status_without_a_server_or_docker(
    owner: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert owner.run("status") == ServerError.exit_code
    assert "error: Compose has no server of target spark\n  hint: start one: build.py up" in (
        capsys.readouterr().err
    )
    owner.states(STARTS[-1], service="router")
    assert owner.run("status") == ServerError.exit_code
    shutil.copy("/bin/false", owner.bin / "docker")
    assert owner.run("status") == MachineError.exit_code
    assert "error: no container can be seen: docker ps" in capsys.readouterr().err
