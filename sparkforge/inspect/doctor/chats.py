"""Chats for a report: answers and speed of the server, alone and eight at once.

The best known fault on a Spark is an answer with status 200 and without content, first seen with
parallel requests (vllm#37030). So there are ten questions one at a time, then eight at once, one
with a tool, and one with a long prompt. With temperature 0 reports can be compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from threading import Event
from typing import Any

from sparkforge.core.log import log
from sparkforge.core.parallel import in_parallel
from sparkforge.runtime import client
from sparkforge.runtime.client import Model, Place, Said

TOGETHER = 8
LONG_TOKENS = 100_000
"""Tokens of the long prompt, if the server accepts that many."""
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
class Chat:
    """One answer."""

    kind: str
    """``alone``, ``eight at once``, ``tool`` or ``long``."""
    question: str
    seconds: float
    """Until its end."""
    first_s: float | None = None
    """Until the first token, or None."""
    prompt_tokens: int = 0
    tokens: int = 0
    """``prompt_tokens``, ``tokens``: counted by the server."""
    tokens_per_s: float | None = None
    """After the first token; None: too few."""
    reasoning: str = ""
    content: str = ""
    tool_calls: str = ""
    finish: str = ""
    problem: str = ""
    """Or ""."""


def ask_all(place: Place, model: Model) -> Iterator[Chat]:
    """Send all requests in order; a failure is a Chat with a problem."""
    log.info(f"{len(_QUESTIONS)} chats, one at a time")
    for question in _QUESTIONS:
        yield _ask(place, "alone", question, _body(model, question))
    log.info(f"{TOGETHER} chats at once")

    def ask(question: str, _stopping: Event) -> Chat:
        return _ask(place, "eight at once", question, _body(model, question))

    yield from in_parallel(ask, _QUESTIONS[:TOGETHER], TOGETHER)
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


def _body(model: Model, question: str) -> dict[str, Any]:
    return {
        "model": model.name,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": min(_MOST_TOKENS, max(1, model.max_len // 2)),
    }


def _ask(place: Place, kind: str, question: str, body: Mapping[str, Any]) -> Chat:
    began = time.monotonic()
    said, problem = Said(), ""
    try:
        said = client.streamed(place, body)
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    if not problem and said.empty:
        problem = "status 200, and neither content nor reasoning nor a tool call"
    times = said.moments
    span = times[-1] - times[0] if times else 0.0
    return Chat(
        kind=kind,
        question=question if len(question) < 300 else f"… {question[-100:]}",
        seconds=round(time.monotonic() - began, 3),
        first_s=round(times[0], 3) if times else None,
        prompt_tokens=said.prompt_tokens,
        tokens=said.tokens,
        tokens_per_s=round((said.tokens - 1) / span, 2) if span and said.tokens > 1 else None,
        reasoning=said.reasoning,
        content=said.content,
        tool_calls=json.dumps([asdict(call) for call in said.calls]) if said.calls else "",
        finish=said.finish,
        problem=problem,
    )
