"""The requests of the warm-up, on a client without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from sparkforge.serving import warmup
from sparkforge.serving.progress import Client


@dataclass(frozen=True)
class Stub:
    """A client whose streamed chats end with an error."""

    code: int

    def model(self, end: float) -> tuple[str, int]:
        return "m", 4096

    def ask(self, end: float, method: str, path: str, body: dict[str, Any]) -> bytes:
        if not body.get("stream"):
            return b"{}"
        return b'data: {"error":{"message":"boom","code":%d}}\n\ndata: [DONE]\n\n' % self.code


@pytest.mark.parametrize(("code", "failed"), [(400, False), (500, True)])
def test_error_in_a_stream_counts_as_its_status(code: int, failed: bool) -> None:
    """A model without Harmony's tokens refuses chats, and serves completions."""
    client = cast("Client", Stub(code))
    problem = warmup.run(client, [], answers=False, tell=lambda text: None)
    assert ("boom" in problem) is failed
