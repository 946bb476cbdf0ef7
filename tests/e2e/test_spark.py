"""A stand-in Spark: docs/first-run.md from .env to the first answer, and what comes after it.

Without an upgrade, which takes as long as all of this: nightly/test_upgrade.py.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sparkforge.build import composing
from sparkforge.runtime.servers import free_port
from tests.hub import Hub
from tests.reference import make_tiny
from tests.support import ROOT, wait_for

from . import driver
from .served import docker
from .small import Small

MODEL = "openai/gpt-oss-120b"
# the start of a program takes seconds under emulation, and there are many
PATIENCE_S = 900.0


class Spark:
    """A checkout on a Spark, its .env, and the one container that Compose makes of it."""

    def __init__(self, checkout: Path, machine: Path, gateway: str, hub: Hub) -> None:
        self.checkout, self.machine, self.gateway, self.hub = checkout, machine, gateway, hub
        self.port, self.hub_port, self.hub_is_up = free_port(0), free_port(0), False
        # other tests have a project of the file's own name at the same time
        self.project = f"spark-{os.getpid()}"

    def start_hub(self) -> None:
        self.hub.start(self.hub_port, self.gateway)
        self.hub_is_up = True

    def run(self, *words: str | Path) -> str:
        """Run a command of docs/first-run.md in the checkout."""
        outside = ("SPARKFORGE_", "COMPOSE_", "HF_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        env |= {"COMPOSE_PROJECT_NAME": self.project}
        if store := os.environ.get("SPARKFORGE_STORE"):
            env["SPARKFORGE_STORE"] = store
        done = subprocess.run(
            words, cwd=self.checkout, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def compose(self, *words: str) -> str:
        return self.run("docker", "compose", *words)

    def build(self, *words: str) -> Any:
        return json.loads(self.run(sys.executable, "build.py", *words, "--json"))

    def env(self, **variables: str) -> None:
        """Write variables into .env."""
        composing.put(self.checkout / ".env", variables)

    def state(self) -> Any:
        """Return what `docker compose ps` says of the one container."""
        (line,) = self.compose("ps", "--all", "--format", "json").splitlines()
        return json.loads(line)

    def seen(self) -> Any:
        return json.loads(docker("inspect", self.state()["ID"]))[0]

    def log(self) -> str:
        return self.compose("logs", "--no-log-prefix", "--no-color")

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for something; prints how long that took."""
        began = time.monotonic()
        try:
            wait_for(condition, PATIENCE_S, every_s=0.5)
        except AssertionError:
            raise AssertionError(self.log()[-4000:]) from None
        print(f"line {sys._getframe(1).f_lineno}: {time.monotonic() - began:.0f} s")

    def healthy(self) -> None:
        """Wait until `docker compose ps` says so."""
        self.wait(lambda: bool(self.state()["Health"] == "healthy"))

    def answer(self) -> str:
        """Ask as docs/first-run.md does."""
        body = {
            "model": MODEL,
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        }
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        reply = requests.post(url, json=body, timeout=PATIENCE_S)
        assert reply.ok, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])


def in_order(text: str, *wanted: str) -> None:
    """Check that these are in a text, each behind the one before it."""
    at = 0
    for one in wanted:
        found = text.find(one, at)
        assert found >= 0, f"{one!r} is not in {text[at:]}"
        at = found + len(one)


def printed(lead: str) -> list[str]:
    """Return what docs/first-run.md shows of a log, behind some words, without what differs (…)."""
    _, found, section = (ROOT / "docs/first-run.md").read_text().partition(lead)
    assert found, f"docs/first-run.md has no {lead!r}"
    shown = re.findall(r"\n```\n(.*?)```", section, re.DOTALL)[0]
    return [one.strip() for line in shown.splitlines() for one in line.split("…") if one.strip()]


