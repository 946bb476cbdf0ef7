"""The router: its settings, its configuration, its health. With HAProxy itself: test_compose.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from sparkforge.serving import door, processes, router
from sparkforge.serving.errors import EX_CONFIG, EX_NOHOST, StartError
from sparkforge.serving.settings import Variables
from tests.support import load_script

TWO = "192.168.100.1:8000,192.168.100.2:8000"


def configuration(text: str = TWO, **more: str) -> str:
    given = {"SPARKFORGE_BIND": "127.0.0.1", **more}
    addresses = {one.name: router.resolve(one) for one in router.replicas(text)}
    rules = door.rules(Variables.read(given), given)
    return door.configuration(rules, "router", addresses, router.conversation())


def test_a_list_has_commas_spaces_or_both() -> None:
    first, second = router.replicas(" 192.168.100.1:8000, spark-2:80\n")
    assert first == router.Replica("192.168.100.1:8000", "192.168.100.1", 8000)
    assert second == router.Replica("spark-2:80", "spark-2", 80)
    assert router.replicas("spark_2.lan-1:80")[0].host == "spark_2.lan-1"
    (only,) = router.replicas("[fd00::2]:8000")
    assert router.resolve(only) == "ipv6@fd00::2:8000"
    assert only.name == "fd00::2:8000"  # HAProxy takes no bracket in a name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "SPARKFORGE_REPLICAS is empty: name the servers in .env, like 192.168.100.1:8000"),
        (" , ", "is empty"),
        ("192.168.100.1", "has '192.168.100.1': use HOST:PORT"),
        ("http://192.168.100.1:8000", "use HOST:PORT"),
        ("192.168.100.1:8000/v1", "use HOST:PORT"),
        ("192.168.100.1:0", "use HOST:PORT"),
        ("192.168.100.1:65536", "use HOST:PORT"),
        ("fd00::2:8000", "use HOST:PORT"),
        ("spark 2:8000", "has 'spark': use HOST:PORT"),
        ("a'b:1", "use HOST:PORT"),
        ("spark..lan:1", "use HOST:PORT"),
        ("-spark:1", "use HOST:PORT"),
        (f"{'a' * 64}:1", "use HOST:PORT"),
        ("spärk:1", "use HOST:PORT"),
        ("192.168.100:8000", "192.168.100 is no address"),
        ("[::g]:8000", "use HOST:PORT"),
        ("[1:2]:8000", "1:2 is no address"),
        ("spark:8000,SPARK:8000", "names spark:8000 twice"),
        ("127.0.0.1:8000", "is the router's own container: use the address of this machine"),
        ("localhost:8000", "is the router's own container"),
        ("0.0.0.0:8000", "is the router's own container"),
        ("[::1]:8000", "is the router's own container"),
    ],
)
def test_a_wrong_list_is_one_error(text: str, reason: str) -> None:
    with pytest.raises(StartError) as error:
        router.replicas(text)
    assert reason in str(error.value)
    assert error.value.code == EX_CONFIG


def test_a_name_without_an_address_is_tried_again() -> None:
    (one,) = router.replicas("no-such-machine.invalid:8000")
    with pytest.raises(StartError, match=r"no-such-machine\.invalid has no address") as error:
        router.resolve(one)
    assert error.value.code == EX_NOHOST


def test_the_configuration_names_each_server() -> None:
    text = configuration(SPARKFORGE_LISTEN_PORT="8001")
    assert "bind *:8001 proto h1" in text
    for name in TWO.split(","):
        # ready ones, those that want no new requests, and for its metrics
        assert text.count(f"    server {name} ipv4@{name}\n") == 3
        assert f"use_backend metrics-of-{name} if {{ path /replicas/{name}/metrics }}" in text
    assert "balance hash var(txn.key)" in text
    assert "of 2 replicas serve: 192.168.100.1:8000 %[srv_is_up(" in text


def test_it_becomes_haproxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def become(command: list[str]) -> NoReturn:
        started.append(command)
        raise InterruptedError

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(processes, "become", become)
    monkeypatch.setattr(shutil, "which", lambda name, path: f"/usr/sbin/{name}")
    with pytest.raises(InterruptedError):
        router.run({"SPARKFORGE_REPLICAS": TWO, "SPARKFORGE_BIND": "127.0.0.1"})
    ((*_, path),) = started
    assert Path(path).read_text() == configuration()
    assert "router of 2 replicas: 192.168.100.1:8000, " in capsys.readouterr().err


def test_the_entrypoint_is_the_router_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKFORGE_REPLICAS", "spark-2")
    monkeypatch.delenv("SPARKFORGE_RESTART", raising=False)
    assert load_script("entrypoint").main([]) == EX_CONFIG
    assert "error: SPARKFORGE_REPLICAS has 'spark-2': use HOST:PORT" in capsys.readouterr().err
