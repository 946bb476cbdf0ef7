"""Refuse new requests while memory is short: ASGI middleware that vLLM loads (``--middleware``).

It runs in vLLM's process. The memory guard, in the entrypoint's process, writes a file while
requests have to be refused. Running requests continue.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

OPTIONS = ("--middleware", f"{__name__}.Refusal")
PROBE = "X-Sparkforge-Probe"
"""Header of our own checks, which are never refused: a healthy server has to make a token."""
RETRY_S = 30
"""Seconds for ``Retry-After``. OpenAI's client honours up to 60."""
# checks of other programs, or requests that free memory
_OPEN = frozenset({"/ping", "/abort_requests", "/pause", "/sleep"})

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def path() -> Path:
    """Return the file that exists while requests are refused; it has the reason."""
    return Path(tempfile.gettempdir()) / "sparkforge-refuses"


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which vLLM's process finds this module."""
    folders = [str(Path(__file__).resolve().parents[2]), variables.get("PYTHONPATH", "")]
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


class Refusal:
    """Answers requests that would add work with 503."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._path = path()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on, or refuse it."""
        if not _adds_work(scope):
            return self._app(scope, receive, send)
        try:
            reason = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # the usual case: no file
            return self._app(scope, receive, send)
        retry = (b"retry-after", str(RETRY_S).encode())
        return refuse(send, 503, "ServiceUnavailableError", reason, retry)


def _adds_work(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    asked = scope["path"].removeprefix(scope.get("root_path", ""))
    if asked in _OPEN or asked.endswith("/cancel"):
        return False
    return PROBE.lower().encode() not in (name.lower() for name, _ in scope["headers"])


async def refuse(
    send: Send, status: int, kind: str, reason: str, *more: tuple[bytes, bytes]
) -> None:
    """Send an error as OpenAI's clients expect it.

    Args:
        kind: vLLM's word for errors with this status.
        more: headers.
    """
    error = {"message": reason, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
