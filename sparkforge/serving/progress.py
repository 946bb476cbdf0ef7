"""Does the engine make progress? Counters that only it can move, else one token.

``/health`` of vLLM answers as long as the engine's process exists. So a stopped or hung engine
looks well. Here a server is well when the engine has taken a step since it was last asked, or
makes one token now. A busy server is not asked for a token: it would wait behind all others.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The API server's process keeps these, and changes them only when the engine has reported a step.
# kv_cache_usage_perc moves at each piece of a long prompt, which no token counter does.
_ENGINE_METRICS = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
)

_PROMPT_BUCKET = re.compile(
    r'vllm:request_prompt_tokens_bucket\{(?:.*,)?le="([^"]+)"[^}]*\} ([0-9.e+]+)$'
)

Counters = Mapping[str, str]

PROBLEMS = (OSError, http.client.HTTPException, LookupError, ValueError)
"""What asking a server that is not well can raise."""


# of a look, what is kept for the counters behind a token that did not come
_LAST_LOOK_S = 1.0


class NoProgressError(ValueError):
    """The server answers, but its engine does nothing."""


class StatusError(ValueError):
    """The server answered with another status than 200; ``status`` is that one."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Client:
    """One server, on loopback.

    Attributes:
        timeout_s: for one look, all its requests together.
        key: API key, or empty.
    """

    port: int
    timeout_s: float
    key: str = ""

    def observe(self, before: Counters | None) -> Counters:
        """See progress since ``before``, or cause it; returns the counters to compare with next.

        Args:
            before: what the last call returned; None: nothing counts but a token.

        Raises:
            OSError, http.client.HTTPException: no answer in time.
            LookupError, ValueError: an answer other than it should be.
            NoProgressError: no step of the engine since ``before``, and no token in time.
        """
        end = time.monotonic() + self.timeout_s
        self.ask(end, "GET", "/health")
        now = self._counters(end)
        if before is not None and now != before:
            return now
        try:
            self._token(end - _LAST_LOOK_S)
        except TimeoutError:
            # behind a long queue a token takes its time, but then others move the counters
            if before is None or (after := self._counters(end)) == now:
                msg = f"no step of the engine, and no token within {self.timeout_s:.0f} s"
                raise NoProgressError(msg) from None
            return after
        return self._counters(end)

    def ask(
        self, end: float, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return what the server answers to one request.

        Args:
            end: the monotonic clock's time that it has until.

        Raises:
            OSError, http.client.HTTPException: no answer in time.
            StatusError: it refuses.
        """
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        left = max(end - time.monotonic(), 0.1)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=left)
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            reason = answer[:200].decode(errors="replace")
            raise StatusError(response.status, f"{method} {path}: {response.status} {reason}")
        return answer

    def model(self, end: float) -> Mapping[str, Any]:
        """Return what the server says of its model: ``id``, and ``max_model_len`` in tokens.

        Raises:
            OSError, http.client.HTTPException: no answer in time.
            LookupError, ValueError: an answer other than it should be.
        """
        models = json.loads(self.ask(end, "GET", "/v1/models"))["data"]
        if not models:
            msg = "the server has no model"
            raise ValueError(msg)
        found: Mapping[str, Any] = models[0]
        return found

    def prompts(self, end: float) -> dict[str, float]:
        """Return how many prompts were answered so far, by the largest length of their bucket.

        A length is as the metric has it: ``500.0`` stands for 201 to 500 tokens, and ``+Inf`` for
        more than all others.
        """
        counts: dict[str, float] = {}
        for line in self.ask(end, "GET", "/metrics").decode().splitlines():
            if (match := _PROMPT_BUCKET.match(line)) is not None:
                counts[match[1]] = counts.get(match[1], 0.0) + float(match[2])
        # each bucket counts those below it, too
        below = 0.0
        found = {}
        for length in sorted(counts, key=float):
            found[length] = counts[length] - below
            below = counts[length]
        return found

    def _counters(self, end: float) -> Counters:
        """Return what only a step of the engine changes, as text, by metric and labels.

        Empty with ``--disable-log-stats``.
        """
        found = {}
        for line in self.ask(end, "GET", "/metrics").decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.partition("{")[0] in _ENGINE_METRICS:
                found[name] = value
        return found

    def _token(self, end: float) -> None:
        """Have the model make one token."""
        body = {"model": self.model(end)["id"], "prompt": "1", "max_tokens": 1}
        usage = json.loads(self.ask(end, "POST", "/v1/completions", body))["usage"]
        if usage["completion_tokens"] < 1:
            msg = "the model made no token"
            raise ValueError(msg)
