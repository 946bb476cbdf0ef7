"""Images in a registry: their names, and push and pull through the engine.

The engine moves the bytes: it has the user's credentials (docker's own configuration), checks every
digest, and skips layers that the other side has, so that an interrupted transfer continues.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

from sparkforge.core.errors import (
    EngineError,
    ImageError,
    RegistryError,
    SparkforgeError,
    UsageError,
    VerifyError,
)
from sparkforge.core.log import log
from sparkforge.runtime.engine import Engine

_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])"
_REPOSITORY = re.compile(rf"(?P<host>{_HOST}(?::\d+)?)/{_PART}(?:/{_PART})*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHORTEST, _LONGEST = 2, 255  # of NAME, by cosign and by the registries' API

# parts of messages of the engine or cosign, by their meaning; the first match counts
_WRONG_BYTES = (
    "unexpected commit digest",
    "failed size validation",
    "verification failed for digest",
)
_DENIED = (
    "unauthorized",
    "denied",
    "no basic auth",
    "authentication required",
    "authorization failed",
    "forbidden",
)
_UNREACHABLE = (
    "connection refused",
    "connection reset",
    "no such host",
    "network is unreachable",
    "i/o timeout",
    "deadline exceeded",
    "tls: ",  # x509 alone is a signature's certificate
    "server gave http response to https client",
)
_ABSENT = ("manifest unknown", "not found", "name unknown")


@dataclass(frozen=True)
class Reference:
    """An image in a registry, by its digest.

    Attributes:
        repository: REGISTRY/NAME.
    """

    repository: str
    digest: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"


def repository(text: str, what: str) -> str:
    """Check a repository's name.

    Args:
        what: the option that gives it, for the error.

    Raises:
        UsageError: it is not REGISTRY/NAME.
    """
    hint = "for example registry.example.org/team/sparkforge"
    if "@" in host_of(text.rpartition("://")[2]):
        msg = f"{what}: has a user name or password, which are shown nowhere"
        raise UsageError(msg, f"store them with docker login; give REGISTRY/NAME, {hint}")
    if "://" in text:
        msg = f"{what} {text}: is an address"
        raise UsageError(msg, f"give REGISTRY/NAME without a scheme, {hint}")
    if "@" in text or ":" in text.rpartition("/")[2]:
        msg = f"{what} {text}: has a tag or digest of its own"
        raise UsageError(msg, f"give REGISTRY/NAME; the image brings its digest: {hint}")
    match = _REPOSITORY.fullmatch(text)
    if match is None or not _SHORTEST <= len(text.partition("/")[2]) <= _LONGEST:
        msg = f"{what} {text}: is not REGISTRY/NAME (lower case, 2 to 255 characters)"
        raise UsageError(msg, hint)
    if not _is_host(match["host"]):
        msg = f"{what} {text}: names no registry"
        raise UsageError(msg, f"put its host in front, {hint}")
    return text


def reference(text: str) -> Reference | None:
    """Return the image that REGISTRY/NAME@sha256:… names; None for other texts.

    Raises:
        UsageError: NAME is malformed.
    """
    name, _, digest = text.partition("@")
    if not _DIGEST.fullmatch(digest) or not _is_host(host_of(name)):
        return None  # NAME@sha256:… alone is an image that only the engine knows
    return Reference(repository(name, "image"), digest)


def _is_host(text: str) -> bool:
    """Return whether the first part of a name is a registry, by the rules of docker."""
    return "." in text or ":" in text or text == "localhost"


def host_of(name: str) -> str:
    """Return the registry of a repository, with its port."""
    return name.partition("/")[0]


def push(engine: Engine, image: str, name: str, tag: str) -> Reference:
    """Push an image; returns it by the digest that the registry has now.

    Args:
        image: in the engine.
        name: REGISTRY/NAME.
        tag: in the registry; one that belongs to this image alone.

    Raises:
        RegistryError: the registry cannot be reached, or refuses.
        ImageError: the engine has no such image.
    """
    from docker.errors import ImageNotFound

    _check_transport(engine, host_of(name))
    try:
        engine.client.images.get(image).tag(name, tag)
    except ImageNotFound:
        msg = f"{image}: not in the engine"
        raise ImageError(msg, "build it again, or select its engine: docker context use") from None
    try:
        _follow(engine, "push", name, tag)
    finally:
        engine.remove(f"{name}:{tag}")  # the name; the image has its own
    return Reference(name, _digest_there(engine, name, tag))


def _digest_there(engine: Engine, name: str, tag: str) -> str:
    """Return the digest of a tag, as the registry has it.

    Raises:
        RegistryError: the registry cannot be reached, or refuses.
    """
    from docker.errors import DockerException

    try:
        return str(engine.client.images.get_registry_data(f"{name}:{tag}").id)
    except DockerException as error:
        raise _error("look-up", name, _said(error)) from None


def _said(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error)


def pull(engine: Engine, image: Reference) -> None:
    """Pull an image by its digest.

    Raises:
        RegistryError: the registry cannot be reached, refuses, or lacks the image.
        VerifyError: the registry gives bytes with another digest.
    """
    _check_transport(engine, host_of(image.repository))
    _follow(engine, "pull", image.repository, image.digest)


def _check_transport(engine: Engine, host: str) -> None:
    """Refuse a registry that the engine talks to without TLS, unless it is on this machine.

    Raises:
        RegistryError: the engine's configuration allows it.
    """
    bare = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    literal = _address(bare)
    if bare == "localhost" or (literal is not None and literal.is_loopback):
        return
    config = engine.client.info().get("RegistryConfig") or {}
    index = (config.get("IndexConfigs") or {}).get(host) or {}
    networks = [ip_network(cidr) for cidr in config.get("InsecureRegistryCIDRs") or ()]
    beyond = [network for network in networks if not network.is_loopback]
    # the engine compares the addresses of a name, too
    addresses = [literal] if literal is not None else _addresses(bare) if beyond else []
    ranged = any(address in network for network in beyond for address in addresses)
    if index.get("Secure") is False or ranged:
        msg = f"{host}: the engine uses this registry without TLS"
        raise RegistryError(msg, "remove it from insecure-registries in the engine's daemon.json")


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a registry's host is; None for a name."""
    try:
        return ip_address(text.strip("[]"))
    except ValueError:
        return None


