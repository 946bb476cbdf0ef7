"""Two servers and a router: docker-compose.yml with tests/data/replicas-cpu.yml."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from sparkforge.runtime.servers import free_port
from tests.support import PATIENCE_S, ROOT, wait_for

from .served import docker, project

CLIENTS = 6
SERVERS = ("one", "two")


class Replicas:
    """The three containers.

    Args:
        subnet: the first three numbers of the addresses of their bridge.
    """

    def __init__(self, tag: str, model: Path, key: Path, subnet: str) -> None:
        self.url = f"http://127.0.0.1:{free_port(0)}"
        self.key = key.read_text().strip()
        self.names = {"one": f"{subnet}.11:8000", "two": f"{subnet}.12:8000"}
        self.env = {
            **os.environ,
            "SPARKFORGE_IMAGE_CPU": tag,
            "SPARKFORGE_IMAGE_SPARK": "",
            "SPARKFORGE_IMAGE_RTX": "",
            "SPARKFORGE_MODEL_DIR": str(model),
            "SPARKFORGE_API_KEY_FILE": str(key),
            "SPARKFORGE_REPLICAS": ",".join(self.names.values()),
            "SPARKFORGE_ROUTER": self.url.removeprefix("http://"),
            "SPARKFORGE_TEST_SUBNET": subnet,
            "SPARKFORGE_CHECKS": "hang=20",
            "SPARKFORGE_EXTRA_ARGS": "",
        }
        self.name = f"sparkforge-replicas-{os.getpid()}"

    def compose(self, *arguments: str) -> str:
        words = project(self.name, ROOT / "tests/data/replicas-cpu.yml")
        return docker(*words, "--profile", "router", *arguments, env=self.env)

    def up(self) -> None:
        # one after the other: they share a new volume, and the engine fills it from the image
        self.compose("up", "--detach", SERVERS[0])
        self.compose("up", "--detach", *SERVERS, "router")
        self.wait(lambda: self.get("/health").startswith("2 of 2"))
        self.wait(lambda: self.inspect("router")["State"]["Health"]["Status"] == "healthy")

    def close(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5")

    def inspect(self, service: str) -> Any:
        container = self.compose("ps", "--all", "--quiet", service)
        return json.loads(docker("inspect", container))[0]

    def wait(self, condition: Callable[[], bool]) -> None:
        try:
            wait_for(condition, PATIENCE_S, every_s=0.5)
        except AssertionError as error:
            raise AssertionError(self.compose("logs", "--tail", "40")) from error

    def get(self, path: str) -> str:
        """Return what the router answers; "" where it does not."""
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            return requests.get(self.url + path, headers=headers, timeout=PATIENCE_S).text
        except requests.ConnectionError:
            return ""

    def answers(self, service: str) -> int:
        """Return how often the router has passed on an answer with status 200 of a server."""
        wanted = f'proxy="replicas",server="{self.names[service]}",code="2xx"'
        pattern = rf"haproxy_server_http_responses_total\{{{re.escape(wanted)}\}} (\d+)"
        found = re.search(pattern, self.get("/metrics"))
        assert found is not None
        return int(found[1])

    def wait_for_answers(self, *services: str) -> None:
        """Wait until each of the servers has answered once more."""
        before = {service: self.answers(service) for service in services}
        self.wait(lambda: all(self.answers(one) > before[one] for one in services))

    def lost(self) -> list[str]:
        """Return the server of each chat that was not answered, as the router's log has them."""
        line = r"POST /v1/chat/completions (\d+) replica=(\S+) .* end=(\S+)"
        chats = re.findall(line, self.compose("logs", "router"))
        return [name for status, name, end in chats if status != "200" or end[0] != "-"]

    def signal(self, service: str, name: str, *, engine: bool) -> None:
        """Send a signal to the engine of a server that is a stand-in, or to the server itself."""
        found = re.findall(r"engine (\d+) of (\d+)", self.compose("logs", service))
        pid = found[-1][0 if engine else 1]
        self.compose("exec", service, "sh", "-c", f"kill -{name} {pid}")

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Have clients send requests one after the other, each of a conversation of its own."""
        load = Load(self)
        threads = [threading.Thread(target=load.client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield load
        finally:
            load.ends.set()
            for thread in threads:
                thread.join()


class Load:
    """What the clients have seen.

    Attributes:
        answered: number of requests.
        lost: each request that was not answered.
    """

    def __init__(self, machines: Replicas) -> None:
        self.machines, self.ends = machines, threading.Event()
        self.answered = 0
        self.lost: list[str] = []
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        """Send requests until the end."""
        turn = 0
        while not self.ends.wait(0.02):
            turn += 1
            text = f"client {number}, conversation {turn}"
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            headers = {"Authorization": f"Bearer {self.machines.key}", "Connection": "close"}
            url = f"{self.machines.url}/v1/chat/completions"
            try:
                reply = requests.post(url, json=body, headers=headers, timeout=PATIENCE_S)
                said = "" if reply.ok else f"{reply.status_code} {reply.text}"
            except requests.RequestException as error:
                said = repr(error)
            with self._lock:
                self.answered += not said
                self.lost += [f"{time.monotonic():.1f}: {text}: {said}"] if said else []
