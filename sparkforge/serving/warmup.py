"""The warm-up: requests that compile kernels before the server counts as healthy, and a question.

Kernels depend on the number of tokens and sequences in a step of the engine, and on the sampling
options. A dozen fixed requests use those that users need most. Another combination of options may
still wait for a compiler, once for a build.

Status 200 alone proves nothing. The best known fault of gpt-oss on SM 12.1 (vllm#37030) answers
every chat with status 200, without content and reasoning: an expert kernel computes wrong values,
so the first Harmony token is wrong, and the parser finds no message after it. Parallel requests
showed it first. So a server with the real weights has to do a sum, in one request and in several at
once.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparkforge.serving import arguments
from sparkforge.serving.errors import say
from sparkforge.serving.progress import PROBLEMS, Client, StatusError

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LIMIT_S = 900.0
"""For all requests together; the rest is skipped."""
ANSWER_S = 300.0
"""For each round of the question."""
QUESTION = "What is 17 + 25?"
TOGETHER = 8
_RESULT = re.compile(r"(?<!\d)42(?!\d)")
_TOKENS = 400  # reasoning of low effort takes some tens; the rest is a reserve
_ASK_S = 5.0
_DEATH_S = 5.0  # a server ends within this time after its engine, and logs the reason

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
}
_TOOL = {"name": "weather", "description": "Weather of a city", "parameters": _SCHEMA}
_CHATS: Mapping[str, Mapping[str, Any]] = {
    "chat": {"temperature": 0},
    "chat with tools": {"tools": [{"type": "function", "function": _TOOL}]},
    "chat with a JSON schema, streamed": {
        "stream": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "ab", "schema": _SCHEMA},
        },
    },
}
_SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "sampling": {"temperature": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 7},
    "log-probabilities": {"logprobs": 5, "prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"40": 2}},
    "JSON schema": {"structured_outputs": {"json": _SCHEMA}},
}


_FAILED = re.compile(rb'^data: (\{"error".*\})', re.MULTILINE)
"""An error in a stream, whose status is 200 by then."""


@dataclass(frozen=True)
class Request:
    """Some requests at once, without the model's name."""

    name: str
    path: str
    body: Mapping[str, Any]
    count: int = 1


