"""``/health?ready``: what load balancers are told."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import readiness, refusal, state


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def answer(path: str = "/health", query: bytes = b"ready", **scope: Any) -> tuple[int, str] | None:
    """Return status and message; None: the request was passed on."""
    sent: list[Any] = []
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def receive() -> Any:
        raise AssertionError("there is no body")

    async def send(message: Any) -> None:
        sent.append(message)

    request = {"type": "http", "method": "GET", "path": path, "query_string": query, **scope}
    asyncio.run(readiness.Readiness(app)(request, receive, send))  # type: ignore[arg-type]
    if passed:
        assert sent == []
        return None
    start, body = sent
    return start["status"], json.loads(body["body"])["error"]["message"]


def test_a_ready_server_answers_itself() -> None:
    assert answer() is None
    state.tell(state.READY)
    assert answer() is None


def test_a_server_that_is_not_ready_gets_nothing() -> None:
    state.tell("warm-up: 3 of 52")
    assert answer() == (503, "not ready: warm-up: 3 of 52")
    assert answer(path="/api/health", root_path="/api") == (503, "not ready: warm-up: 3 of 52")


def test_a_server_without_progress_or_memory_gets_nothing_new() -> None:
    state.tell(state.READY, stalled="NoProgressError: no step")
    assert answer() == (404, "the last check of the engine failed: NoProgressError: no step")
    state.tell(state.READY)
    refusal.path().write_text("memory is short")
    assert answer() == (404, "memory is short: new requests are refused")
    refusal.path().unlink()
    assert answer() is None


@pytest.mark.parametrize(
    "request_",
    [
        {"query": b""},
        {"query": b"ready=1"},
        {"path": "/v1/models"},
        {"path": "/health/x"},
        {"type": "lifespan"},
    ],
)
def test_all_else_stays_as_it_is(request_: dict[str, Any]) -> None:
    state.tell("loading")
    assert answer(**request_) is None


def test_vllm_finds_the_middleware() -> None:
    folder = Path(refusal.environment({})["PYTHONPATH"])
    module, _, name = readiness.OPTIONS[1].rpartition(".")
    assert (folder / f"{module.replace('.', '/')}.py").is_file()
    assert name == readiness.Readiness.__name__
