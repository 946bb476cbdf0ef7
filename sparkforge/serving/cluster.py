"""One server on two machines: their roles, vLLM's options for them, and the link between them.

A half of vLLM does not notice that the other is gone. So the two entrypoints have a TCP connection,
which the kernel's probes end when the other machine is silent. Then each ends its half, the restart
policy restarts both, and they connect again. A half that hangs stops the head's engine, which the
head's own health rule ends: no beat of the entrypoints, which do not hang with it, is needed.
"""

import ipaddress
import json
import platform
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from sparkforge.serving.health import write_mark
from sparkforge.serving.options import EX_PROTOCOL, EX_UNAVAILABLE, StartError, say

VARIABLE, ROLE = "SPARKFORGE_CLUSTER", "SPARKFORGE_CLUSTER_ROLE"
SPLIT = ("--tensor-parallel-size", "2")  # the split of the model, equal on both machines
SILENCE_S = 15  # of the other machine's kernel, until the link is broken
_HELLO_S, _HELLO_LIMIT = 10.0, 1 << 20
NCCL = "nvidia-nccl-cu13"  # the package
# first version with a fault, first without it, and the fault on a pair of Sparks. From public
# reports; the fence also from the wheels' machine code (docs/evidence/machine-code.md)
NCCL_FAULTS = (
    ("0", "2.29.3", "loses slots of its proxy on AArch64 until all ranks wait (nccl#2353)"),
    ("2.30.4", "2.30.5", "may hang at the start, if NCCL_NVLS_ENABLE is not 0 (nccl#2167)"),
    ("0", "2.32.4", "lacks a fence in RoCE's send path on AArch64, and may hang (nccl#2393)"),
)


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

    These keep vLLM, gloo and NCCL on the network of the two, and NCCL off NVLS, which needs an
    NVLink that is not there, and with which NCCL 2.30.4 hung at the start.
    """
    options = ["--distributed-executor-backend", "mp", "--nnodes", "2", "--master-addr", mine.head]
    options += ["--node-rank", "0" if mine.is_head else "1", "--master-port", str(mine.port + 1)]
    return [*options, *([] if mine.is_head else ["--headless"])], {
        "VLLM_HOST_IP": mine.head if mine.is_head else mine.worker,
        "GLOO_SOCKET_IFNAME": mine.interface,
        "NCCL_SOCKET_IFNAME": f"={mine.interface}",  # =: this one, not all with this prefix
        "NCCL_NVLS_ENABLE": "0",
    }


def faults(nccl: str, kernel: str, command_line: str) -> list[str]:
    """Return what is known to be bad of NCCL's version, and of the kernel with its command line."""

    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:3]]

    within = (one for one in NCCL_FAULTS if numbers(one[0]) <= numbers(nccl) < numbers(one[1]))
    found = [f"NCCL {nccl} {what}" for *_, what in within]
    if kernel.startswith("7.0.0-") and "kho=off" not in command_line.split():
        found.append(f"kernel {kernel} may register no memory for RDMA: boot it with kho=off")
    return found


def say_nccl() -> None:
    """Log the version of NCCL, and the faults that are known of it and of the kernel."""
    with suppress(metadata.PackageNotFoundError):  # a build for the CPU has none
        nccl, kernel = metadata.version(NCCL), platform.release()
        say(f"NCCL {nccl}, kernel {kernel}")
        for fault in faults(nccl, kernel, Path("/proc/cmdline").read_text()):
            say(f"warning: {fault}")


class Link:
    """The connection of the two entrypoints; ``hello`` has to be equal on both, by name."""

    def __init__(self, mine: Settings, hello: Mapping[str, str]) -> None:
        self._mine, self._hello = mine, hello
        self._connection: socket.socket | None = None
        self.peer = "worker" if mine.is_head else "head"
        self.problem = ""  # the reason why the link is broken
        self.peer_serves = False  # the head has had its first token

    def meet(self) -> None:
        """Wait without limit for the other side; then keep the link in the background.

        Raises StartError where the other side serves something else, or the head cannot listen.
        """
        mine, lines, server = self._mine, None, None
        if mine.is_head:
            where = (mine.head, mine.port)
            family = socket.AF_INET6 if ":" in mine.head else socket.AF_INET
            try:
                server = socket.create_server(where, family=family)
            except OSError as error:
                msg = f"the head cannot listen on {where}: {error.strerror}; correct {VARIABLE}"
                raise StartError(msg, EX_UNAVAILABLE) from None
        say(f"waiting for the {self.peer}: {mine}")
        with server or nullcontext():
            while lines is None:
                time.sleep(0.5)
                try:
                    lines = self._greeted(server)
                except (OSError, ValueError, AttributeError) as error:  # it does not listen yet
                    if server is not None:
                        say(f"no hello from the worker: {error}")
        say(f"met the {self.peer}")
        write_mark("linked", True)
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()

    def tell(self) -> None:
        """Tell the other side that this one serves."""
        if self._connection is not None:
            with suppress(OSError):  # which the thread meets, too
                self._connection.sendall(b"serving\n")

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
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):  # between two probes
            connection.setsockopt(socket.IPPROTO_TCP, option, SILENCE_S // 3)
        # of probes and of data, in ms
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
        return lines

    def _listen(self, lines: BinaryIO) -> None:
        why = f"the {self.peer} has gone"
        try:
            while lines.readline(_HELLO_LIMIT):
                self.peer_serves = True
        except OSError as error:
            why += f": {error.strerror}"
        self._end(why)

    def _end(self, why: str) -> None:
        self.problem = self.problem or why
        write_mark("linked", False)
