"""The front door: HAProxy between the clients and vLLM, or the servers of a router.

vLLM has no key for most of its paths, no limits, and one event loop. So it listens on a socket in a
folder of this user alone, and every request from outside passes the rules of ``door.cfg.j2``.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.serving import access, processes
from sparkforge.serving.errors import EX_UNAVAILABLE, StartError, say

if TYPE_CHECKING:
    from sparkforge.serving.settings import Variables

MAX_BODY_MIB = 8
"""Of a request. The longest prompt of gpt-oss, 131,072 tokens, has less than 1 MB."""
CONNECTIONS, CONNECTIONS_BY_SOURCE = 1024, 256
"""Behind Docker all clients may be one source."""
LARGE_MIB = 224
"""For bodies above 256 KiB. With those of all connections 480 MiB: the profiles' ``keep_free_gib``
includes them."""
BUFFERS = {"outer": 80 << 10, "inner": 192 << 10, "router": 320 << 10}
"""Bytes of a buffer, by part; the inner one's beside a body. An endless head fills one."""
_STARTS_S, _ANSWERS_S = 60.0, 10.0  # 0.1 and less; more on a busy machine
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
"""glibc gives freed buffers of bodies back to the system."""
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
_CHECK = "check inter 2s fastinter 1s fall 3 rise 1 on-marked-down shutdown-sessions"


@dataclass(frozen=True)
class Rules:
    """Who may ask, and how much."""

    port: int
    host: str
    """``port``, ``host``: to listen on; host "": all addresses of IPv4."""
    key: str
    """That clients have to send, or ""."""
    anybody: bool
    """Without a key: any name of this server is served, not only loopback's."""
    origins: tuple[str, ...]
    """Of web pages that may ask, like ``http://localhost:3000``."""
    open_metrics: bool
    """/metrics needs no key."""


def rules(variables: Variables, environment: Mapping[str, str]) -> Rules:
    """Return the rules of a start.

    Raises:
        StartError: others could use the server without a key, or a web page's address is none.
    """
    key = access.api_key(environment)
    # without Compose nobody says where the port is published
    bind = variables.bind or variables.listen_host or "0.0.0.0"
    access.check_open(bind, key, allowed=variables.allow_open)
    origins = tuple(variables.origins.replace(",", " ").split())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            msg = f"SPARKFORGE_ORIGINS has {origin[:100]!r}: use a list like http://localhost:3000"
            raise StartError(msg)
    return Rules(
        port=variables.listen_port,
        host=variables.listen_host,
        key=key,
        anybody=variables.allow_open,
        origins=origins,
        open_metrics=variables.open_metrics,
    )


def folder() -> Path:
    """Return the folder of the sockets, for this user alone.

    Raises:
        StartError: it is another user's, or cannot be made.
    """
    # not tempfile's, which is another one while the disk is full
    path = Path(os.environ.get("TMPDIR") or "/tmp") / "sparkforge"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartError(f"{path}: {error.strerror} (see TMPDIR)") from None
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o177077 != 0o040000:
        raise StartError(f"{path} is not a folder of user {os.getuid()} alone: remove it")
    return path


def engine_socket() -> Path:
    """Return where vLLM listens."""
    return folder() / "vllm.sock"


def own_socket() -> Path:
    """Return where our own requests go in: without key and limits, to a door that lives."""
    return folder() / "door.sock"


