"""Check that the engine makes progress: by its counters, else by a request for one token.

vLLM's ``/health`` answers as long as the engine's process exists, so a stopped or hung engine seems
healthy. Here a server is healthy when its engine has taken a step since the last check, or makes a
token now. A busy server gets no request for a token, which would wait behind all others.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The API server changes these only when the engine has reported a step. kv_cache_usage_perc changes
# at each piece of a long prompt, unlike the counters of tokens.
_ENGINE_METRICS = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
)

Counters = Mapping[str, str]

PROBLEMS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
"""Errors of requests to a server that is not healthy, and of answers of another shape."""

PROMPTS = ((32,), tuple(range(32, 40)))
"""Token ids of any vocabulary: one token, and several. A step of the engine with one row uses other
kernels than one with several."""

# share of a check that is reserved for the counters, after a token that did not come
_LAST_LOOK = 1 / 6


class NoTokenError(ValueError):
    """The server answers, but made no token."""


class NoProgressError(NoTokenError):
    """The server answers, but its engine makes no progress."""


class StatusError(ValueError):
    """The server answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Client:
    """One server, behind the inner side of its front door."""

    address: Path
    """Of the socket."""
    timeout_s: float
    """For all requests of one check."""

    def observe(self, before: Counters | None) -> Counters:
        """Check for progress since ``before``, or cause it; returns the current counters.

        Args:
            before: result of the last call; None: a token is required.

        Raises:
            PROBLEMS: no answer in time, or an invalid one.
            NoTokenError: no token, or an invalid answer instead of one.
            NoProgressError: no step of the engine since ``before``, and no token in time.
        """
        end = time.monotonic() + self.timeout_s
        self.ask(end, "GET", "/health")
        now = self._counters(end)
        if before is not None and now != before:
            return now
        try:
            self._tokens(end - self.timeout_s * _LAST_LOOK)
        except TimeoutError:
            # behind a long queue a token takes long, but then other requests change the counters
            if before is None or (after := self._counters(end)) == now:
                msg = f"no step of the engine, and no token within {self.timeout_s:.0f} s"
                raise NoProgressError(msg) from None
            return after
        except PROBLEMS as error:
            raise NoTokenError(f"{type(error).__name__}: {error}") from error
        return self._counters(end)

    def ask(
        self, end: float, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the body of the answer to one request.

        Args:
            end: of the monotonic clock; the server may be silent until then.

        Raises:
            OSError, http.client.HTTPException: no complete answer.
            StatusError: another status than 200.
        """
        headers = {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(max(end - time.monotonic(), 0.1))
            connection.sock.connect(str(self.address))
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            reason = answer[:200].decode(errors="replace")
            raise StatusError(response.status, f"{method} {path}: {response.status} {reason}")
        return answer

    def model(self, end: float) -> tuple[str, int | None]:
        """Return the name of the server's first model, and its longest prompt and answer in tokens.

        The latter is None where the server does not say.
        """
        found = json.loads(self.ask(end, "GET", "/v1/models"))["data"][0]
        return str(found["id"]), found.get("max_model_len")

    def _counters(self, end: float) -> Counters:
        """Return the counters that only a step of the engine changes, by metric and labels.

        Empty with ``--disable-log-stats``.
        """
        lines = self.ask(end, "GET", "/metrics").decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines)
        return {
            name: value for name, _, value in pairs if name.partition("{")[0] in _ENGINE_METRICS
        }

    def _tokens(self, end: float) -> None:
        """Request one token for each of the prompts."""
        model, _ = self.model(end)
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": 1}
            answer = json.loads(self.ask(end, "POST", "/v1/completions", body))
            if answer["usage"]["completion_tokens"] < 1:
                raise ValueError("the model made no token")


@dataclass
class Hang:
    """Counts failed checks of a server. Times are seconds of the monotonic clock.

    One failed check proves nothing, and neither does a long time without a check: a container that
    was paused wakes up with an old clock. It takes ``looks`` failures in a row, and ``limit_s``
    less ``spare_s`` since the last success.
    """

    limit_s: float
    slow_s: float = 600.0
    """For a server that computes, and does not answer: one request of a client may be slow."""
    looks: int = 3
    spare_s: float = 0.0
    answered: bool = False
    _since: float = 0.0
    _well: float = 0.0
    _failures: int = 0

    def well(self, now: float) -> None:
        """Note a success that began at ``now``."""
        self.answered, self._since, self._well, self._failures = True, now, now, 0

    def excused(self, now: float) -> None:
        """Note a failure at ``now`` that has a good reason."""
        self._since, self._failures = now, 0

    def slow(self, now: float) -> bool:
        """Note a failure of a server that computes; returns whether it hangs."""
        if now - self._well >= max(self.slow_s, self.limit_s):
            return self.ill(now)
        self.excused(now)
        return False

    def ill(self, now: float) -> bool:
        """Note a failure; returns whether the server hangs."""
        self._failures += 1
        enough = self._failures >= self.looks and now - self._since >= self.limit_s - self.spare_s
        return self.answered and self.limit_s > 0 and enough
