"""The router: one address in front of several servers of one model (docs/replicas.md).

HAProxy does the work. This module checks the settings and writes its configuration.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sparkforge.serving import access, session, variables
from sparkforge.serving.errors import EX_NOHOST, StartError
from sparkforge.serving.log import say

PROGRAM = "/usr/sbin/haproxy"
ROLE = "SPARKFORGE_ROLE"
VARIABLE = "SPARKFORGE_REPLICAS"
POLICIES = ("prefix", "least-busy")

_EXAMPLE = "192.168.100.1:8000,192.168.100.2:8000"
_LABEL = r"\w([\w-]{0,61}\w)?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*|\[[0-9a-fA-F:.]+\]", re.ASCII)
_CHECK_S = 6.0
_SYSTEM_FIRST = " !{ req.body,json_query('$.messages[0].role') -m str user }"
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


@dataclass(frozen=True)
class Settings:
    """Settings of the router."""

    replicas: tuple[Replica, ...]
    policy: str
    """One of ``POLICIES``."""
    port: int
    """In the container."""


def asked(environment: Mapping[str, str]) -> bool:
    """Return whether this container is the router."""
    return environment.get(ROLE) == "router"


def read(environment: Mapping[str, str]) -> Settings:
    """Read and check the settings.

    Raises:
        StartError: one cannot be used, or others could use the servers without a key.
    """
    variables.check_text(environment)
    access.check_open(environment, access.api_key(environment))
    return Settings(
        _replicas(environment.get(VARIABLE, "")),
        variables.choice(environment, "SPARKFORGE_ROUTER_POLICY", POLICIES[0], POLICIES),
        variables.listen_port(environment),
    )


def _replicas(text: str) -> tuple[Replica, ...]:
    """Return the servers of a list."""
    words = text.replace(",", " ").split()
    if not words:
        raise StartError(f"{VARIABLE} is empty: name the servers in .env, like {_EXAMPLE}")
    replicas = tuple(_replica(word) for word in words)
    names = [replica.name.lower() for replica in replicas]
    if double := next((name for name in names if names.count(name) > 1), ""):
        raise StartError(f"{VARIABLE} names {double} twice: name each server once")
    return replicas


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


def configuration(settings: Settings, addresses: Mapping[str, str]) -> str:
    """Return HAProxy's configuration.

    Args:
        addresses: of the servers, by name.
    """
    names = [replica.name for replica in settings.replicas]
    states = ", ".join(
        f"{name} %[srv_is_up(replicas/{name}),iif(answers,is down)]" for name in names
    )
    told = f'"%[nbsrv(replicas)] of {len(names)} replicas serve: {states}\\n"'
    pages = "".join(
        f"    use_backend metrics-of-{name} if {{ path /replicas/{name}/metrics }}\n"
        for name in names
    )
    by_prefix = settings.policy == "prefix"
    servers = "".join(f"    server {name} {addresses[name]}\n" for name in names)
    metrics = "".join(
        f"\nbackend metrics-of-{name}\n"
        "    http-request set-path /metrics\n"
        f"    server {name} {addresses[name]}\n"
        for name in names
    )
    return f"""\
global
    log stdout format raw local0
    maxconn 1024
    nbthread 2
    hard-stop-after 25s
    # The whole of a usual body: its beginning chooses the replica, and only a request that is held
    # can be repeated on another one.
    tune.bufsize 1048576

defaults
    mode http
    log-format "{_LINE}"
    option dontlognull
    # Linux holds the pieces of a stream back for up to 200 ms otherwise.
    option http-no-delay
    option http-buffer-request
    # A client that leaves frees its place in the server.
    option abortonclose
    option clitcpka
    option srvtcpka
    # vLLM closes idle connections after 5 s, maybe just when a request is sent.
    option http-server-close
    # A request that a server has begun is never repeated: one that kills a server would kill all.
    option redispatch 1
    retries 3
    retry-on conn-failure 503
    timeout connect 3s
    timeout check 3s
    timeout http-request 60s
    timeout http-keep-alive 75s
    # Silence of either side. An answer of 131,072 tokens that is not streamed is silent for 1.8
    # hours at 20 tokens/s.
    timeout client 2h
    timeout server 2h
{_errors()}
frontend router
    # Here only: HAProxy prints changes of a server's state by itself.
    log global
    bind :{settings.port}
    http-request set-log-level silent if {{ path /health }} or {{ path_end /metrics }}
    acl serves nbsrv(replicas) gt 0
    # A server that wants no new requests is better than none: a busy one fails checks, too.
    acl stalled nbsrv(stalled) gt 0
    http-request return status 200 content-type text/plain lf-string {told} \
