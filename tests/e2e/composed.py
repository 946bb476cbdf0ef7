"""One server that `docker compose up` starts from an image, with an empty model."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparkforge.runtime.servers import free_port
from tests.support import PATIENCE_S

from .served import docker, project


class Composed:
    """One project of docker-compose.yml.

    Args:
        more: a Compose file, beside ours.
    """

    def __init__(
        self,
        image_tag: str,
        folder: Path,
        variables: Mapping[str, str],
        more: Mapping[str, Any],
    ) -> None:
        self.more = folder / "more.json"
        self.more.write_text(json.dumps(more))
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.port = free_port(0)
        self.env = {
            **os.environ,
            "COMPOSE_PROFILES": "cpu",
            "SPARKFORGE_IMAGE_CPU": image_tag,
            "SPARKFORGE_MODEL_DIR": str(folder / "model"),
            "SPARKFORGE_PORT": str(self.port),
            "SPARKFORGE_API_KEY_FILE": "/dev/null",
            **variables,
        }
        self.name = f"sparkforge-test-{os.getpid()}-{self.port}"

    def compose(self, *arguments: str) -> str:
        return docker(*project(self.name, self.more), *arguments, env=self.env)

    @property
    def container(self) -> str:
        return self.compose("ps", "--all", "--quiet")

    def inspect(self) -> Any:
        return json.loads(docker("inspect", self.container))[0]

    def logs(self) -> str:
        done = subprocess.run(
            ["docker", "logs", self.container],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return done.stdout

    def wait(self, condition: Callable[[Any], bool], seconds: float = PATIENCE_S) -> float:
        """Wait for a condition of the container's inspection; returns the seconds it took."""
        start = time.monotonic()
        while not condition(self.inspect()):
            assert time.monotonic() - start < seconds, self.logs()[-2000:]
            time.sleep(0.5)
        return time.monotonic() - start

    def healthy(self) -> None:
        self.wait(lambda seen: seen["State"]["Health"]["Status"] == "healthy")


@contextmanager
def composed(
    image_tag: str, folder: Path, more: Mapping[str, Any] | None = None, /, **variables: str
) -> Iterator[Composed]:
    one = Composed(image_tag, folder, variables, more or {})
    try:
        one.compose("up", "--detach")
        yield one
    finally:
        one.compose("down", "--volumes", "--timeout", "5")