@pytest.fixture(scope="module")
def spark(small_spark: Small, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """The machine after step 3 of docs/first-run.md; its hub cannot be reached yet."""
    machine = os.environ.get("SPARKFORGE_TEST_DRIVER")
    if machine is None:
        pytest.skip("no made-up driver: scripts/test.py --with-engine (root, amd64)")
    folder = make_tiny(tmp_path_factory.mktemp("hub") / "model").path
    files = {one.name: one.read_bytes() for one in folder.iterdir()}
    files |= {
        f"{one}/{name}": data for one in ("original", "metal") for name, data in files.items()
    }
    (settings,) = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"]
    one = Spark(small_spark.checkout, Path(machine), settings["Gateway"], Hub(files, MODEL))
    small_spark.bake()
    # a machine of CI may not raise its own limits
    (small_spark.checkout / "docker-compose.override.yml").write_text(
        "services: {spark: {ulimits: !reset null}}\n"
    )
    one.env(
        SPARKFORGE_PORT=str(one.port),
        HF_ENDPOINT=f"http://{one.gateway}:{one.hub_port}",
        SPARKFORGE_CHECKS="hang=600",  # emulated, on a busy machine, an answer may take a minute
    )
    docker("volume", "create", composing.MODELS_VOLUME)
    try:
        yield one
    finally:
        one.compose("down", "--volumes", "--timeout", "5")
        docker("volume", "rm", composing.MODELS_VOLUME)
        driver.available(one.machine, driver.AVAILABLE_GIB)
        if one.hub_is_up:
            one.hub.close()


def test_too_little_memory_is_named_before_anything_else(spark: Spark) -> None:
    driver.available(spark.machine, 60)
    spark.compose("up", "--detach")
    spark.wait(lambda: "waiting without a server" in spark.log())
    in_order(
        spark.log(),
        "error: 60.0 of 119.7 GiB are available",
        "16 are kept",
        "a restart changes nothing (exit code 78)",
    )
    assert "preflight" not in spark.log()
    assert spark.state()["State"] == "running"


def test_the_first_start_waits_for_the_hub_and_ends_with_an_answer(spark: Spark) -> None:
    driver.available(spark.machine, driver.AVAILABLE_GIB)
    spark.compose("restart")
    spark.wait(lambda: bool(spark.seen()["RestartCount"]))
    without = spark.log()
    spark.start_hub()
    spark.healthy()
    in_order(
        without,
        "driver 580.95.05",
        "preflight: log-probabilities 0.00 nats",
        f"error: {MODEL} cannot be downloaded from http://{spark.gateway}:{spark.hub_port}: ",
    )
    assert "42" in spark.answer()
    in_order(spark.log(), *printed("The log shows, in this order"))
    paths = {one.path for one in spark.hub.requests}
    assert any(one.endswith("/model.safetensors") for one in paths)
    assert not [one for one in paths if "original" in one or "metal" in one]
    image = spark.seen()["Config"]["Labels"]["org.opencontainers.image.version"]
    assert image.endswith("-spark.1")


def test_the_second_start_asks_the_hub_nothing(spark: Spark) -> None:
    spark.hub.requests.clear()
    spark.compose("down")
    found = spark.build("up")
    assert found["url"] == f"http://127.0.0.1:{spark.port}/v1"
    assert "42" in spark.answer()
    in_order(spark.log(), "preflight: passed before", "ready after")
    # its seconds depend on the machine
    assert re.search(r"ready after .*, preflight \d+ \(passed before\)", spark.log())
    assert spark.hub.requests == []
    assert spark.seen()["RestartCount"] == 0
    found = spark.build("status")
    assert (found["state"], found["profile"]) == ("healthy", "balanced")
    assert found["image"] == spark.seen()["Config"]["Image"]


def test_down_with_volumes_keeps_the_model(spark: Spark) -> None:
    spark.compose("down", "--volumes")
    left = docker("volume", "ls", "--quiet").splitlines()
    assert composing.MODELS_VOLUME in left
    assert not [one for one in left if one.startswith(spark.project)]
