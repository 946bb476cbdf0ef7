"""Health: the state of a start, and whether the engine makes progress.

A server is healthy when its engine has taken a step since the last check, or makes a token now. A
busy server gets no request for a token, which would wait behind all others.
"""

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving.options import say

READY = "ready"
Counters = Mapping[str, str]
# The API server changes these only when the engine has reported a step. kv_cache_usage_perc changes
# at each piece of a long prompt, unlike the counters of tokens.
_ENGINE_METRICS = (
    *("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "vllm:iteration_tokens_total_count",
)
# token ids of any vocabulary. A step with one row uses other kernels than one with several
PROMPTS = ((32,), tuple(range(32, 40)))


def temporary() -> Path:
    """Return the folder for temporary files: tempfile's is another one while the disk is full."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def forget() -> None:
    """Remove the marks of an earlier start of the container."""
    for path in temporary().glob("sparkforge-*.json"):
        path.unlink(missing_ok=True)


def write_mark(name: str, content: object) -> None:
    """Store a JSON value for the processes of this start of the container."""
    path = temporary() / f"sparkforge-{name}.json"
    written = path.with_suffix(f".{os.getpid()}")
    try:
        written.write_text(json.dumps(content))
        written.replace(path)
    except OSError as error:
        say(f"warning: {path} cannot be written: {error}")


def read_mark(name: str) -> Any:
    """Return what was stored, or None."""
    try:
        return json.loads((temporary() / f"sparkforge-{name}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def tell(text: str, *, given_up: bool = False) -> None:
    """Store the server's progress for the health check; with ``given_up`` none will be started."""
    write_mark("state", [text, given_up])


class StatusError(ValueError):
    """Another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Client:
    """One server, behind the inner side of its front door."""

    address: Path  # of the socket
    timeout_s: float  # for all requests of one check

    def observe(self, before: Counters | None) -> Counters:
        """Check for progress since ``before``, or cause it; returns the counters, or raises."""
        end = time.monotonic() + self.timeout_s
        self.ask(end, "GET", "/health")
        now = self._counters(end)
        if before is not None and now != before:
            return now
        by = end - self.timeout_s / 6  # the rest is for the counters, after no token
        try:
            model, _ = self.model(by)
            for prompt in PROMPTS:
                body = {"model": model, "prompt": prompt, "max_tokens": 1}
                self.ask(by, "POST", "/v1/completions", body)
        except TimeoutError:
            # behind a long queue a token takes long, but then other requests change the counters
            if before is None or self._counters(end) == now:
                msg = f"no step of the engine, and no token within {self.timeout_s:.0f} s"
                raise ValueError(msg) from None
        return self._counters(end)

    def ask(
        self, end: float, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the body of an answer, until ``end`` of the monotonic clock."""
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
        """Return the name of the server's first model, and its tokens of prompt and answer."""
        found = json.loads(self.ask(end, "GET", "/v1/models"))["data"][0]
        return str(found["id"]), found.get("max_model_len")

    def _counters(self, end: float) -> Counters:
        """Return the engine's counters by metric and labels; none with ``--disable-log-stats``."""
        lines = self.ask(end, "GET", "/metrics").decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines)
        return {name: text for name, _, text in pairs if name.partition("{")[0] in _ENGINE_METRICS}
