"""Two doctors, one on each machine, exchange their facts.

The head's listens and the worker's connects, one port above those of the server, so both can run
while it serves. Each sends one line of JSON. Then the worker requests the head's clock. Facts are
names and numbers, no secrets. The other side's data is only compared, and cut at 64 KiB.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedRWPair

from sparkforge.core import plain
from sparkforge.core.log import log
from sparkforge.serving.cluster import Settings

_LIMIT = 1 << 16
_ASKS = 5


@dataclass(frozen=True)
class Peer:
    """Result of the exchange."""

    facts: Mapping[str, str] = field(default_factory=dict)
    """The other side's, or {}."""
    offset_s: float | None = None
    """Its clock minus ours; only on the worker, else None."""
    problem: str = ""
    """Reason for missing facts, or ""."""


def port_of(mine: Settings) -> int:
    """Return the port of the two doctors: above the link's and vLLM's."""
    return mine.port + 2


def exchange(mine: Settings, facts: Mapping[str, str], wait_s: float) -> Peer:
    """Meet the other side's doctor within ``wait_s`` seconds."""
    other = "worker" if mine.is_head else "head"
    log.info(f"waiting {wait_s:.0f} s at most for the other machine: run the same command there")
    end = time.monotonic() + wait_s
    try:
        with (_accepted if mine.is_head else _connected)(mine, end) as connection:
            connection.settimeout(10)
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(dict(facts)).encode() + b"\n")
                stream.flush()
                theirs = plain.json_of(stream.readline(_LIMIT))
                if not isinstance(theirs, dict):
                    return Peer(problem=f"the {other} sent an invalid answer")
                offset = None
                if mine.is_head:
                    for _ in range(_ASKS):
                        if not stream.readline(_LIMIT):
                            break
                        stream.write(f"{time.time()!r}\n".encode())
                        stream.flush()
                else:
                    # of the fastest answer, whose delay is the shortest
                    _, offset = min(_asked(stream) for _ in range(_ASKS))
    except TimeoutError:
        return Peer(problem=f"no doctor of the {other} within {wait_s:.0f} s")
    except (OSError, ValueError) as error:
        return Peer(problem=f"{getattr(error, 'strerror', None) or error}")
    return Peer({str(k): str(v) for k, v in theirs.items()}, offset)


def _asked(stream: BufferedRWPair) -> tuple[float, float]:
    """Read the other clock; return the seconds for it, and that clock minus ours."""
    before = time.time()
    stream.write(b"time\n")
    stream.flush()
    theirs = float(stream.readline(_LIMIT))
    after = time.time()
    return after - before, theirs - (before + after) / 2


def _accepted(mine: Settings, end: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in mine.head else socket.AF_INET
    with socket.create_server((mine.head, port_of(mine)), family=family) as server:
        while True:
            server.settimeout(max(0.01, end - time.monotonic()))
            connection, (address, *_) = server.accept()
            if str(address).partition("%")[0] == mine.worker:
                return connection
            log.info(f"refused {address}: the worker is {mine.worker}")
            connection.close()


def _connected(mine: Settings, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(
                (mine.head, port_of(mine)), timeout=3, source_address=(mine.worker, 0)
            )
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError from error
        time.sleep(0.5)
