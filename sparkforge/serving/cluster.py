"""Two machines, one server: who is who, vLLM's options for it, and the link that ties their lives.

vLLM runs one half of the model on each machine (its own multi-node executor; no Ray). A half that
is left alone does not notice: the worker waits for orders for ever, and the head for a sum that
never comes. So the two entrypoints hold a TCP connection of their own. They start vLLM when they
have met and serve the same thing, and when the connection ends or falls silent each ends its half;
the restart policy starts both anew, and they meet again.

The link carries no secret and no order: a hello with names, then a beat every two seconds. vLLM's
own traffic between the machines is neither encrypted nor authenticated, so both belong on a cable
between the two, or on a network that nobody else is on.
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

from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import EX_PROTOCOL, EX_UNAVAILABLE, StartError

BEAT_S = 2.0
SILENCE_S = 15.0
"""So long without a beat is a broken link: a cable that was pulled sends no goodbye."""
MARK = Path(tempfile.gettempdir()) / "sparkforge-link"
_HELLO_LIMIT = 1 << 20
_HELLO_S = 10.0
_SAY_EVERY_S = 30.0


class ClusterError(StartError):
    """The two machines are not set up to serve together; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """Who this machine is.

    Attributes:
        role: ``head``, which answers clients, or ``worker``.
        head, worker: addresses of the two on the network between them.
        port: of the link, on the head; vLLM's own meeting point is the next one.
        interface: of that network on this machine, e.g. ``enp1s0f0np0``.
    """

    role: str
    head: str
    worker: str
    port: int
    interface: str

    @property
    def own(self) -> str:
        return self.head if self.role == "head" else self.worker

    @property
    def is_head(self) -> bool:
        return self.role == "head"


def settings(variables: Mapping[str, str]) -> Settings | None:
    """Return what SPARKFORGE_CLUSTER_* say; None for a machine that serves alone.

    Raises:
        ClusterError: they make no sense.
    """
    role = variables.get("SPARKFORGE_CLUSTER_ROLE", "")
    if not role:
        return None
    if role not in ("head", "worker"):
        msg = f"SPARKFORGE_CLUSTER_ROLE is {role!r}: use head or worker"
        raise ClusterError(msg)
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
        msg = f"head and worker have the same address, {addresses[0]}"
        raise ClusterError(msg)
    port = variables.get("SPARKFORGE_CLUSTER_PORT") or "29500"
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65535:
        msg = f"SPARKFORGE_CLUSTER_PORT is {port!r}: use 1 to 65534 (it and the next are taken)"
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
"""How the model is split, whoever has which half."""


def place(mine: Settings) -> list[str]:
    """Return the options of ``vllm serve`` that say which half is this machine's."""
    return [
        "--distributed-executor-backend",
        "mp",
        "--nnodes",
        "2",
        "--node-rank",
        "0" if mine.is_head else "1",
        "--master-addr",
        mine.head,
        "--master-port",
        str(mine.port + 1),
        *([] if mine.is_head else ["--headless"]),
    ]


def environment(mine: Settings, given: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's variables: what is given, and what keeps vLLM, gloo and NCCL on that network.

    What is given wins; Compose gives variables of NCCL that are empty where .env has none.
    """
    ours = {
        "VLLM_HOST_IP": mine.own,
        "GLOO_SOCKET_IFNAME": mine.interface,
        "NCCL_SOCKET_IFNAME": f"={mine.interface}",  # exactly this one, not all that begin so
    }
    kept = {name: value for name, value in given.items() if value or not name.startswith("NCCL_")}
    return {**ours, **{name: value for name, value in kept.items() if value or name not in ours}}


class Link:
    """The connection of the two entrypoints.

    Args:
        mine: who this machine is.
        hello: what both must serve alike, by name; compared when they meet.
        say: prints one line.
        mark: file that is touched at every beat from the other side, for the health check.
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
        """Return why the two no longer serve together, or None."""
        return self._problem

    def peer_serves(self) -> bool:
        """Tell whether the other side has said that the first token came."""
        return self._peer_state == "serving"

    def serving(self) -> None:
        """Tell the other side, with the next beat, that the first token came."""
        self._state = "serving"

    def close(self) -> None:
        """Leave: the other side sees the connection end."""
        if self._socket is not None:
            self._end("this machine has left")
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has ended before
                pass
            self._socket.close()

    def meet(self) -> None:
        """Wait, however long, until both are there; then keep the link in the background.

        Raises:
            ClusterError: the other side serves something else; or, on the head, this machine has no
                such address or the port is taken: both may change, so the exit code is none that
                ends the attempts. Or what this machine serves is too long to tell.
        """
        self._mark.unlink(missing_ok=True)
        if len(self._line) > _HELLO_LIMIT:
            msg = (
                f"model, profile and options of this machine have {len(self._line)} bytes, and the"
                f" two machines compare {_HELLO_LIMIT} at most: shorten SPARKFORGE_EXTRA_ARGS or"
                " the profile"
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
                f" {error.strerror}; SPARKFORGE_CLUSTER_HEAD is to be an address of this machine"
                " (ip -br address shows them), SPARKFORGE_CLUSTER_PORT a free port on it"
            )
            raise ClusterError(msg, EX_UNAVAILABLE) from None

    def _accept(self) -> socket.socket:
        said = 0.0
        with self._listening() as server:
            server.settimeout(1)
            while True:
                if time.monotonic() - said > _SAY_EVERY_S or not said:
                    said = time.monotonic()
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
        said = 0.0
        while True:
            try:
                connection = socket.create_connection(
                    (self._mine.head, self._mine.port),
                    timeout=5,
                    # the head knows the worker by its address
                    source_address=(self._mine.worker, 0),
                )
            except OSError as error:
                if time.monotonic() - said > _SAY_EVERY_S or not said:
                    said = time.monotonic()
                    self._say(
                        f"waiting for the head {self._mine.head} port {self._mine.port}:"
                        f" {error.strerror or error}"
                    )
            else:
                if self._greeted(connection):
                    return connection
            time.sleep(1)

    def _greeted(self, connection: socket.socket) -> bool:
        """Exchange hellos; False where the other side was gone at once, or spoke nonsense."""
        end = time.monotonic() + _HELLO_S
        try:
            connection.settimeout(_HELLO_S)
            connection.sendall(self._line)
            line = bytearray()
            while not line.endswith(b"\n") and len(line) <= _HELLO_LIMIT:
                connection.settimeout(max(end - time.monotonic(), 0.001))
                piece = connection.recv(1)  # what comes after the hello is the first beat
                if not piece:
                    break
                line += piece
            theirs = Document.parse("the other machine's hello", bytes(line)).get(dict)
        except (OSError, DocumentError) as error:
            self._say(f"no hello of the {self.peer}: {error}")
            connection.close()
            return False
        for name, value in self._hello.items():
            if theirs.get(name) != value:
                connection.close()
                msg = (
                    f"{name} differs: here {value!r}, on the {self.peer} {theirs.get(name)!r};"
                    " both machines need the same image and the same .env, but for the role"
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
                self._end(f"no beat of the {self.peer} for {SILENCE_S:.0f} s")
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
    """Raise ValueError where the link has had no beat for ``SILENCE_S``: the worker's health.

    The worker's process needs no look of its own: when it ends, so does its container.
    """
    try:
        age = now() - mark.stat().st_mtime
    except FileNotFoundError:
        msg = "no link to the head"
        raise ValueError(msg) from None
    if age > SILENCE_S:
        msg = f"no beat of the head for {age:.0f} s"
        raise ValueError(msg)