def _addresses(name: str) -> list[IPv4Address | IPv6Address]:
    """Return the addresses of a name; [] if it is unknown here, then the engine says so."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ip_address(str(place[0])) for *_, place in found]


def _follow(engine: Engine, what: str, name: str, end: str) -> None:
    """Push or pull with progress.

    Args:
        end: tag or digest.
    """
    import requests
    from docker.errors import DockerException

    api = engine.client.api
    try:
        events = (api.push if what == "push" else api.pull)(name, tag=end, stream=True, decode=True)
        _show(what, name, events)
    except DockerException as error:
        raise _error(what, name, _said(error)) from None
    except requests.RequestException as error:
        msg = f"the engine stopped answering during the {what}: {type(error).__name__}"
        raise EngineError(msg, "check the engine, then run this again: it continues") from None


def _show(what: str, name: str, events: Iterable[Mapping[str, Any]]) -> None:
    done: dict[str, tuple[int, int]] = {}
    for event in events:
        if "error" in event:
            detail = event.get("errorDetail") or {}
            raise _error(what, name, str(detail.get("message") or event["error"]))
        progress = event.get("progressDetail") or {}
        if progress.get("total"):
            done[str(event.get("id"))] = (int(progress.get("current", 0)), int(progress["total"]))
            log.progress(
                f"{what} {name}",
                sum(min(layer) for layer in done.values()),
                sum(total for _, total in done.values()),
                note=f"{len(done)} layers",
            )


def _error(what: str, name: str, message: str) -> SparkforgeError:
    """Return the error that an engine's message means."""
    host, said = host_of(name), last_line(message)
    lowered = message.lower()
    if any(word in lowered for word in _WRONG_BYTES):
        msg = f"{name}: the registry gives other bytes than the digest says: {said}"
        return VerifyError(msg, "get the image from a trusted source, or build it: build.py")
    if refused := refusal(what, name, message):
        return refused
    if any(word in lowered for word in _ABSENT):
        msg = f"{name}: {host} does not have this image: {said}"
        return RegistryError(msg, "check name and digest; a private image needs docker login")
    msg = f"{name}: the {what} failed: {said}"
    return RegistryError(msg, "see the engine's log, then run this again: it continues")


def refusal(what: str, name: str, message: str) -> RegistryError | None:
    """Return the error of a registry that denies access or cannot be reached.

    Args:
        what: the operation, as a noun.
        name: of an image or repository there.
        message: of a program. None is returned if it means something else.
    """
    host, lowered = host_of(name), message.lower()
    said = last_line(message)
    if any(word in lowered for word in _DENIED):
        msg = f"{name}: {host} denies the {what}: {said}"
        return RegistryError(msg, f"docker login {host}, with an account that has this right")
    if any(word in lowered for word in _UNREACHABLE):
        msg = f"{name}: {host} cannot be reached: {said}"
        return RegistryError(msg, "check name, network and proxy, then run this again")
    return None


def last_line(message: str) -> str:
    """Return the end of a program's message, where the cause is."""
    lines = message.strip().splitlines()
    return lines[-1].strip()[:300] if lines else "no reason given"
