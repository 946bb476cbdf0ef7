"""Ask the model a question and check its answer: status 200 alone proves nothing.

The best known fault of gpt-oss on SM 12.1 (vllm#37030) answers every chat with status 200, without
content and reasoning: an expert kernel computes wrong values, so the first Harmony token is wrong,
and the parser finds no message after it. Parallel requests showed it first. So a server with the
real weights has to do a sum before it counts as healthy, in one request and in several at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sparkforge.serving.document import Document
from sparkforge.serving.progress import PROBLEMS, Client
from sparkforge.serving.steps import CHAT

QUESTION = "What is 17 + 25?"
TOGETHER = 8
LIMIT_S = 300.0
"""For each of the two rounds. Both are short, but the first may wait for a compiler."""
_RESULT = re.compile(r"(?<!\d)42(?!\d)")
_TOKENS = 400  # reasoning of low effort takes some tens; the rest is a reserve
_SHOWN = 80


def check(client: Client, model: str, max_len: int, say: Callable[[str], None]) -> str:
    """Ask once, then several times at once; returns the problem, or "".

    Args:
        max_len: tokens of prompt and answer together.
    """
    for count in (1, TOGETHER):
        began = time.monotonic()
        with ThreadPoolExecutor(count, "answers") as pool:
            asked = [pool.submit(_ask, client, model, max_len, began) for _ in range(count)]
            wrong = [problem for future in asked if (problem := future.result())]
        if wrong:
            which = f"{len(wrong)} of {count} at once" if count > 1 else "asked alone"
            return f"{QUESTION!r}, {which}: {wrong[0]}"
        how = "asked alone" if count == 1 else f"{count} at once"
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
        answer = client.ask(began + LIMIT_S, "POST", CHAT, body)
        return judge(Document.parse(f"the answer of {CHAT}", answer))
    except TimeoutError:
        return f"no complete answer within {LIMIT_S:.0f} s"
    except PROBLEMS as error:
        return f"{type(error).__name__}: {error}"


def judge(answer: Document) -> str:
    """Return the problem with an answer to ``QUESTION``, or "".

    Raises:
        DocumentError: it has another shape than a chat's answer.
    """
    message = answer.get(dict, "choices", 0, "message")
    texts = []
    for part in ("reasoning", "content"):
        if message.get(part) is not None:
            texts.append(answer.get(str, "choices", 0, "message", part).strip())
    if not any(texts):
        return (
            "status 200 without content and reasoning: the model computes wrong tokens"
            " (known from vllm#37030; try another --moe-backend in SPARKFORGE_EXTRA_ARGS)"
        )
    if not any(_RESULT.search(text) for text in texts):
        shown = ascii(" / ".join(text for text in texts if text)[-_SHOWN:])
        return f"42 is not in the answer, which ends with {shown}: the model computes wrong tokens"
    return ""
