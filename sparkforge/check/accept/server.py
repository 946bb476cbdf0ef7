"""The server under test, and readings of it: metrics, log, memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkforge.core.run import glimpse
from sparkforge.runtime import client
from sparkforge.runtime.client import Model, Place, Said
from sparkforge.serving.profile import Profile

_ASK_S = 60.0
_LOG_BYTES = 64 << 20
_TOKENS = 512  # of an answer: reasoning of low effort takes tens, the rest is a reserve
_COMPOSE = "label=com.docker.compose.service"
_METRIC = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_HELD = re.compile(r"(?m)^(?:anon|shmem) (\d+)$")  # memory that the kernel cannot drop


class Unseen(Exception):
    """A check is not possible here; the message is the reason."""


@dataclass(frozen=True)
class Container:
    """Compose's container of the server; the default is none.

    Attributes:
        since: its last start, in Docker's format.
        options: the user's own, of ``vllm serve``.
        why_not: there is none.
    """

    id: str = ""
    image: str = ""
    since: str = ""
    options: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Subject:
    """The server under test.

    Attributes:
        profile: of the target; ``answers``: it serves the real weights, so words are checked.
        log: a file with the server's output; None: the container's.
        long_tokens: limit for the long prompt.
    """

    place: Place
    model: Model
    profile: Profile = field(default_factory=Profile)
    container: Container = field(default_factory=Container)
    log: Path | None = None
    long_tokens: int = 100_000

    def body(
        self, asked: str | Sequence[Mapping[str, Any]], tokens: int = _TOKENS, **options: Any
    ) -> dict[str, Any]:
        """Return a chat at temperature 0, of one question or of messages."""
        return {
            "model": self.model.name,
            "messages": [{"role": "user", "content": asked}] if isinstance(asked, str) else asked,
            "temperature": 0,
            "reasoning_effort": "low",
            "max_tokens": min(tokens, max(1, self.model.max_len // 2)),
            **options,
        }

    def chat(self, asked: str | Sequence[Mapping[str, Any]], **options: Any) -> Said:
        """Ask without streaming."""
        return client.chat(self.place, self.body(asked, **options))

    def streamed(self, asked: str | Sequence[Mapping[str, Any]], **options: Any) -> Said:
        """Ask with streaming."""
        return client.streamed(self.place, self.body(asked, **options))

    def metrics(self, name: str) -> dict[str, float]:
        """Return the values of a metric in /metrics, by labels.

        Raises:
            Unseen: the server does not report it.
        """
        lines = client.look(self.place, "/metrics", _ASK_S).text.splitlines()
        found = [match for line in lines if (match := _METRIC.fullmatch(line))]
        if values := {one[2] or "": float(one[3]) for one in found if one[1] == name}:
            return values
        raise Unseen(f"/metrics has no {name} (--disable-log-stats?)")

    def output(self) -> str:
        """Return the server's log since its last start; raises Unseen."""
        if self.log is not None:
            return self.log.read_text(errors="replace")
        if not self.container.id:
            raise Unseen(self.container.why_not)
        return _docker("logs", "--since", self.container.since, self.container.id)

    def memory(self) -> tuple[int, str]:
        """Return the bytes that the server holds, without page cache, and their owner."""
        words = ("exec", self.container.id, "cat", "/sys/fs/cgroup/memory.stat")
        with suppress(Unseen):  # as with control groups of version 1
            if self.container.id and (sizes := _HELD.findall(_docker(*words))):
                return sum(map(int, sizes)), "the container"
        found = self.metrics("process_resident_memory_bytes")
        return int(sum(found.values())), "the process that answers HTTP"


def container_of(place: Place) -> Container:
    """Return Compose's container that publishes a port of this machine."""
    url = urlsplit(place.url)
    if url.hostname not in ("127.0.0.1", "::1", "localhost"):
        return Container(why_not=f"{url.hostname} may be another machine: name its log with --log")
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        names = _docker("ps", "-q", "--filter", _COMPOSE, "--filter", f"publish={port}").split()
        if not names:
            return Container(why_not=f"no container of Compose publishes port {port}")
        (found,) = json.loads(_docker("inspect", names[0]))
        config = found["Config"]
        pairs = dict(text.partition("=")[::2] for text in config["Env"])
        options = (*pairs.get("SPARKFORGE_EXTRA_ARGS", "").split(), *(config["Cmd"] or ()))
        return Container(names[0], config["Image"], found["State"]["StartedAt"], options)
    except (Unseen, ValueError, TypeError, LookupError) as why:
        return Container(why_not=str(why))


def _docker(*words: str) -> str:
    """Return the output of docker, of both streams; raises Unseen."""
    seen = glimpse("docker", *words, timeout_s=_ASK_S)
    if seen.code != 0:
        why = seen.problem or seen.err.strip().partition("\n")[0] or f"exit code {seen.code}"
        raise Unseen(f"docker {words[0]}: {why[:200]}")
    return seen.out + (seen.err if words[0] == "logs" else "")
