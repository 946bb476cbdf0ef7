"""The middleware that refuses requests whose body is too large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import bodies, refusal
from sparkforge.serving.errors import StartError

LIMIT = 1 << 20  # of the tests: 1 MiB


def exchange(
    monkeypatch: pytest.MonkeyPatch,
    pieces: Sequence[bytes],
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    leaves: bool = False,
) -> tuple[bytes | None, list[Any], int]:
    """Send a request; returns the body that the server read, what was sent, and pieces left."""
    monkeypatch.setenv(bodies.VARIABLE, "1")
    queue = [
        {"type": "http.request", "body": piece, "more_body": leaves or i < len(pieces) - 1}
        for i, piece in enumerate(pieces)
    ]
    queue.append({"type": "http.disconnect"})
    seen: list[bytes] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            seen.append(message["body"])
            more = message.get("more_body", False)

    async def receive() -> Any:
        return queue.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(bodies.Limit(app)(scope, receive, send))
    return b"".join(seen) if seen else None, sent, len(queue)


def length(size: int) -> tuple[bytes, bytes]:
    return b"Content-Length", str(size).encode()


CHUNKED = (b"transfer-encoding", b"chunked")


def test_a_body_of_the_limit_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"x" * LIMIT
    assert exchange(monkeypatch, [body], [length(LIMIT)]) == (body, [], 1)
    pieces = [body[:100], b"", body[100:]]
    assert exchange(monkeypatch, pieces, [CHUNKED]) == (body, [], 1)
    assert exchange(monkeypatch, [b""]) == (b"", [], 1)  # neither length nor body


@pytest.mark.parametrize(
    "headers",
    [[length(LIMIT + 1)], [CHUNKED], [CHUNKED, length(3)], [(b"content-length", b"-1")]],
    ids=["length", "chunks", "both", "odd length"],
)
def test_a_larger_body_is_read_to_its_end_and_refused(
    monkeypatch: pytest.MonkeyPatch, headers: list[tuple[bytes, bytes]]
) -> None:
    pieces = [b"x" * LIMIT, b"y"]
    seen, (start, body), left = exchange(monkeypatch, pieces, headers)
    assert (seen, start["status"], left) == (None, 413, 1)
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert json.loads(body["body"])["error"] == {
        "message": "the body has more than 1 MiB (SPARKFORGE_MAX_BODY_MIB)",
        "type": "BadRequestError",
        "param": None,
        "code": 413,
    }


def test_a_client_that_leaves_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchange(monkeypatch, [b"x"], [CHUNKED], leaves=True) == (None, [], 0)


def test_what_is_no_request_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append(scope["type"])

    asyncio.run(bodies.Limit(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert called == ["lifespan"]


def test_the_limit_is_a_number() -> None:
    assert bodies.limit({}) == bodies.DEFAULT_MIB << 20
    assert bodies.limit({bodies.VARIABLE: "0"}) == 0
    assert bodies.limit({bodies.VARIABLE: "0.5"}) == 1 << 19
    with pytest.raises(StartError, match="SPARKFORGE_MAX_BODY_MIB is 'much': use a number"):
        bodies.limit({bodies.VARIABLE: "much"})


def test_vllm_finds_the_middleware() -> None:
    folder = Path(refusal.environment({})["PYTHONPATH"])
    module, _, name = bodies.OPTIONS[1].rpartition(".")
    assert (folder / f"{module.replace('.', '/')}.py").is_file()
    assert name == bodies.Limit.__name__
