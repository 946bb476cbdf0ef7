"""Readings of the server's process: its log, its memory, its metrics."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkforge.core import plain
from sparkforge.core.run import Glimpse, glimpse
from sparkforge.runtime import client
from sparkforge.runtime.client import Place
from sparkforge.serving import router

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_CACHE, KERNELS = "vllm:kv_cache_usage_perc", "vllm:decode_kernels_in_use"
_RESIDENT = "process_resident_memory_bytes"
_ASK_S = 60.0
_LOG_BYTES = 64 << 20
_PIDS = re.compile(r"\((?:APIServer|EngineCore|Worker)\w* pid=(\d+)\)")
_LAYERS = ("SPARKFORGE_PROFILE",)
_METRIC = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# of control groups in version 2, else 1; version 1 says "rss" for anon
_CGROUP = "cd /sys/fs/cgroup && cat memory.stat 2>/dev/null || cat memory/memory.stat"
_COUNTED = re.compile(r"(?m)^(?:anon|rss|shmem) (\d+)$")  # memory that the kernel cannot drop


class Unseen(Exception):
    """A check is not possible here; the message is the reason."""


@dataclass(frozen=True)
class Behind:
    """The process behind a URL.

    Attributes:
        container: id of Compose's container with the server's port, or "".
        image: of that container.
        since: its last start, in Docker's format.
        options: the user's own, of ``vllm serve``.
        layers: the user's choice of dense layers, as variables of the container.
        log: a file with the server's output; None: the container's.
        why_not: reason for neither.
    """

    container: str = ""
    image: str = ""
    since: str = ""
    log: Path | None = None
    options: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    why_not: str = "nothing is known of the server's process"

    def text(self) -> str:
        """Return the server's log since its last start.

        Raises:
            Unseen: it cannot be read.
        """
        if self.log is not None:
            try:
                with self.log.open("rb") as file:
                    return file.read(_LOG_BYTES).decode(errors="replace")
            except OSError as error:
                raise Unseen(f"{self.log}: {error.strerror}") from None
        if not self.container:
            raise Unseen(self.why_not)
        words = ("docker", "logs", "--since", self.since, self.container)
        seen = glimpse(*words, timeout_s=_ASK_S, limit=_LOG_BYTES)
        if seen.code != 0:
            raise Unseen(f"docker logs: {_why(seen)}")
        return seen.out + seen.err


@dataclass(frozen=True)
class Memory:
    """Memory of the server: bytes and owner."""

    size: int
    whose: str


@dataclass(frozen=True)
class Metric:
    """A line of /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """The server's /metrics.

    Attributes:
        found: all lines with a number.
    """

    found: tuple[Metric, ...] = field(default_factory=tuple)

    @classmethod
    def of(cls, place: Place) -> Metrics:
        """Ask a server.

        Raises:
            OSError: no answer, or an error.
        """
        found = []
        reply = client.look(place, "/metrics", _ASK_S)
        if reply.status != 200:
            raise OSError(f"status {reply.status}")
        for line in reply.text.splitlines():
            if (match := _METRIC.fullmatch(line)) is None:
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if math.isfinite(value):
                found.append(Metric(match[1], dict(_LABEL.findall(match[2] or "")), value))
        return cls(tuple(found))

    def named(self, name: str) -> list[Metric]:
        """Return the lines of one metric."""
        return [metric for metric in self.found if metric.name == name]

    def total(self, name: str) -> float:
        """Return the sum of a metric.

        Raises:
            Unseen: the server does not report it.
        """
        if not (lines := self.named(name)):
            raise Unseen(f"/metrics has no {name} (--disable-log-stats?)")
        return sum(line.value for line in lines)


def find(place: Place, log: Path | None) -> Behind:
    """Find the process behind a URL: by the user's log, else a container of Compose."""
    if log is not None:
        return Behind(log=log)
    url = urlsplit(place.url)
    if not _is_here(url.hostname or ""):
        return Behind(why_not=f"{url.hostname} is another machine; its log is not here")
    listed = ("docker", "ps", "--quiet", "--filter", "label=com.docker.compose.service")
    seen = glimpse(*listed, timeout_s=_ASK_S)
    if seen.code != 0:
        return Behind(why_not=f"docker ps: {_why(seen)}")
    port = url.port or (443 if url.scheme == "https" else 80)
    if ids := seen.out.split():
        seen = glimpse("docker", "inspect", *ids, timeout_s=_ASK_S)
        try:
            for container in plain.json_of(seen.out):
                if (found := _of(container, port)) is not None:
                    return found
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return Behind(why_not=f"docker inspect: {error!r}")
    return Behind(why_not=f"no container of Compose has port {port}")


def _is_here(host: str) -> bool:
    """Return whether a name is of this machine: a socket binds to its own addresses only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def _of(inspected: Any, port: int) -> Behind | None:
    """Return a container if it has the port.

    Raises:
        LookupError, TypeError, AttributeError: Docker's answer has another shape.
    """
    config = inspected["Config"]
    pairs = dict(text.partition("=")[::2] for text in config.get("Env") or [])
    if inspected["HostConfig"]["NetworkMode"] == "host":
        ports = {pairs.get("SPARKFORGE_LISTEN_PORT", "8000")}
    else:
        found = inspected["NetworkSettings"]["Ports"] or {}
        ports = {bind["HostPort"] for binds in found.values() for bind in binds or ()}
    if str(port) not in ports:
        return None
    if router.asked(pairs):
        return Behind(why_not=f"the router has port {port}: check each server by itself")
    return Behind(
        container=str(inspected["Id"]),
        image=str(config["Image"]),
        since=str(inspected["State"]["StartedAt"]),
        options=(*pairs.get("SPARKFORGE_EXTRA_ARGS", "").split(), *(config.get("Cmd") or [])),
        layers=tuple(f"{name}={pairs[name]}" for name in _LAYERS if name in pairs),
    )


def memory(behind: Behind, place: Place) -> Memory:
    """Return the server's current memory.

    Of a container: what its processes hold, without page cache. Of a log: the same for its
    processes. Otherwise: of the process that answers HTTP only, by /metrics.

    Raises:
        Unseen: none of these can be read.
    """
    if behind.container:
        words = ("docker", "exec", behind.container, "sh", "-c", _CGROUP)
        seen = glimpse(*words, timeout_s=_ASK_S)
        sizes = [int(count) for count in _COUNTED.findall(seen.out)]
        if len(sizes) > 1:
            return Memory(sum(sizes), "the container")
    if behind.log is not None:
        pids = sorted(set(_PIDS.findall(behind.text())))
        if alive := [size for pid in pids if (size := _of_process(int(pid)))]:
            return Memory(sum(alive), f"{len(alive)} processes")
    try:
        resident = Metrics.of(place).total(_RESIDENT)
    except OSError as error:
        raise Unseen(f"/metrics: {error}") from None
    return Memory(int(resident), "the process that answers HTTP")


def _of_process(pid: int) -> int:
    """Return the bytes of a process without page cache; 0: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.findall(r"(?m)^Rss(?:Anon|Shmem):\s+(\d+) kB$", text)
    return sum(int(kib) << 10 for kib in found)


def _why(seen: Glimpse) -> str:
    return seen.problem or seen.err.strip().partition("\n")[0][:200] or f"exit code {seen.code}"
