"""Check that the engine makes progress: by its counters, else by a request for one token.

vLLM's ``/health`` answers as long as the engine's process exists, so a stopped or hung engine seems
healthy. Here a server is healthy when its engine has taken a step since the last check, or makes a
token now. A busy server gets no request for a token, which would wait behind all others.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving.document import Document

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

_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d{1,2})?"
_PROMPT_BUCKET = re.compile(
    rf'vllm:request_prompt_tokens_bucket\{{(?:.*,)?le="({_NUMBER}|\+Inf)"[^}}]*\}} ({_NUMBER})'
)

Counters = Mapping[str, str]

PROBLEMS = (OSError, http.client.HTTPException, ValueError)
"""Errors of requests to a server that is not healthy."""

PROMPTS = ((32,), tuple(range(32, 40)))
"""Token ids of any vocabulary: one token, and several. A step of the engine with one row uses other
kernels than one with several."""

# share of a check that is reserved for the counters, after a token that did not come
_LAST_LOOK = 1 / 6
_ANSWER_LIMIT = 16 << 20
"""Bytes of one answer. The largest of a healthy server, its metrics, has less than 1 MB."""


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
class Model:
    """A server's own description of its model."""

    name: str
    """In requests."""
    max_len: int | None
    """Tokens of prompt and answer together, or None."""


class _Bounded(socket.socket):
    """A connection with one deadline and a limit of bytes.

    The time-out of a plain socket starts again with every byte.
    """

    end: float
    room = _ANSWER_LIMIT

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        left = self.end - time.monotonic()
        if self.room <= 0:
            raise ValueError(f"an answer of more than {_ANSWER_LIMIT >> 20} MiB")
        self.settimeout(max(left, 1e-3))
        try:
            if left <= 0:  # available bytes would be returned anyway
                raise TimeoutError
            count = super().recv_into(*arguments, **options)
        except TimeoutError:
            raise TimeoutError("the answer is not complete in time") from None
        self.room -= count
        return count


def _connect(address: Path, end: float) -> _Bounded:
    connection = _Bounded(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.end = end
    connection.settimeout(max(end - time.monotonic(), 0.1))
    try:
        connection.connect(str(address))
    except BaseException:
        connection.close()
        raise
    return connection


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
            OSError, http.client.HTTPException: no answer in time.
            ValueError: an invalid answer.
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

        Raises:
            OSError, http.client.HTTPException: no complete answer by then.
            StatusError: another status than 200.
            ValueError: the answer is too large.
        """
        headers = {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("localhost")
        connection.sock = _connect(self.address, end)
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            # in pieces: one read would allocate any length that the header claims
            answer = b"".join(iter(lambda: response.read(1 << 16), b""))
        finally:
            connection.close()
        if response.length:
            raise http.client.IncompleteRead(answer[:0], response.length)
        if response.status != http.client.OK:
            reason = answer[:200].decode(errors="replace")
            raise StatusError(response.status, f"{method} {path}: {response.status} {reason}")
        return answer

    def model(self, end: float) -> Model:
        """Return the server's first model."""
        what = "the answer of /v1/models"
        answer = Document.parse(what, self.ask(end, "GET", "/v1/models"))
        model = Document(what, answer.get(dict, "data", 0))
        return Model(model.get(str, "id"), model.find(int, "max_model_len"))

    def prompts(self, end: float) -> dict[str, float]:
        """Return the number of answered prompts by bucket of their length.

        A bucket has the metric's name: ``500.0`` is 201 to 500 tokens, and ``+Inf`` is longer than
        all others.
        """
        counts: dict[str, float] = {}
        for line in self.ask(end, "GET", "/metrics").decode().splitlines():
            if (match := _PROMPT_BUCKET.fullmatch(line)) is not None:
                counts[match[1]] = counts.get(match[1], 0.0) + float(match[2])
        # each bucket includes those below it
        below = 0.0
        found = {}
        for length in sorted(counts, key=float):
            found[length] = counts[length] - below
            below = counts[length]
        return found

    def _counters(self, end: float) -> Counters:
        """Return the counters that only a step of the engine changes, by metric and labels.

        Empty with ``--disable-log-stats``.
        """
        found = {}
        for line in self.ask(end, "GET", "/metrics").decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.partition("{")[0] in _ENGINE_METRICS:
                found[name] = value
        return found

    def _tokens(self, end: float) -> None:
        """Request one token for each of the prompts."""
        model = self.model(end).name
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": 1}
            answer = self.ask(end, "POST", "/v1/completions", body)
            document = Document.parse("the answer of /v1/completions", answer)
            if document.get(int, "usage", "completion_tokens") < 1:
                raise ValueError("the model made no token")
