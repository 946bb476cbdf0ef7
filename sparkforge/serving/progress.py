"""Does the engine make progress? Counters that only it can move, else one token.

``/health`` of vLLM answers as long as the engine's process exists. So a stopped or hung engine
looks well. Here a server is well when the engine has taken a step since it was last asked, or
makes one token now. A busy server is not asked for a token: it would wait behind all others.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkforge.serving.document import Document
from sparkforge.serving.refusal import PROBE

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

_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d{1,2})?"
_PROMPT_BUCKET = re.compile(
    rf'vllm:request_prompt_tokens_bucket\{{(?:.*,)?le="({_NUMBER}|\+Inf)"[^}}]*\}} ({_NUMBER})'
)

Counters = Mapping[str, str]

PROBLEMS = (OSError, http.client.HTTPException, ValueError)
"""What asking a server that is not well can raise."""

PROMPTS = ((32,), tuple(range(32, 40)))
"""Token ids that any vocabulary has: one token alone, and more than one. A step of the engine that
has one row takes other kernels than one that has several."""

# of a look, the share that is kept for the counters behind a token that did not come
_LAST_LOOK = 1 / 6
_ANSWER_LIMIT = 16 << 20
"""Bytes of one answer; the largest of a server that is well, its metrics, have less than 1 MB."""


class NoTokenError(ValueError):
    """The server answers, and was asked for a token that did not come."""


class NoProgressError(NoTokenError):
    """The server answers, but its engine does nothing."""


class StatusError(ValueError):
    """The server answered with another status than 200; ``status`` is that one."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Model:
    """What a server says of its model.

    Attributes:
        name: what requests have to name.
        max_len: tokens of prompt and answer together; None where the server does not say.
    """

    name: str
    max_len: int | None


class _Bounded(socket.socket):
    """A connection with one deadline for everything, and a bound on what it receives.

    The time-out of a plain socket starts anew with every byte.
    """

    end: float
    room = _ANSWER_LIMIT

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        left = self.end - time.monotonic()
        if self.room <= 0:
            raise ValueError(f"an answer of more than {_ANSWER_LIMIT >> 20} MiB")
        self.settimeout(max(left, 1e-3))
        try:
            if left <= 0:  # bytes that are there already would be taken all the same
                raise TimeoutError
            count = super().recv_into(*arguments, **options)
        except TimeoutError:
            raise TimeoutError("the answer is not complete in time") from None
        self.room -= count
        return count


def _connect(port: int, end: float) -> _Bounded:
    one = _Bounded(socket.AF_INET, socket.SOCK_STREAM)
    one.end = end
    one.settimeout(max(end - time.monotonic(), 0.1))
    try:
        one.connect(("127.0.0.1", port))
    except BaseException:
        one.close()
        raise
    return one


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
            ValueError: an answer other than it should be.
            NoTokenError: no token, or an answer other than one.
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
            # behind a long queue a token takes its time, but then others move the counters
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
        """Return what the server answers to one request.

        Args:
            end: the monotonic clock's time that it has until.

        Raises:
            OSError, http.client.HTTPException: no whole answer until then.
            StatusError: it refuses.
            ValueError: the answer is too large.
        """
        headers = {"Content-Type": "application/json", PROBE: "1"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.sock = _connect(self.port, end)
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            # in pieces: at once, memory would be taken for whatever length the header names
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
        """Return what the server says of its model.

        Raises:
            OSError, http.client.HTTPException: no answer in time.
            ValueError: an answer other than it should be.
        """
        said = Document.parse("the answer of /v1/models", self.ask(end, "GET", "/v1/models"))
        first = said.get(dict, "data", 0)
        length = first.get("max_model_len")
        return Model(
            said.get(str, "data", 0, "id"),
            None if length is None else said.get(int, "data", 0, "max_model_len"),
        )

    def prompts(self, end: float) -> dict[str, float]:
        """Return how many prompts were answered so far, by the largest length of their bucket.

        A length is as the metric has it: ``500.0`` stands for 201 to 500 tokens, and ``+Inf`` for
        more than all others.
        """
        counts: dict[str, float] = {}
        for line in self.ask(end, "GET", "/metrics").decode().splitlines():
            if (match := _PROMPT_BUCKET.fullmatch(line)) is not None:
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

    def _tokens(self, end: float) -> None:
        """Have the model make one token for each of the prompts."""
        model = self.model(end).name
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": 1}
            answer = self.ask(end, "POST", "/v1/completions", body)
            said = Document.parse("the answer of /v1/completions", answer)
            if said.get(int, "usage", "completion_tokens") < 1:
                msg = "the model made no token"
                raise ValueError(msg)
