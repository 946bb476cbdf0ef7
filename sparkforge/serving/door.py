"""The front door: HAProxy between the clients and vLLM, or the servers of a router.

vLLM has no key for most of its paths, and no limits. So it listens on a socket in a folder of this
user alone, and every request from outside passes the rules of ``door.cfg.j2``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.serving.health import temporary
from sparkforge.serving.options import EX_NOHOST, EX_UNAVAILABLE, StartError, say

if TYPE_CHECKING:
    from sparkforge.serving.settings import Variables

REPLICAS = "SPARKFORGE_REPLICAS"
KEY_FILE = Path("/run/secrets/api_key")
ENGINE, OWN = "vllm.sock", "door.sock"  # where vLLM listens; our requests, without key and limits
BUFFERS = {"outer": 80 << 10, "inner": 192 << 10, "router": 320 << 10}
"""Bytes of a buffer, by part; the inner one's beside a body. An endless head fills one."""
_STARTS_S, _ANSWERS_S = 60.0, 10.0  # 0.1 and less; more on a busy machine
_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", re.ASCII)
_LOOPBACK = re.compile(r"(127(\.\d{1,3}){3}|localhost|::1|\[::1\])(:\d+)?", re.ASCII)


def key_of(variables: Variables, environment: Mapping[str, str], file: Path = KEY_FILE) -> str:
    """Return the key that clients have to send, or ""; StartError if that is not enough."""
    # the file comes before VLLM_API_KEY, which ``docker inspect`` shows; Compose's default is empty
    key = file.read_text(errors="replace").strip() if file.exists() else ""
    key = key or environment.get("VLLM_API_KEY", "").strip()
    if not re.fullmatch("[!-~]*", key):  # our own checks would always fail
        raise StartError("the API key must be one word of ASCII letters, digits and signs")
    # without Compose nobody says where the port is published
    bind = variables.bind or variables.listen
    if not (_LOOPBACK.fullmatch(bind) or key or variables.allow_open):
        msg = f"port published on {bind} without an API key: everybody could use the model. Name a"
        msg += " file with a key in SPARKFORGE_API_KEY_FILE, or set SPARKFORGE_ALLOW_OPEN=1"
        raise StartError(msg)
    return key


def folder() -> Path:
    """Return the folder of the sockets, for this user alone."""
    path = temporary() / "sparkforge"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o177077 != 0o040000:
        raise StartError(f"{path} is not a folder of user {os.getuid()} alone: remove it")
    return path


def configuration(
    variables: Variables, key: str, part: str, replicas: Mapping[str, str] | None = None
) -> str:
    """Return HAProxy's configuration, of one of the parts in ``BUFFERS``."""
    import jinja2  # the health check, which makes none, runs every five seconds

    template = Path(__file__).with_name("door.cfg.j2").read_text(encoding="utf-8")
    max_body = 8 << 20  # the longest prompt of gpt-oss, 131,072 tokens, has less than 1 MB
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return made.from_string(template).render(
        part=part,
        bufsize=BUFFERS[part] + (max_body if part == "inner" else 0),
        folder=folder(),
        rules=variables,
        key_sha256=hashlib.sha256(key.encode()).hexdigest().upper() if key else "",
        max_body=max_body,
        connections=1024,
        connections_by_source=256,  # behind Docker all clients may be one source
        large=28,  # at once, above 256 KiB; ``keep_free_gib`` of the profiles includes 224 MiB
        replicas=replicas or {},
    )


def command(part: str, text: str) -> list[str]:
    """Store a configuration; returns the command of HAProxy with it."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert program is not None  # which the image's build checks
    path = folder() / f"{part}.cfg"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return [program, "-db", "-f", str(path)]


class Door:
    """HAProxy in front of vLLM, while this process lives."""

    def __init__(self, variables: Variables, key: str) -> None:
        self._ready = self._short = False
        (folder() / ENGINE).unlink(missing_ok=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        # glibc gives freed buffers of bodies back to the system
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
        for part in ("inner", "outer"):
            words = command(part, configuration(variables, key, part))
            # it ends with this process, however that ends
            program = ["setpriv", "--pdeathsig", "KILL", *words]
            self.processes += [subprocess.Popen(program, env=env, start_new_session=True)]
            end = time.monotonic() + _STARTS_S
            while self._ask("show version", part) is None:
                if self.died or time.monotonic() > end:
                    self.close()
                    msg = "the front door does not start, as the lines above say: is the port of"
                    msg += f" {variables.listen} taken? Choose another with SPARKFORGE_PORT"
                    raise StartError(msg, EX_UNAVAILABLE)
                time.sleep(0.02)

    @property
    def died(self) -> bool:
        """Whether one of the processes has ended."""
        return any(process.poll() is not None for process in self.processes)

    def ready(self) -> None:
        """Let requests in: the server is ready."""
        self._ready = True
        self.refuse(self._short)

    def refuse(self, short: bool) -> None:
        """Refuse new requests, or no longer: memory is short. What runs continues."""
        self._short = short
        state = "maint" if not self._ready else "drain" if short else "ready"
        self._ask(f"set server vllm/engine state {state}")

    def stall(self, stalled: bool) -> None:
        """Tell load balancers that the last check failed, or no longer. Requests come in."""
        self._ask(f"set server vllm/engine weight {1 if stalled else 100}")

    def close(self) -> None:
        """End HAProxy, with all connections."""
        for process in self.processes:
            process.kill()
            process.wait()

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


def replicas(text: str) -> dict[str, str]:
    """Return the addresses of a router's servers as HAProxy reads them, by name."""
    found: dict[str, str] = {}
    for word in text.replace(",", " ").split() or [""]:
        host, _, port = word.rpartition(":")
        right = _HOST.fullmatch(host) and re.fullmatch("[0-9]{1,5}", port)
        if not right or not 0 < int(port) < 65536:
            raise StartError(f"{REPLICAS} has {word[:100]!r}: name each server as HOST:PORT")
        try:
            there = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        except (OSError, ValueError) as error:
            msg = f"{REPLICAS}: {host[:100]} has no address ({error}): use one in numbers"
            raise StartError(msg, EX_NOHOST) from None
        kind, address = "ipv6" if there[0] == socket.AF_INET6 else "ipv4", str(there[4][0])
        if address.startswith("127.") or address in ("::1", "0.0.0.0", "::"):
            raise StartError(f"{REPLICAS} has {word}, which is the router's own container")
        # HAProxy takes no bracket in a name
        found[word.replace("[", "").replace("]", "")] = f"{kind}@{address}:{port}"
    return found


def route(variables: Variables, environment: Mapping[str, str]) -> None:
    """Become the router's HAProxy; returns only by an error."""
    key = key_of(variables, environment)
    addresses = replicas(environment[REPLICAS])
    say(f"router of {len(addresses)} replicas: {', '.join(addresses)}")
    words = command("router", configuration(variables, key, "router", addresses))
    # in this process' place: a stop by SIGUSR1 (Compose's stop_signal) lets the answers end
    os.execv(words[0], words)