if {{ path /health }} serves or {{ path /health }} stalled
    http-request return status 503 content-type text/plain lf-string {told} \
if {{ path /health }}
    http-request use-service prometheus-exporter if {{ path /metrics }}
{_keys() if by_prefix else ""}{pages}    use_backend stalled if !serves stalled
    default_backend replicas

backend replicas
{_HASH if by_prefix else "    balance leastconn"}
    option httpchk GET /health?ready
    http-check disable-on-404
    default-server {_CHECK}
{servers}
backend stalled
    balance leastconn
    option httpchk GET /health?ready
    http-check expect rstatus ^(200|404)$
    default-server {_CHECK}
{servers}{metrics}"""


_CHECK = "check inter 2s fastinter 1s fall 3 rise 1 on-marked-down shutdown-sessions"
_LINE = "%ci %HM %HPO %ST replica=%s first_byte_ms=%Tr total_ms=%Ta bytes=%B end=%tsc retries=%rc"
_HASH = """\
    balance hash var(txn.key)
    hash-type consistent sdbm avalanche
    # No server gets more than 1.25 times its share of what runs: the next one takes it.
    hash-balance-factor 125"""


def _keys() -> str:
    """Return the lines that find a request's conversation; GET and the like have none."""
    lines = []
    for number, (end, places, condition) in enumerate(_PARTS):
        missing = ""
        for place in places:
            lines.append(
                f"set-var(txn.k{number}) req.body,json_query('{place}')"
                f" if METH_POST {{ path_end {end} }}{condition}{missing}"
            )
            missing = f" !{{ var(txn.k{number}) -m found }}"
    joined = "".join(f"%[var(txn.k{number})]" for number in range(len(_PARTS)))
    lines.append(f'set-var-fmt(txn.key) "{joined}" if METH_POST')
    lines.append("set-var(txn.key) req.body if METH_POST { var(txn.key) -m len 0 }")
    return "".join(f"    http-request {line}\n" for line in lines)


def _errors() -> str:
    """Return HAProxy's own errors as OpenAI's clients expect them."""
    reasons = {
        408: "the body of the request did not arrive within 60 s",
        502: "the replica ended the connection without an answer",
        503: "no replica serves, or the one with this request was lost",
        504: "the replica was silent for 2 hours",
    }
    lines = []
    for status, reason in reasons.items():
        body = (
            f'{{"error": {{"message": "router: {reason}", "type": "ServiceUnavailableError",'
            f' "param": null, "code": {status}}}}}'
        )
        retry = " hdr Retry-After 5" if status == 503 else ""
        lines.append(
            f"    http-error status {status} content-type application/json string '{body}'{retry}\n"
        )
    return "".join(lines)


def run(environment: Mapping[str, str]) -> NoReturn:
    """Become HAProxy; does not return.

    Raises:
        StartError: a setting is wrong, or a name has no address.
        OSError: the configuration cannot be written, or the image has no HAProxy.
    """
    settings = read(environment)
    addresses = {replica.name: resolve(replica) for replica in settings.replicas}
    path = Path(tempfile.gettempdir()) / "haproxy.cfg"
    path.write_text(configuration(settings, addresses), encoding="utf-8")
    say(f"router of {len(addresses)} replicas, {settings.policy}: {', '.join(addresses)}")
    # a stop by SIGUSR1 (Compose's stop_signal) lets the answers end
    session.become([PROGRAM, "-db", "-f", str(path)])


def check(port: int) -> str:
    """Return the router's line about its servers.

    Raises:
        OSError, http.client.HTTPException: it does not answer.
        NoReplicaError: no server serves; the message is its line.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_CHECK_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        line = response.read(1 << 16).decode(errors="replace").strip()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise NoReplicaError(line)
    return line
