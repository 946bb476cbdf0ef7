"""Requests before users are served: a small model with known answers, then the warm-up.

The small checkpoint and its expected answers are of ``sparkforge/checkpoints/tiny.py``. The best
known fault of gpt-oss on SM 12.1 (vllm#37030) answers every chat with status 200 and nothing else,
first seen with parallel requests: so the real model has to do a sum.
"""

import hashlib
import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sparkforge.serving import health, options
from sparkforge.serving.health import Client, StatusError
from sparkforge.serving.options import StartError, say

REFERENCE = "reference.json"
NAME = "preflight"  # of the model, its folder in the image and the build, and of a pass' mark
# Limits of the log-probabilities' distance from the reference in nats: of the median, of 19 in 20.
# Rounding to BF16 gives 0.02 and 0.06; wrong models of the unit tests 0.4 and more for the second.
MEDIAN, MOST = 0.1, 0.3
LEAD = 1.0  # nats. A token with a larger lead has to be the next one
# these determine the kernels; the small model needs other values of the rest
_CARRIED = (
    *("--decode-kernels", "--moe-backend", "--attention-backend", "--kv-cache-dtype"),
    *("--load-format", "--linear-backend", "--failed-kernels"),
)
_OWN = (
    *("--served-model-name", NAME, "--enforce-eager", "--max-model-len", "512"),
    # not the real model's share: this server ends soon
    *("--max-num-seqs", "4", "--gpu-memory-utilization", "0.05"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
)
_LIMIT_S = 600.0  # for each answer: FlashInfer and Triton may compile for it


def small_options(words: Sequence[str]) -> list[str]:
    """Return the small model's options of ``vllm serve``, by those of the real one."""
    carried = [(option, options.value(words, option)) for option in _CARRIED]
    return [*(word for option, given in carried if given for word in (option, given)), *_OWN]


def key(model: Path, words: Sequence[str], driver: str) -> str:
    """Return a digest of what a pass depends on beside build and device."""
    if not (model / REFERENCE).exists():
        raise StartError("this image has no checkpoint for SPARKFORGE_CHECKS=preflight=always")
    reference = hashlib.sha256((model / REFERENCE).read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([driver, *words, reference]).encode()).hexdigest()


def run(client: Client, model: Path) -> str:
    """Compare the answers of a server that has answered once; returns the problem, or ""."""
    distances: list[float] = []
    asked = {"model": NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked |= {"logprobs": 1, "prompt_logprobs": 1}
    for expected in json.loads((model / REFERENCE).read_bytes())["answers"]:
        body = {**asked, "prompt": expected["tokens"], "max_tokens": len(expected["next"])}
        answer = client.ask(time.monotonic() + _LIMIT_S, "POST", COMPLETIONS, body)
        found, problem = compare(expected, json.loads(answer))
        if problem:
            return problem
        distances += found
    return judge(distances)


def compare(expected: Mapping[str, Any], answer: Mapping[str, Any]) -> tuple[list[float], str]:
    """Return the distances of one answer's log-probabilities in nats, and a wrong token, or ""."""
    found, tokens, distances = answer["choices"][0], expected["tokens"], []
    for index, reference in enumerate(expected["prompt"], start=1):
        actual = float(found["prompt_logprobs"][index][str(tokens[index])]["logprob"])
        distances.append(abs(actual - reference))
    for index, wanted in enumerate(expected["next"]):
        if found["token_ids"][index] != wanted["token"]:
            if wanted["lead"] > LEAD:
                return distances, f"token {index + 1} after {len(tokens)} differs"
            break  # rounding may decide a close race; the rest is another text
        actual = float(found["logprobs"]["token_logprobs"][index])
        distances.append(abs(actual - wanted["logprob"]))
    return distances, ""


def judge(distances: Sequence[float]) -> str:
    """Return the problem with the distances of all answers, in nats, or ""."""
    ordered = sorted(value if math.isfinite(value) else math.inf for value in distances)
    middle, most = statistics.median(ordered), ordered[len(ordered) * 19 // 20]
    text = f"log-probabilities {middle:.2f} nats from the reference in the median, 19 of 20 within"
    say(f"preflight: {text} {most:.2f}")
    within = middle <= MEDIAN and most <= MOST
    return "" if within else f"{text} {most:.2f}; the limits are {MEDIAN} and {MOST}"


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LIMIT_S = 900.0  # for all requests together; the rest is skipped
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
}
_TOOL = {"name": "weather", "description": "Weather of a city", "parameters": _SCHEMA}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "ab", "schema": _SCHEMA}}
_WEATHER = "What is the weather in Paris?"

