"""The smoke test, tried on servers that break one promise each."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sparkforge.build import smoke
from sparkforge.build.results import Answer, ReleaseProof
from sparkforge.core.errors import ServerError
from sparkforge.runtime.servers import LOOPBACK, MODEL_NAME, Stopped

TIMEOUT_S = 300.0
TRACEBACK = "Traceback (most recent call last):\n"


CLEAN = Stopped(0, 0.1, stragglers=False)


@dataclass
class Behaviour:
    """What a stand-in for vLLM does; the defaults are right."""

    status: int = 200
    models: tuple[str, ...] = (MODEL_NAME,)
    drift: int = 0  # added to tokens from the second long completion on
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    stream_shift: int = 0
    stream_total: int = 0
    done: bool = True
    lenient: bool = False
    shift: int = 0  # of the first token of every prompt
    logprob: float = -0.5
    stopped: Stopped = CLEAN
    ended: int | None = None
    said: str = "the last words"
    one_token_first_kills: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    whole: int = 0


class _Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        data = [{"id": name} for name in self.behaviour.models]
        self._send(200, {"data": data})

    def do_POST(self) -> None:
        b = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not b.lenient and body["model"] != MODEL_NAME:
            return self._send(404, {})
        if not b.lenient and body.get("max_tokens", 1) < 0:
            return self._send(400, {})
        prompt = body["prompt"]
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        if b.one_token_first_kills and not b.prompts and len(ids) == 1:
            return self._send(500, {})
        b.prompts.append(ids)
        if body.get("max_tokens", 1) == 1:
            choice = {
                "token_ids": [ids[-1] + b.shift],
                "logprobs": {"token_logprobs": [b.logprob]},
            }
            return self._send(b.status, {"choices": [choice]})
        count = max(body["max_tokens"], 0)
        tokens = [n + (b.drift if b.whole else 0) for n in range(count)]
        usage = {
            "prompt_tokens": len(ids) if b.prompt_tokens is None else b.prompt_tokens,
            "completion_tokens": count if b.completion_tokens is None else b.completion_tokens,
            "total_tokens": len(ids) + count,
        }
        if body.get("stream"):
            return self._stream([n + b.stream_shift for n in range(count)], usage)
        b.whole += 1
        return self._send(
            b.status, {"choices": [{"token_ids": tokens, "text": "x"}], "usage": usage}
        )

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, tokens: list[int], usage: dict[str, int]) -> None:
        b = self.behaviour
        usage = {**usage, "total_tokens": usage["total_tokens"] + b.stream_total}
        events = [{"choices": [{"token_ids": [n]}]} for n in tokens]
        lines = [json.dumps(one) for one in [*events, {"choices": [], "usage": usage}]]
        text = "".join(f"data: {line}\n\n" for line in [*lines, *(["[DONE]"] if b.done else [])])
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@dataclass(frozen=True)
class FakeServer:
    """``servers.Server`` on loopback."""

    url: str
    behaviour: Behaviour

    def exited(self) -> int | None:
        return self.behaviour.ended

    def output(self) -> str:
        return self.behaviour.said

    def stop(self) -> Stopped:
        return self.behaviour.stopped


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[FakeServer]:
    handler = type("Handler", (_Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer((LOOPBACK, 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield FakeServer(f"http://{LOOPBACK}:{server.server_port}", behaviour)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def starting(behaviour: Behaviour) -> Callable[[], Any]:
    return lambda: serving(behaviour)


def right_answers() -> tuple[Answer, ...]:
    return tuple(Answer(prompt[-1], -0.5) for prompt in smoke.PROMPTS)


# -- the patched server ------------------------------------------------------------


def test_right_server_passes() -> None:
    behaviour = Behaviour()
    report = smoke.exercise(starting(behaviour), TIMEOUT_S)
    assert report.tokens == 24
    assert report.answers == right_answers()
    assert report.release is None
    assert len(behaviour.prompts[0]) == 1, "the first forward has one token"


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"models": ("other",)}, "models"),
        ({"status": 500}, "a prompt of 1 token: 500"),
        ({"one_token_first_kills": True}, "a prompt of 1 token: 500"),
        ({"drift": 1}, "a second completion"),
        ({"completion_tokens": 23}, "usage"),
        ({"prompt_tokens": 3}, "usage"),
        ({"stream_shift": 1}, "the streamed completion"),
        ({"stream_total": 1}, "usage of the streamed"),
        ({"done": False}, "without [DONE]"),
        ({"lenient": True}, "a wrong model"),
        ({"stopped": Stopped(0, 0.1, stragglers=True)}, "left processes running"),
        ({"stopped": Stopped(1, 0.1, stragglers=False)}, "exit code 1 after SIGTERM"),
        ({"ended": 1}, "exited with code 1 before it was ready"),
    ],
)
def test_wrong_answer_fails(wrong: Any, complaint: str) -> None:
    with pytest.raises(ServerError) as caught:
        smoke.exercise(starting(replace(Behaviour(), **wrong)), TIMEOUT_S)
    assert complaint in str(caught.value)
    assert "the last words" in str(caught.value)


# -- the unpatched release ---------------------------------------------------------------


def refusing() -> Behaviour:
    return Behaviour(ended=1, said=f"{TRACEBACK}{smoke.STOCK_ERROR}. weight_key=kMxfp4Static\nbye")


def test_refusal_of_release_passes() -> None:
    for hidden in (None, starting(refusing())):
        proof = smoke.check_release(starting(refusing()), hidden, right_answers(), TIMEOUT_S)
        assert proof == ReleaseProof("refused", smoke.STOCK_ERROR)


def test_release_may_die_of_amx_tiles() -> None:
    died = Behaviour(ended=1, said="Worker proc W died unexpectedly (exit code: -4), shutting down")
    proof = smoke.check_release(starting(died), starting(died), right_answers(), TIMEOUT_S)
    assert proof.done == "refused"
    with pytest.raises(ServerError, match="but not with"):
        smoke.check_release(starting(died), None, right_answers(), TIMEOUT_S)


def test_release_that_serves_without_backend_fails() -> None:
    with pytest.raises(ServerError, match="the patch is not needed here"):
        smoke.check_release(starting(Behaviour()), None, right_answers(), TIMEOUT_S)


def test_other_failure_of_release_fails() -> None:
    broken = Behaviour(ended=1, said=f"{TRACEBACK}ImportError: libgomp")
    with pytest.raises(ServerError, match=r"(?s)but not with .*ImportError: libgomp") as caught:
        smoke.check_release(starting(broken), None, right_answers(), TIMEOUT_S)
    assert caught.value.exit_code == 10


def test_release_with_own_backend_is_compared() -> None:
    release = Behaviour(logprob=-0.55, one_token_first_kills=True)
    proof = smoke.check_release(starting(release), starting(refusing()), right_answers(), TIMEOUT_S)
    assert proof == ReleaseProof("compared", smoke.STOCK_ERROR, "amx", 0.05)
    assert sorted(release.prompts) == sorted(list(one) for one in smoke.PROMPTS)


@pytest.mark.parametrize("wrong", [{"shift": 1}, {"logprob": -0.5 - 2 * smoke.TOLERANCE}])
def test_other_answer_of_release_fails(wrong: Any) -> None:
    with pytest.raises(ServerError, match="the patched server with"):
        smoke.check_release(
            starting(replace(Behaviour(), **wrong)),
            starting(refusing()),
            right_answers(),
            TIMEOUT_S,
        )


def test_release_that_serves_without_amx_fails() -> None:
    with pytest.raises(ServerError, match="with AMX hidden"):
        smoke.check_release(
            starting(Behaviour()), starting(Behaviour()), right_answers(), TIMEOUT_S
        )
