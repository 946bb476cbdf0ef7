"""One server on two machines: their roles, vLLM's options for them, and the link between them.

vLLM runs one half of the model on each machine (its own multi-node executor; no Ray). A half does
not notice that the other is gone: the worker waits for work for ever, and the head for a sum that
never comes. So the two entrypoints have a TCP connection of their own. They start vLLM once they
are connected and serve the same model. When the connection ends or falls silent, each ends its
half. The restart policy restarts both, and they connect again.

The link carries no secrets and no commands: a hello with names, then a beat every two seconds.
vLLM's own traffic between the machines is neither encrypted nor authenticated. So use a cable
between the two, or a network without other machines.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.errors import EX_PROTOCOL, EX_UNAVAILABLE, StartError

BEAT_S = 2.0
SILENCE_S = 15.0
"""Seconds without a beat until the link counts as broken: an unplugged cable sends nothing."""
MARK = Path(tempfile.gettempdir()) / "sparkforge-link"
_HELLO_LIMIT = 1 << 20
_HELLO_S = 10.0
_SAY_EVERY_S = 30.0


class ClusterError(StartError):
    """The two machines cannot serve together; the message has a hint."""


@dataclass(frozen=True)
class Settings:
    """This machine's place among the two."""

    role: str
    """``head``, which answers clients, or ``worker``."""
    head: str
    worker: str
    """``head``, ``worker``: addresses on the network between the two."""
    port: int
    """Of the link, on the head; vLLM uses the next one."""
    interface: str
    """Of that network on this machine, e.g. ``enp1s0f0np0``."""

    @property
    def own(self) -> str:
        return self.head if self.role == "head" else self.worker

    @property
    def is_head(self) -> bool:
        return self.role == "head"


def settings(variables: Mapping[str, str]) -> Settings | None:
    """Return the settings in SPARKFORGE_CLUSTER_*; None for a machine that serves alone.

    Raises:
        ClusterError: they are invalid.
    """
    role = variables.get("SPARKFORGE_CLUSTER_ROLE", "")
    if not role:
        return None
    if role not in ("head", "worker"):
        raise ClusterError(f"SPARKFORGE_CLUSTER_ROLE is {role!r}: use head or worker")
    addresses = []
    for name in ("SPARKFORGE_CLUSTER_HEAD", "SPARKFORGE_CLUSTER_WORKER"):
        text = variables.get(name, "")
        try:
            addresses.append(str(ipaddress.ip_address(text)))
        except ValueError:
            msg = (
                f"{name} is {text!r}: write the machine's address on the network between the two"
                " into .env on both (ip -br address shows it)"
            )
            raise ClusterError(msg) from None
    if addresses[0] == addresses[1]:
        raise ClusterError(f"head and worker have the same address, {addresses[0]}")
    port = variables.get("SPARKFORGE_CLUSTER_PORT") or "29500"
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65535:
        msg = (
            f"SPARKFORGE_CLUSTER_PORT is {port!r}: use 1 to 65534 (this port and the next are used)"
        )
        raise ClusterError(msg)
    interface = variables.get("SPARKFORGE_CLUSTER_IFNAME", "")
    if not re.fullmatch(r"[\w.:-]{1,15}", interface):
        msg = (
            f"SPARKFORGE_CLUSTER_IFNAME is {interface!r}: write the name of the interface between"
            " the two machines into .env (ip -br address shows it)"
        )
        raise ClusterError(msg)
    return Settings(role, addresses[0], addresses[1], int(port), interface)


SPLIT = ("--tensor-parallel-size", "2")
"""The split of the model, equal on both machines."""


def place(mine: Settings) -> list[str]:
    """Return the options of ``vllm serve`` for this machine's half."""
    return [
        *("--distributed-executor-backend", "mp", "--nnodes", "2"),
        *("--node-rank", "0" if mine.is_head else "1", "--master-addr", mine.head),
        *("--master-port", str(mine.port + 1), *([] if mine.is_head else ["--headless"])),
    ]


