"""One server on two machines: their roles, vLLM's options for them, and the link between them.

A half of vLLM does not notice that the other is gone. So the two entrypoints have a TCP connection,
with a hello of names, then a beat every two seconds. When it ends or falls silent, each ends its
half, the restart policy restarts both, and they connect again.
"""

import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import BinaryIO

from sparkforge.serving.health import read_mark, write_mark
from sparkforge.serving.options import EX_PROTOCOL, EX_UNAVAILABLE, StartError, say

VARIABLE, ROLE = "SPARKFORGE_CLUSTER", "SPARKFORGE_CLUSTER_ROLE"
SPLIT = ("--tensor-parallel-size", "2")  # the split of the model, equal on both machines
BEAT_S, SILENCE_S = 2.0, 15.0  # between two beats; without one until the link is broken
_HELLO_S, _HELLO_LIMIT = 10.0, 1 << 20


@dataclass(frozen=True)
class Settings:
    """This machine's place among the two, with addresses on the network between them."""

    is_head: bool  # the head answers clients
    head: str
    worker: str
    interface: str  # of that network on this machine, e.g. ``enp1s0f0np0``
    port: int  # of the link, on the head; vLLM uses the next one


def settings(variables: Mapping[str, str]) -> Settings | None:
    """Return the settings, or None for a machine that serves alone; StartError if invalid."""
    role, text = variables.get(ROLE, ""), variables.get(VARIABLE, "")
    if not role:
        return None
    try:
        head, worker, interface, *rest = re.split("[, ]+", text.strip())
        head, worker = str(ipaddress.ip_address(head)), str(ipaddress.ip_address(worker))
        (port,) = map(int, rest or ("29500",))
        right = re.fullmatch(r"[\w.:-]{1,15}", interface) and 0 < port < 65535 and head != worker
        if not right or role not in ("head", "worker"):
            raise ValueError
    except ValueError:
        msg = f"{VARIABLE} is {text[:200]!r} ({role[:20]!r}): write HEAD,WORKER,INTERFACE[,PORT],"
        msg += " two addresses and this machine's interface between them"
        raise StartError(msg) from None
    return Settings(role == "head", head, worker, interface, port)


def half(mine: Settings) -> tuple[list[str], dict[str, str]]:
    """Return options of ``vllm serve`` for this machine's half, and variables.

    These keep vLLM, gloo and NCCL on the network of the two.
    """
    options = ["--distributed-executor-backend", "mp", "--nnodes", "2", "--master-addr", mine.head]
    options += ["--node-rank", "0" if mine.is_head else "1", "--master-port", str(mine.port + 1)]
    return [*options, *([] if mine.is_head else ["--headless"])], {
        "VLLM_HOST_IP": mine.head if mine.is_head else mine.worker,
        "GLOO_SOCKET_IFNAME": mine.interface,
        "NCCL_SOCKET_IFNAME": f"={mine.interface}",  # =: this one, not all with this prefix
    }


class Link:
    """The connection of the two entrypoints; ``hello`` has to be equal on both, by name."""

    def __init__(self, mine: Settings, hello: Mapping[str, str]) -> None:
        self._mine, self._hello = mine, hello
        self._connection: socket.socket | None = None
        self.peer = "worker" if mine.is_head else "head"
        self.problem = ""  # the reason why the link is broken
        self.serves = self.peer_serves = False  # this side, and the other, has had its first token

    def meet(self) -> None:
        """Wait without limit for the other side; then keep the link in the background.

        Raises StartError where the other side serves something else, or the head cannot listen.
        """
        mine, lines, server = self._mine, None, None
        say(f"waiting for the {self.peer}: {mine}")
        if mine.is_head:
            where = (mine.head, mine.port)
            family = socket.AF_INET6 if ":" in mine.head else socket.AF_INET
            try:
                server = socket.create_server(where, family=family)
            except OSError as error:
                msg = f"the head cannot listen on {where}: {error.strerror}; correct {VARIABLE}"
                raise StartError(msg, EX_UNAVAILABLE) from None
        with server or nullcontext():
            while lines is None:
                time.sleep(0.5)
                try:
                    lines = self._greeted(server)
                except (OSError, ValueError, AttributeError) as error:  # it does not listen yet
                    if server is not None:
                        say(f"no hello from the worker: {error}")
        say(f"met the {self.peer}")
        for work in (self._beat, lambda: self._listen(lines)):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Close the link: the other side notices the end of the connection."""
        self._end("this machine has left")
        if self._connection is not None:
            with suppress(OSError):  # it ended earlier
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    def _greeted(self, server: socket.socket | None) -> BinaryIO:
        """Connect, and exchange hellos; returns what follows, and raises where there is none."""
        mine = self._mine
        if server is not None:
            connection, (address, *_) = server.accept()
        else:
            where, own, address = (mine.head, mine.port), (mine.worker, 0), mine.worker
            connection = socket.create_connection(where, _HELLO_S, source_address=own)
        with ExitStack() as failed:
            failed.callback(connection.close)
            # the head knows the worker's address
            if ipaddress.ip_address(address) != ipaddress.ip_address(mine.worker):
                raise ValueError(f"refused {address}: the worker is {mine.worker}")
            lines = failed.enter_context(connection.makefile("rb"))
            connection.settimeout(_HELLO_S)
            connection.sendall(json.dumps(self._hello).encode() + b"\n")
            hello = json.loads(lines.readline(_HELLO_LIMIT))
            for name, value in self._hello.items():
                if hello.get(name) != value:
                    other = f"on the {self.peer} {hello.get(name)!r}"
                    msg = f"{name} differs: here {value!r}, {other}; both machines need the same"
                    raise StartError(f"{msg} image and .env, except for the role", EX_PROTOCOL)
            failed.pop_all()
        self._connection = connection
        connection.settimeout(SILENCE_S)
        return lines

    def _beat(self) -> None:
        assert self._connection is not None
        with suppress(OSError):  # which the other thread meets, too
            while not self.problem:
                self._connection.sendall(b"serving\n" if self.serves else b"loading\n")
                time.sleep(BEAT_S)

    def _listen(self, lines: BinaryIO) -> None:
        why = f"the {self.peer} has gone"
        try:
            while not self.problem and (line := lines.readline(_HELLO_LIMIT)):
                self.peer_serves = self.peer_serves or line == b"serving\n"
                write_mark("beat", time.time())
        except TimeoutError:
            why = f"no beat from the {self.peer} for {SILENCE_S:.0f} s"
        except OSError as error:
            why += f": {error.strerror}"
        self._end(why)

    def _end(self, why: str) -> None:
        self.problem = self.problem or why
        write_mark("beat", 0)


def check_beat() -> None:
    """Raise ValueError where the worker's link had no beat within ``SILENCE_S``."""
    if time.time() - float(read_mark("beat") or 0) > SILENCE_S:
        raise ValueError(f"no link to the head: no beat within {SILENCE_S:.0f} s")
