"""Names in registries, and what the engine's and cosign's messages mean."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from sparkforge.core.errors import RegistryError, SparkforgeError, UsageError, VerifyError
from sparkforge.runtime import registry
from sparkforge.runtime.engine import Engine

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1:5000/x1",
        "ghcr.io/a/b-c",
        "localhost/xy",
        "r.example.org/a/b_c/d.e",
        "[::1]:5000/xy",
    ],
)
def test_good_names(name: str) -> None:
    assert registry.repository(name, "--push") == name
    assert str(registry.reference(f"{name}@{DIGEST}")) == f"{name}@{DIGEST}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("https://r.example.org/x", "without a scheme"),
        ("r.example.org/x:1", "a tag or digest of its own"),
        (f"r.example.org/x@{DIGEST}", "a tag or digest of its own"),
        ("team/xy", "names no registry"),
        ("r.example.org/X", "is not REGISTRY/NAME"),
        ("r.example.org/", "is not REGISTRY/NAME"),
        ("r.example.org/a//b", "is not REGISTRY/NAME"),
        ("user:password@r.example.org/x", "a user name or password"),
        ("https://user:password@r.example.org/x", "a user name or password"),
        ("r.example.org/x", "is not REGISTRY/NAME"),
        ("", "is not REGISTRY/NAME"),
        (f"r.example.org/{'a' * 256}", "is not REGISTRY/NAME"),
    ],
)
def test_wrong_names(name: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        registry.repository(name, "--push")
    assert said in str(error.value)
    assert "user:password" not in f"{error.value} {error.value.remedy}"


def test_names_of_the_engine_alone_are_no_references() -> None:
    for text in (
        f"sparkforge/cpu@{DIGEST}",
        "r.example.org/x:1",
        "x.tar",
        "r.example.org/x@sha256:1",
    ):
        assert registry.reference(text) is None


@dataclass
class _Api:
    events: list[Mapping[str, Any]]

    def push(self, *_: object, **__: object) -> Iterator[Mapping[str, Any]]:
        return iter(self.events)

    pull = push


@dataclass
class _Client:
    api: _Api
    config: Mapping[str, Any] = field(default_factory=dict)

    def info(self) -> Mapping[str, Any]:
        return {"RegistryConfig": self.config}


def engine(events: list[Mapping[str, Any]], **config: Any) -> Engine:
    return Engine(cast("Any", _Client(_Api(events), config)), "28.0", True)


@pytest.mark.parametrize(
    ("message", "kind", "hint"),
    [
        ("denied: requested access to the resource is denied", RegistryError, "docker login"),
        ("push access: no basic auth credentials", RegistryError, "docker login"),
        ("dial tcp 127.0.0.1:9: connect: connection refused", RegistryError, "check name, network"),
        ("lookup r.example.org: no such host", RegistryError, "check name, network"),
        ("http: server gave HTTP response to HTTPS client", RegistryError, "check name, network"),
        ("tls: failed to verify certificate: x509: unknown", RegistryError, "check name, network"),
        ("manifest unknown: manifest unknown", RegistryError, "check name and digest"),
        ("something else", RegistryError, "it continues"),
        ("unexpected commit digest sha256:1, expected sha256:2", VerifyError, "trusted source"),
        ("layer verification failed for digest sha256:1", VerifyError, "trusted source"),
    ],
)
def test_what_the_engine_says_is_one_error(
    message: str, kind: type[SparkforgeError], hint: str
) -> None:
    failing = engine([{"status": "Preparing"}, {"error": "x", "errorDetail": {"message": message}}])
    with pytest.raises(kind) as error:
        registry.pull(failing, registry.Reference("r.example.org/xy", DIGEST))
    assert hint in error.value.remedy
    assert message in error.value.what


def test_a_signer_that_is_not_trusted_is_no_refusal_of_the_registry() -> None:
    message = "no matching signatures: x509: certificate signed by unknown authority"
    assert registry.refusal("verify", f"r.example.org/xy@{DIGEST}", message) is None


def test_a_registry_without_tls_is_used_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"s.example.org": "192.0.2.1", "inside.example.org": "10.1.2.3"}

    def resolved(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    config = {
        "IndexConfigs": {"r.example.org": {"Secure": False}},
        "InsecureRegistryCIDRs": ["127.0.0.0/8", "10.0.0.0/8"],
    }
    insecure = engine([], **config)
    for host in ("127.0.0.1:5000", "localhost:5000", "s.example.org", "unknown.example.org"):
        registry.pull(insecure, registry.Reference(f"{host}/xy", DIGEST))
    for host in ("r.example.org", "10.1.2.3:5000", "inside.example.org"):
        with pytest.raises(RegistryError, match="without TLS"):
            registry.pull(insecure, registry.Reference(f"{host}/xy", DIGEST))
