"""The router: one address in front of several servers of one model (docs/several-sparks.md).

HAProxy does the work, with the rules of the front door. This module checks the list of servers.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from sparkforge.serving import door, processes
from sparkforge.serving.errors import EX_NOHOST, StartError, say
from sparkforge.serving.progress import Client, StatusError

VARIABLE = "SPARKFORGE_REPLICAS"
_EXAMPLE = "192.168.100.1:8000,192.168.100.2:8000"
_LABEL = r"\w([\w-]{0,61}\w)?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*|\[[0-9a-fA-F:.]+\]", re.ASCII)
_CHECK_S = 6.0
_BEGINNING = "req.body,bytes(0,1048576)"
_SYSTEM_FIRST = f" !{{ {_BEGINNING},json_query('$.messages[0].role') -m str user }}"
# Parts of a body that identify its conversation, by the end of the path: its first messages.
# Later turns repeat them, and the cache of the server that had the turn before begins with them.
# Of several places for one text the first that has it counts: content may be a list of parts.
_PARTS = (
    ("/chat/completions", ("$.messages[0].content", "$.messages[0].content[0].text"), ""),
    (
        "/chat/completions",
        ("$.messages[1].content", "$.messages[1].content[0].text"),
        _SYSTEM_FIRST,
    ),
    ("/messages", ("$.system", "$.system[0].text"), ""),
    ("/messages", ("$.messages[0].content", "$.messages[0].content[0].text"), ""),
    ("/responses", ("$.instructions",), ""),
    ("/responses", ("$.input[0].content", "$.input[0].content[0].text", "$.input"), ""),
    ("/v1/completions", ("$.prompt",), ""),
)


class NoReplicaError(Exception):
    """The router answers, and none of its servers serves."""


@dataclass(frozen=True)
class Replica:
    """One server."""

    name: str
    """As the user wrote it, in logs and metrics."""
    host: str
    """Address or name."""
    port: int


def asked(environment: Mapping[str, str]) -> bool:
    """Return whether this container is the router: the list of servers is set, even if empty."""
    return VARIABLE in environment


def replicas(text: str) -> tuple[Replica, ...]:
    """Return the servers of a list; StartError if one cannot be used."""
    words = text.replace(",", " ").split()
    if not words:
        raise StartError(f"{VARIABLE} is empty: name the servers in .env, like {_EXAMPLE}")
    found = tuple(_replica(word) for word in words)
    names = [replica.name.lower() for replica in found]
    if double := next((name for name in names if names.count(name) > 1), ""):
        raise StartError(f"{VARIABLE} names {double} twice: name each server once")
    return found


def _replica(word: str) -> Replica:
    host, _, port = word.rpartition(":")
    right_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
    if not right_port or not _HOST.fullmatch(host):
        raise StartError(f"{VARIABLE} has {word[:100]!r}: use HOST:PORT, like {_EXAMPLE}")
    plain = host.strip("[]")
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        itself = plain.lower() == "localhost"
        if "[" in host or re.fullmatch("[0-9.]+", host):
            raise StartError(f"{VARIABLE} has {word!r}: {plain} is no address") from None
    else:
        itself = address.is_loopback or address.is_unspecified
    if itself:
        msg = (
            f"{VARIABLE} has {word}, which is the router's own container: use the address of this"
            " machine that SPARKFORGE_BIND names"
        )
        raise StartError(msg)
    return Replica(word.replace("[", "").replace("]", ""), plain, int(port))


def resolve(replica: Replica) -> str:
    """Return the address of a server, as HAProxy reads it.

    Raises:
        StartError: the name has no address.
    """
    try:
        found = socket.getaddrinfo(replica.host, replica.port, type=socket.SOCK_STREAM)
    except OSError as error:
        msg = f"{VARIABLE}: {replica.host} has no address ({error.strerror}): use one in numbers"
        raise StartError(msg, EX_NOHOST) from None
    family, host = found[0][0], str(found[0][4][0])
    return f"{'ipv6' if family == socket.AF_INET6 else 'ipv4'}@{host}:{replica.port}"


def conversation() -> list[str]:
    """Return the rules that find a request's conversation; GET and the like have none."""
    lines = []
    for number, (end, places, condition) in enumerate(_PARTS):
        missing = ""
        for place in places:
            lines.append(
                f"set-var(txn.k{number}) {_BEGINNING},json_query('{place}')"
                f" if METH_POST {{ path_end {end} }}{condition}{missing}"
            )
            missing = f" !{{ var(txn.k{number}) -m found }}"
    joined = "".join(f"%[var(txn.k{number})]" for number in range(len(_PARTS)))
    lines.append(f'set-var-fmt(txn.key) "{joined}" if METH_POST')
    lines.append(f"set-var(txn.key) {_BEGINNING} if METH_POST {{ var(txn.key) -m len 0 }}")
    return lines


def run(environment: Mapping[str, str]) -> NoReturn:
    """Become HAProxy; does not return.

    Raises:
        StartError: a setting is wrong, or a name has no address.
        OSError: the configuration cannot be written.
    """
    from sparkforge.serving.settings import Variables  # the health check needs none

    servers = replicas(environment[VARIABLE])
    rules = door.rules(Variables.read(environment), environment)
    addresses = {one.name: resolve(one) for one in servers}
    say(f"router of {len(addresses)} replicas: {', '.join(addresses)}")
    text = door.configuration(rules, "router", addresses, conversation())
    # a stop by SIGUSR1 (Compose's stop_signal) lets the answers end
    processes.become(door.command("router", text))


def check() -> str:
    """Return the router's line about its servers.

    Raises:
        OSError, http.client.HTTPException, ValueError: it does not answer.
        NoReplicaError: no server serves; the message is its line.
    """
    try:
        line = Client(door.own_socket(), _CHECK_S).ask(
            time.monotonic() + _CHECK_S, "GET", "/health"
        )
    except StatusError as error:
        raise NoReplicaError(str(error)) from None
    return line.decode(errors="replace").strip()