def configuration(
    chosen: Rules,
    part: str,
    replicas: Mapping[str, str] | None = None,
    conversation: Sequence[str] = (),
) -> str:
    """Return HAProxy's configuration.

    Args:
        part: one of ``BUFFERS``.
        replicas: addresses of a router's servers as HAProxy reads them, by name.
        conversation: rules that set ``txn.key``, by which a router chooses; none: the least busy.
    """
    import jinja2  # the health check, which makes none, runs every five seconds

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    max_body, large = MAX_BODY_MIB << 20, LARGE_MIB // MAX_BODY_MIB
    # two descriptors for each connection, and some of HAProxy's own
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    connections = CONNECTIONS if files < 0 else min(CONNECTIONS, (files - 256) // 2)
    return environment.get_template("door.cfg.j2").render(
        part=part,
        bufsize=BUFFERS[part] + (max_body if part == "inner" else 0),
        folder=folder(),
        bind=f"{chosen.host or '*'}:{chosen.port}",
        key_sha256=hashlib.sha256(chosen.key.encode()).hexdigest().upper() if chosen.key else "",
        anybody=chosen.anybody,
        origins=chosen.origins,
        open_metrics=chosen.open_metrics,
        max_body=max_body,
        max_body_mib=MAX_BODY_MIB,
        connections=connections,
        connections_by_source=CONNECTIONS_BY_SOURCE,
        large=large,
        large_by_source=large * 3 // 4,
        replicas=replicas or {},
        conversation=conversation,
        check=_CHECK,
    )


def command(part: str, text: str) -> list[str]:
    """Store a configuration; returns the command of HAProxy with it.

    Raises:
        StartError: there is no HAProxy.
        OSError: the file cannot be written.
    """
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise StartError("there is no haproxy in this image: build it again")
    path = folder() / f"{part}.cfg"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return [program, "-db", "-f", str(path)]


class Door:
    """HAProxy in front of vLLM, while this process lives.

    If it ends by itself this process gets SIGTERM, so that the container ends.

    Raises:
        StartError: it does not listen.
    """

    def __init__(self, chosen: Rules) -> None:
        self.died = self._closing = self._ready = self._short = False
        engine_socket().unlink(missing_ok=True)
        self._processes: list[subprocess.Popen[bytes]] = []
        for part in ("inner", "outer"):
            words = command(part, configuration(chosen, part))
            # killed with this process, however that ends
            started = processes.beside(["setpriv", "--pdeathsig", "KILL", *words], _MEMORY)
            self._processes.append(started)
            end = time.monotonic() + _STARTS_S
            while started.poll() is None and self._ask("show version", part) is None:
                if time.monotonic() > end:
                    self.close()
                time.sleep(0.02)
            if started.poll() is not None:
                self.close()
                msg = (
                    "the front door does not start, as the lines above say: if port"
                    f" {chosen.port} is taken, stop the program that has it, or choose another"
                    " with SPARKFORGE_PORT"
                )
                raise StartError(msg, EX_UNAVAILABLE)
            threading.Thread(target=self._watch, args=(started,), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Processes of HAProxy: the inner one and the outer one."""
        return [process.pid for process in self._processes]

    def ready(self) -> None:
        """Let requests in: the server is ready."""
        self._ready = True
        self._set_state()

    def refuse(self, short: bool) -> None:
        """Refuse new requests, or no longer: memory is short. What runs continues."""
        self._short = short
        self._set_state()

    def stall(self, stalled: bool) -> None:
        """Tell load balancers that the last check failed, or no longer. Requests come in."""
        self._set("weight", "1" if stalled else "100")

    def close(self) -> None:
        """End HAProxy, with all connections."""
        self._closing = True
        for process in self._processes:
            process.kill()
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._closing:
            self.died = True
            say("error: the front door ended by itself")
            os.kill(os.getpid(), signal.SIGTERM)

    def _set_state(self) -> None:
        self._set("state", "maint" if not self._ready else "drain" if self._short else "ready")

    def _set(self, what: str, value: str) -> None:
        answer = self._ask(f"set server vllm/engine {what} {value}")
        if answer != "" and not self._closing:
            say(f"warning: the front door does not take {what} {value}: {answer}")

    def _ask(self, order: str, part: str = "inner") -> str | None:
        """Return HAProxy's answer to an order; None where it does not listen."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_ANSWERS_S)
                connection.connect(str(folder() / f"{part}.admin"))
                connection.sendall(f"{order}\n".encode())
                return connection.recv(1 << 12).decode(errors="replace").strip()
        except OSError:
            return None