def requests(max_len: int, chunk: int, max_seqs: int) -> list[Request]:
    """Return all requests.

    Args:
        max_len: tokens of prompt and answer together.
        chunk: most tokens of a prompt that one step of the engine takes.
        max_seqs: most sequences of one step.
    """

    def prompt(name: str, length: int, count: int = 1, **options: Any) -> Request:
        ids = [32 + index % 64 for index in range(max(1, min(length, max_len - 8)))]
        body = {"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
        return Request(name, COMPLETIONS, body, count)

    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = {"input": "What is the weather in Paris?", "max_output_tokens": 16}
    return [
        prompt("prompt of 1 token", 1),
        prompt("prompt of 17 tokens", 17),
        prompt("prompt of two steps", 2 * chunk + 17),
        prompt("8 at once", 24, min(8, max_seqs)),
        prompt("all at once", 24, max_seqs),
        *(prompt(name, 20, **options) for name, options in _SAMPLING.items()),
        *(
            Request(name, CHAT, {"messages": messages, "max_tokens": 16, **options})
            for name, options in _CHATS.items()
        ),
        Request("responses", RESPONSES, answer),
    ]


def run(
    client: Client, command: Sequence[str], *, answers: bool, tell: Callable[[str], None]
) -> str:
    """Send the requests to a server that has answered once; returns the problem, or "".

    A request that the server refuses (status 4xx) is one that users cannot make either, and is only
    logged.

    Args:
        command: of the server, for its limits.
        answers: the model has to answer a question at the end, outside of ``LIMIT_S``.
        tell: passes progress to the health check.
    """
    began = time.monotonic()
    try:
        model, longest = client.model(began + _ASK_S)
        max_len = longest or arguments.positive(command, "--max-model-len", 4096)
        todo = requests(
            max_len,
            arguments.positive(command, "--max-num-batched-tokens", 8192),
            arguments.positive(command, "--max-num-seqs", 64),
        )
        for number, request in enumerate(todo, start=1):
            note = f"warm-up {number}/{len(todo)}: {request.name}"
            tell(note)
            at = time.monotonic()
            refused = ""
            try:
                _send(client, request, model, began + LIMIT_S)
            except StatusError as error:
                if error.status // 100 != 4:
                    return f"{request.name}: {error}"
                refused = f"; refused: {error}"
            except TimeoutError:
                say(f"warning: warm-up: its {LIMIT_S:.0f} s are over in {request.name}")
                break
            say(f"{note}: {time.monotonic() - at:.1f} s{refused}")
        say(f"warm-up: {len(todo)} requests in {time.monotonic() - began:.0f} s")
        if answers:
            tell("warm-up: a question to the model")
            return check(client, model, max_len)
    except PROBLEMS as error:
        time.sleep(_DEATH_S)
        return f"{type(error).__name__}: {error}"
    return ""


def _send(client: Client, request: Request, model: str, end: float) -> None:
    """Send a request, several times at once where it says so; raises the first failure."""

    def one(number: int) -> None:
        # a new salt, or the prefix cache would shorten the prompt
        salt = f"warm-up {time.monotonic_ns()} {number}"
        body = {"cache_salt": salt, **request.body, "model": model}
        answer = client.ask(end, "POST", request.path, body)
        if body.get("stream") and (found := _FAILED.search(answer)):
            error = json.loads(found[1])["error"]
            raise StatusError(int(error.get("code") or 500), str(error.get("message"))[:200])

    with ThreadPoolExecutor(request.count, "warm-up") as pool:
        for _ in pool.map(one, range(request.count)):
            pass


# -- a question to the model -----------------------------------------------------------------------


def check(client: Client, model: str, max_len: int) -> str:
    """Ask once, then several times at once; returns the problem, or "".

    Args:
        max_len: tokens of prompt and answer together.
    """
    for count in (1, TOGETHER):
        began = time.monotonic()
        with ThreadPoolExecutor(count, "answers") as pool:
            asked = [pool.submit(_ask, client, model, max_len, began) for _ in range(count)]
            wrong = [problem for future in asked if (problem := future.result())]
        how = "asked alone" if count == 1 else f"{count} at once"
        if wrong:
            return f"{QUESTION!r}, {how}: {wrong[0]}"
        say(f"{QUESTION!r}, {how}: correct answer, {time.monotonic() - began:.1f} s")
    return ""


def _ask(client: Client, model: str, max_len: int, began: float) -> str:
    """Return the problem with one answer, or ""."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "reasoning_effort": "low",
        "max_tokens": min(_TOKENS, max(1, max_len // 2)),
        # so that each request computes its prompt
        "cache_salt": f"answers {time.monotonic_ns()}",
    }
    try:
        return judge(json.loads(client.ask(began + ANSWER_S, "POST", CHAT, body)))
    except PROBLEMS as error:
        return f"{type(error).__name__}: {error}"


def judge(answer: Mapping[str, Any]) -> str:
    """Return the problem with a chat's answer to ``QUESTION``, or "".

    Raises:
        LookupError, TypeError: it has another shape.
    """
    message = answer["choices"][0]["message"]
    texts = [str(message.get(part) or "").strip() for part in ("reasoning", "content")]
    if not any(texts):
        return (
            "status 200 without content and reasoning: the model computes wrong tokens"
            " (known from vllm#37030; try another --moe-backend in SPARKFORGE_EXTRA_ARGS)"
        )
    if not any(_RESULT.search(text) for text in texts):
        shown = ascii(" / ".join(text for text in texts if text)[-80:])
        return f"42 is not in the answer, which ends with {shown}: the model computes wrong tokens"
    return ""