Request = tuple[str, str, Mapping[str, Any], int]  # name, path, body but the model, and count


def requests(max_len: int, chunk: int, max_seqs: int) -> list[Request]:
    """Return all requests."""

    def prompt(name: str, length: int, count: int = 1, **more: Any) -> Request:
        ids = [32 + index % 64 for index in range(max(1, min(length, max_len - 8)))]
        body = {"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        return name, COMPLETIONS, body, count

    def chat(name: str, **more: Any) -> Request:
        messages = [{"role": "user", "content": _WEATHER}]
        return name, CHAT, {"messages": messages, "max_tokens": 16, **more}, 1

    penalties: dict[str, Any] = {
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"40": 2},
    }
    return [
        prompt("prompt of 1 token", 1),
        prompt("prompt of 17 tokens", 17),
        prompt("prompt of two steps", 2 * chunk + 17),
        prompt("8 at once", 24, min(8, max_seqs)),
        prompt("all at once", 24, max_seqs),
        prompt("sampling", 20, temperature=1, top_k=20, top_p=0.9, min_p=0.05, seed=7),
        prompt("log-probabilities", 20, logprobs=5, prompt_logprobs=1),
        prompt("penalties", 20, **penalties),
        prompt("JSON schema", 20, structured_outputs={"json": _SCHEMA}),
        chat("chat", temperature=0),
        chat("chat with tools", tools=[{"type": "function", "function": _TOOL}]),
        chat("chat with a JSON schema, streamed", stream=True, response_format=_FORMAT),
        ("responses", RESPONSES, {"input": _WEATHER, "max_output_tokens": 16}, 1),
    ]


def warm_up(client: Client, command: Sequence[str], *, answers: bool) -> str:
    """Send the requests to a server that has answered once; returns the problem, or "".

    What the server refuses (status 4xx) users cannot ask either: it is only logged.
    """
    began = time.monotonic()
    model, longest = client.model(began + 5)
    max_len = longest or options.positive(command, "--max-model-len", 4096)
    chunk = options.positive(command, "--max-num-batched-tokens", 8192)
    todo = requests(max_len, chunk, options.positive(command, "--max-num-seqs", 64))
    for number, (name, path, body, count) in enumerate(todo, start=1):
        note, at, refused = f"warm-up {number}/{len(todo)}: {name}", time.monotonic(), ""
        health.tell(note)
        try:
            _send(client, path, {**body, "model": model}, count, began + LIMIT_S)
        except StatusError as error:
            if error.status // 100 != 4:
                return f"{name}: {error}"
            refused = f"; refused: {error}"
        except TimeoutError:
            say(f"warning: warm-up: its {LIMIT_S:.0f} s are over in {name}")
            break
        say(f"{note}: {time.monotonic() - at:.1f} s{refused}")
    say(f"warm-up: {len(todo)} requests in {time.monotonic() - began:.0f} s")
    return question(client, model, max_len) if answers else ""


def _send(
    client: Client, path: str, body: Mapping[str, Any], count: int, end: float
) -> list[bytes]:
    """Send a request, several times at once; returns the answers, or raises the first failure."""

    def one(number: int) -> bytes:
        # a new salt, or the prefix cache would shorten the prompt
        salt = f"warm-up {time.monotonic_ns()} {number}"
        return client.ask(end, "POST", path, {"cache_salt": salt, **body})

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


QUESTION, TOGETHER = "What is 17 + 25?", 8
ANSWER_S = 300.0  # for each round of the question


def question(client: Client, model: str, max_len: int) -> str:
    """Ask once, then several times at once; returns the problem, or ""."""
    health.tell("warm-up: a question to the model")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "reasoning_effort": "low",
        # reasoning of low effort takes some tens; the rest is a reserve
        "max_tokens": min(400, max(1, max_len // 2)),
    }
    for count in (1, TOGETHER):
        began, how = time.monotonic(), "asked alone" if count == 1 else f"{count} at once"
        for answer in _send(client, CHAT, body, count, began + ANSWER_S):
            message = json.loads(answer)["choices"][0]["message"]
            text = f"{message.get('reasoning') or ''} {message.get('content') or ''}".strip()
            if not re.search(r"(?<!\d)42(?!\d)", text):
                what = f"no 42 in the answer, which ends with {text[-80:]!a}"
                what = what if text else "status 200 without content and reasoning"
                hint = "try another --moe-backend in SPARKFORGE_EXTRA_ARGS (vllm#37030)"
                return f"{QUESTION!r}, {how}: {what}: the model computes wrong tokens; {hint}"
        say(f"{QUESTION!r}, {how}: correct answer, {time.monotonic() - began:.1f} s")
    return ""
