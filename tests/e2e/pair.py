"""The two services of docker-compose.yml for two Sparks, on one machine without a GPU."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkforge.runtime.servers import free_port
from tests.support import ROOT

from . import served

BOTH = ("spark-head", "spark-worker")
SIGNAL = """
import os, pathlib, sys
for stat in pathlib.Path("/proc").glob("[0-9]*"):
    line = (stat / "cmdline").read_bytes()
    if int(stat.name) != os.getpid() and (b"VLLM::Worker" in line or b"--headless" in line):
        os.kill(int(stat.name), int(sys.argv[1]))
"""


class Pair:
    """Both services in one project.

    Args:
        subnet: the first three numbers of the addresses of their bridge; one of each pair's own.
    """

    def __init__(self, tag: str, model: Path, subnet: str) -> None:
        self.port = free_port(0)
        self.env = {
            **os.environ,
            "SPARKFORGE_IMAGE_CPU": tag,
            "SPARKFORGE_MODEL_DIR": str(model),
            "SPARKFORGE_PORT": str(self.port),
            "SPARKFORGE_CLUSTER": f"{subnet}.2,{subnet}.3,eth0",
            "TEST_HEAD": f"{subnet}.2",
            "TEST_WORKER": f"{subnet}.3",
            "SPARKFORGE_TEST_SUBNET": f"{subnet}.0/24",
            "SPARKFORGE_API_KEY_FILE": "/dev/null",
            "SPARKFORGE_EXTRA_ARGS": "",
        }
        self.name = f"sparkforge-pair-{self.port}"

    def compose(self, *arguments: str) -> str:
        words = served.project(self.name, ROOT / "tests/data/cluster-cpu.yml")
        return served.docker(*words, "--profile", "*", *arguments, env=self.env)

    def state(self, service: str) -> Any:
        container = self.compose("ps", "--all", "--quiet", service)
        return json.loads(served.docker("inspect", container))[0]

    def wait(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait for a condition; returns the seconds it took."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, self.compose("logs", "--tail", "60")
            time.sleep(0.5)
        return time.monotonic() - start

    def healthy(self, *services: str) -> bool:
        return all(self.state(s)["State"]["Health"]["Status"] == "healthy" for s in services)

    def up(self) -> float:
        """Start both; returns the seconds until both were healthy."""
        self.compose("up", "--detach", *BOTH)
        return self.wait(lambda: self.healthy(*BOTH), served.READY_S)

    def lose(self, service: str, number: signal.Signals) -> tuple[float, float]:
        """Stop or kill a rank.

        Returns:
            Seconds until the head was no longer healthy, and until both were again.
        """
        restarts = {name: self.state(name)["RestartCount"] for name in BOTH}
        python = "/opt/sparkforge/venv/bin/python"
        self.compose("exec", service, python, "-c", SIGNAL, str(number.value))
        noticed_s = self.wait(lambda: not self.healthy("spark-head"), served.READY_S)
        again_s = self.wait(lambda: self.healthy(*BOTH), served.READY_S)
        assert all(self.state(name)["RestartCount"] > restarts[name] for name in BOTH)
        return noticed_s, again_s

    def close(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5")
