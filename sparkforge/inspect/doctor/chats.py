"""Chats for a report: answers and speed of the server, alone and eight at once.

The best known fault on a Spark is an answer with status 200 and without content, first seen with
parallel requests (vllm#37030). So there are ten questions one at a time, then eight at once, one
with a tool, and one with a long prompt. With temperature 0 reports can be compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkforge.core import plain
from sparkforge.core.log import log

if TYPE_CHECKING:
    import requests

TOGETHER = 8
LONG_TOKENS = 100_000
"""Tokens of the long prompt, if the server accepts so many."""
_CONNECT_S = 5.0
_SILENCE_S = 600.0  # the first token of a long prompt, or of a kernel that is compiled
_MOST_TOKENS = 256
_QUESTIONS = (
    "What is 17 + 25?",
    "Name the planets of the solar system in order.",
    "Write a haiku about rain.",
    "Which is larger: 9.11 or 9.9?",
    "Translate into French: The weather is fine today.",
    "What does the Python expression sorted('bca')[0] give?",
    "Who wrote Faust?",
    "List three prime numbers above 100.",
    "Explain in two sentences what a hash is.",
    "Spell 'reproducible' backwards.",
)
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_SECRET_LINE, _SECRET = 1234, "kingfisher"


@dataclass(frozen=True)
class Place:
    """Where the server is.

    Attributes:
        url: with ``/v1`` at its end.
        key: API key, or "".
    """

    url: str
    key: str = ""


@dataclass(frozen=True)
class Chat:
    """One answer.

    Attributes:
        kind: ``alone``, ``eight at once``, ``tool`` or ``long``.
        seconds: until its end.
        first_s: until the first token, or None.
        prompt_tokens, tokens: counted by the server.
        tokens_per_s: after the first token; None: too few.
        problem: or "".
    """

    kind: str
    question: str
    seconds: float
    first_s: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    reasoning: str = ""
    content: str = ""
    tool_calls: str = ""
    finish: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Model:
    """The served model: its name, and tokens of prompt and answer together."""

    name: str
    max_len: int


def model_of(place: Place) -> Model:
    """Return the model that a server serves.

    Raises:
        ConnectionError: nothing answers there.
        OSError: the answer is an error.
        ValueError: its answer is no list of models.
    """
    import requests

    with _session(place) as session:
        try:
            answer = session.get(f"{place.url}/models", timeout=_CONNECT_S)
        except requests.ConnectionError as error:
            raise ConnectionError(str(error)) from None
    answer.raise_for_status()
    found = plain.json_of(answer.text)
    try:
        first = found["data"][0]
        return Model(str(first["id"]), int(first.get("max_model_len") or 4096))
    except (TypeError, KeyError, IndexError, ValueError):
        raise ValueError("the answer of /v1/models names no model") from None


def ask_all(place: Place, model: Model) -> Iterator[Chat]:
    """Send all requests in order; a failure is an answer with a problem."""
    log.info(f"{len(_QUESTIONS)} chats, one at a time")
    for question in _QUESTIONS:
        yield _ask(place, "alone", question, _body(model, question))
    log.info(f"{TOGETHER} chats at once")
    with ThreadPoolExecutor(TOGETHER) as pool:
        # not sent before all threads exist, or the first would be alone
        works = [
            pool.submit(_ask, place, "eight at once", question, _body(model, question))
            for question in _QUESTIONS[:TOGETHER]
        ]
        for work in works:
            yield work.result()
    question = "What is the weather in Oslo? Use the tool."
    log.info("a tool call")
    yield _ask(place, "tool", question, {**_body(model, question), "tools": [_TOOL]})
    question = long_question(min(LONG_TOKENS, model.max_len - 2 * _MOST_TOKENS))
    log.info("a long prompt: this can take minutes")
    yield _ask(place, "long", question, _body(model, question))


def long_question(tokens: int) -> str:
    """Return a question about one line of a long text.

    Args:
        tokens: of the text, at most; a line of it has about 14 (counted with o200k's vocabulary).
    """
    count = max(tokens // 16, 1)
    at = min(_SECRET_LINE, count // 2)
    lines = [
        f"Line {number}: the word is {_SECRET if number == at else 'heron'}, and nothing else."
        for number in range(count)
    ]
    return "\n".join([*lines, f"Which word is on line {at}? Answer with the word alone."])


def _session(place: Place) -> requests.Session:
    import requests  # 0.5 s, for which no other doctor has a use

    session = requests.Session()
    session.trust_env = False  # a proxy has no way to this machine's own server
    if place.key:
        session.headers["Authorization"] = f"Bearer {place.key}"
    return session


def _body(model: Model, question: str) -> dict[str, Any]:
    return {
        "model": model.name,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": min(_MOST_TOKENS, max(1, model.max_len // 2)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _ask(place: Place, kind: str, question: str, body: Mapping[str, Any]) -> Chat:
    began = time.monotonic()
    parts: dict[str, list[str]] = {"reasoning": [], "content": [], "tool_calls": []}
    finish = problem = ""
    usage: Mapping[str, Any] = {}
    times: list[float] = []
    try:
        with (
            _session(place) as session,
            session.post(
                f"{place.url}/chat/completions",
                json=body,
                stream=True,
                timeout=(_CONNECT_S, _SILENCE_S),
            ) as answer,
        ):
            if answer.status_code != 200:
                problem = f"status {answer.status_code}: {answer.text[:300]}"
            for event in _events(answer) if not problem else ():
                usage = event.get("usage") or usage
                for choice in event.get("choices") or []:
                    finish = choice.get("finish_reason") or finish
                    if _take(choice.get("delta") or {}, parts):
                        times.append(time.monotonic())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    text = {name: "".join(found) for name, found in parts.items()}
    if not problem and not any(text.values()):
        problem = "status 200, and neither content nor reasoning nor a tool call"
    tokens = int(usage.get("completion_tokens") or 0)
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    return Chat(
        kind=kind,
        question=question if len(question) < 300 else f"… {question[-100:]}",
        seconds=round(time.monotonic() - began, 3),
        first_s=round(times[0] - began, 3) if times else None,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        tokens=tokens,
        tokens_per_s=round((tokens - 1) / span, 2) if span and tokens > 1 else None,
        finish=finish,
        problem=problem,
        **text,
    )


def _take(delta: Mapping[str, Any], parts: Mapping[str, list[str]]) -> bool:
    """Add a piece of an answer; returns whether there was any."""
    pieces = {
        # two names for it: vLLM's releases changed from one to the other
        "reasoning": delta.get("reasoning") or delta.get("reasoning_content") or "",
        "content": delta.get("content") or "",
        "tool_calls": json.dumps(calls) if (calls := delta.get("tool_calls")) else "",
    }
    for name, piece in pieces.items():
        parts[name].append(str(piece))
    return any(pieces.values())


def _events(answer: requests.Response) -> Iterator[dict[str, Any]]:
    """Read the events of a streamed answer, up to its end."""
    for line in answer.iter_lines():
        name, _, data = line.decode(errors="replace").partition(":")
        if name != "data" or data.strip() == "[DONE]":
            continue
        event = plain.json_of(data)
        if isinstance(event, dict):
            yield event
