"""Refuse requests that are too large: ASGI middleware that vLLM loads (``--middleware``).

vLLM has no limit. A chat of 16 MiB is refused as too long for the context, but only once it is
parsed, and until then, for seconds, the process answers no other request (docs/accept.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableSequence
from typing import Any

from sparkforge.serving import variables
from sparkforge.serving.refusal import App, Receive, Scope, Send, refuse

OPTIONS = ("--middleware", f"{__name__}.Limit")
VARIABLE = "SPARKFORGE_MAX_BODY_MIB"
DEFAULT_MIB = 8
"""131,072 tokens are less than 1 MiB of English, and 4 MiB with every letter as ``\\uXXXX``."""


def limit(environment: Mapping[str, str]) -> int:
    """Return the bytes that a body may have; 0: any number.

    Raises:
        StartError: the variable is no number.
    """
    return int(variables.number(environment, VARIABLE, DEFAULT_MIB) * (1 << 20))


class Limit:
    """Answers requests with a larger body with 413, and throws the body away.

    It reads such a body to its end: a client that still sends does not see an answer.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._limit = limit(os.environ)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        declared = _declared(scope)
        if scope["type"] != "http" or (declared is not None and declared <= self._limit):
            return await self._app(scope, receive, send)
        # without a length the whole body must arrive before its size is known
        kept: MutableSequence[Mapping[str, Any]] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None  # the client has left
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if declared is None and size <= self._limit:
                kept.append(message)
        if declared is not None or size > self._limit:
            reason = f"the body has more than {self._limit / (1 << 20):g} MiB ({VARIABLE})"
            return await refuse(send, 413, "BadRequestError", reason)

        async def again() -> Mapping[str, Any]:
            return kept.pop(0) if kept else await receive()

        return await self._app(scope, again, send)


def _declared(scope: Scope) -> int | None:
    """Return the length that a request gives for its body; 0 where it has none."""
    headers = {name.lower(): value for name, value in scope.get("headers", ())}
    if b"transfer-encoding" in headers:
        return None
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else None