def environment(mine: Settings, given: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's variables, with those that keep vLLM, gloo and NCCL on the network of the two.

    Given values have priority. Compose sets variables of NCCL that .env lacks to empty ones, which
    are removed.
    """
    ours = {
        "VLLM_HOST_IP": mine.own,
        "GLOO_SOCKET_IFNAME": mine.interface,
        "NCCL_SOCKET_IFNAME": f"={mine.interface}",  # =: this one, not all with this prefix
    }
    kept = {name: value for name, value in given.items() if value or not name.startswith("NCCL_")}
    return {**ours, **{name: value for name, value in kept.items() if value or name not in ours}}


class Link:
    """The connection of the two entrypoints.

    Args:
        hello: values that have to be equal on both, by name.
        mark: file that is touched at every beat of the other side, for the health check.
    """

    def __init__(
        self,
        mine: Settings,
        hello: Mapping[str, str],
        say: Callable[[str], None],
        mark: Path = MARK,
    ) -> None:
        self._mine, self._hello, self._say, self._mark = mine, dict(hello), say, mark
        self._line = json.dumps(self._hello).encode() + b"\n"
        self._problem: str | None = None
        self._socket: socket.socket | None = None
        self._state = "loading"
        self._peer_state = ""
        self._lock = threading.Lock()

    @property
    def peer(self) -> str:
        """The other's role."""
        return "worker" if self._mine.is_head else "head"

    def problem(self) -> str | None:
        """Return the reason why the link is broken, or None."""
        return self._problem

    def peer_serves(self) -> bool:
        """Return whether the other side has reported the first token."""
        return self._peer_state == "serving"

    def serving(self) -> None:
        """Report the first token to the other side, with the next beat."""
        self._state = "serving"

    def close(self) -> None:
        """Close the link: the other side notices the end of the connection."""
        if self._socket is not None:
            self._end("this machine has left")
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it ended earlier
                pass
            self._socket.close()

    def meet(self) -> None:
        """Wait without limit for the other side; then keep the link in the background.

        Raises:
            ClusterError: the other side serves something else, or this machine's hello is too long.
                Or, on the head, the address is not this machine's or the port is in use; both may
                change, so this exit code is followed by another attempt.
        """
        self._mark.unlink(missing_ok=True)
        if len(self._line) > _HELLO_LIMIT:
            msg = (
                f"model, profile and options of this machine have {len(self._line)} bytes, and the"
                f" limit is {_HELLO_LIMIT}: shorten SPARKFORGE_EXTRA_ARGS or the profile"
            )
            raise ClusterError(msg)
        connection = self._accept() if self._mine.is_head else self._connect()
        self._socket = connection
        self._say(f"met the {self.peer}")
        threading.Thread(target=self._beat, args=(connection,), daemon=True).start()
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    # -- meeting -----------------------------------------------------------------

    def _listening(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._mine.head else socket.AF_INET
        try:
            return socket.create_server((self._mine.head, self._mine.port), family=family)
        except OSError as error:
            msg = (
                f"the head cannot listen on {self._mine.head} port {self._mine.port}:"
                f" {error.strerror}; SPARKFORGE_CLUSTER_HEAD has to be an address of this machine"
                " (ip -br address shows them), SPARKFORGE_CLUSTER_PORT a free port"
            )
            raise ClusterError(msg, EX_UNAVAILABLE) from None

    def _accept(self) -> socket.socket:
        logged = 0.0
        with self._listening() as server:
            server.settimeout(1)
            while True:
                if time.monotonic() - logged > _SAY_EVERY_S or not logged:
                    logged = time.monotonic()
                    self._say(
                        f"waiting for the worker {self._mine.worker} on {self._mine.head}"
                        f" port {self._mine.port}"
                    )
                try:
                    connection, (address, *_) = server.accept()
                except TimeoutError:
                    continue
                if ipaddress.ip_address(str(address).partition("%")[0]) != ipaddress.ip_address(
                    self._mine.worker
                ):
                    self._say(f"refused {address}: the worker is {self._mine.worker}")
                    connection.close()
                    continue
                if self._greeted(connection):
                    return connection

    def _connect(self) -> socket.socket:
        logged = 0.0
        while True:
            try:
                connection = socket.create_connection(
                    (self._mine.head, self._mine.port),
                    timeout=5,
                    # the head knows the worker by its address
                    source_address=(self._mine.worker, 0),
                )
            except OSError as error:
                if time.monotonic() - logged > _SAY_EVERY_S or not logged:
                    logged = time.monotonic()
                    self._say(
                        f"waiting for the head {self._mine.head} port {self._mine.port}:"
                        f" {error.strerror or error}"
                    )
            else:
                if self._greeted(connection):
                    return connection
            time.sleep(1)

    def _greeted(self, connection: socket.socket) -> bool:
        """Exchange hellos; returns False where the other side left or sent an invalid one."""
        end = time.monotonic() + _HELLO_S
        try:
            connection.settimeout(_HELLO_S)
            connection.sendall(self._line)
            line = bytearray()
            while not line.endswith(b"\n") and len(line) <= _HELLO_LIMIT:
                connection.settimeout(max(end - time.monotonic(), 0.001))
                piece = connection.recv(1)  # the first beat follows the hello
                if not piece:
                    break
                line += piece
            hello = json.loads(line)
            if not isinstance(hello, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            self._say(f"no hello from the {self.peer}: {error}")
            connection.close()
            return False
        for name, value in self._hello.items():
            if hello.get(name) != value:
                connection.close()
                msg = (
                    f"{name} differs: here {value!r}, on the {self.peer} {hello.get(name)!r};"
                    " both machines need the same image and the same .env, except for the role"
                )
                raise ClusterError(msg, EX_PROTOCOL)
        return True

    # -- afterwards --------------------------------------------------------------

    def _beat(self, connection: socket.socket) -> None:
        while self._problem is None:
            try:
                connection.sendall(f"{self._state}\n".encode())
            except OSError as error:
                self._end(f"the {self.peer} has gone: {error.strerror or error}")
            time.sleep(BEAT_S)

    def _listen(self, connection: socket.socket) -> None:
        connection.settimeout(SILENCE_S)
        while self._problem is None:
            try:
                data = connection.recv(1 << 10)
            except TimeoutError:
                self._end(f"no beat from the {self.peer} for {SILENCE_S:.0f} s")
            except OSError as error:
                self._end(f"the {self.peer} has gone: {error.strerror or error}")
            else:
                if not data:
                    self._end(f"the {self.peer} has gone")
                    return
                self._peer_state = data.decode(errors="replace").split("\n")[-2:][0]
                self._mark.touch()

    def _end(self, why: str) -> None:
        with self._lock:
            self._problem = self._problem or why
        self._mark.unlink(missing_ok=True)


def check_mark(mark: Path = MARK, now: Callable[[], float] = time.time) -> None:
    """Check the worker's health: its link has had a beat within ``SILENCE_S``.

    Its process needs no check: its container ends with it.

    Raises:
        ValueError: no beat.
    """
    try:
        age = now() - mark.stat().st_mtime
    except FileNotFoundError:
        raise ValueError("no link to the head") from None
    if age > SILENCE_S:
        raise ValueError(f"no beat from the head for {age:.0f} s")
