"""Answer ``GET /health?ready`` for load balancers: ASGI middleware that vLLM loads.

vLLM's ``/health`` answers 200 during the warm-up, and while the engine is frozen. Without the query
it stays as it is. A vLLM without this middleware ignores the query.

    200  ready: vLLM's own answer
    404  send nothing new; what runs may continue: the entrypoint's last check failed, or memory is
         short. HAProxy takes 404 so (``http-check disable-on-404``)
    503  not ready: loading or warm-up; also vLLM's own answer once the engine is dead
"""

from __future__ import annotations

from collections.abc import Awaitable

from sparkforge.serving import refusal, state
from sparkforge.serving.refusal import App, Receive, Scope, Send, refuse

OPTIONS = ("--middleware", f"{__name__}.Readiness")
PATH, QUERY = "/health", "ready"


def problem() -> tuple[int, str] | None:
    """Return status and reason where no request should come here; None: the server is ready."""
    current = state.read()
    if current.text != state.READY:
        return 503, f"not ready: {current.text}"
    if current.stalled:
        return 404, f"the last check of the engine failed: {current.stalled}"
    if refusal.path().exists():
        return 404, "memory is short: new requests are refused"
    return None


class Readiness:
    """Answers the one request, and passes all others on."""

    def __init__(self, app: App) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on, or answer it."""
        if scope["type"] != "http" or scope["query_string"] != QUERY.encode():
            return self._app(scope, receive, send)
        if scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            return self._app(scope, receive, send)
        if (found := problem()) is None:
            return self._app(scope, receive, send)
        return refuse(send, found[0], "ServiceUnavailableError", found[1])
