"""The requests of a warm-up: together they use every kernel that serving uses.

Kernels depend on the number of tokens and sequences in a step of the engine, and on the sampling
options. Compilers specialise on 1 and on multiples of 16, so the lengths include those and their
neighbours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkforge.serving import arguments

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

_LENGTHS = (1, 2, 15, 16, 17, 64, 100, 128, 250, 256, 512, 1000, 1024, 2048, 4096)
_BATCHES = (1, 2, 3, 4, 8, 16, 17)
_TOKENS = 4  # of an answer: the first comes of the prompt's step, the others of decoding
_BATCH_TOKENS = 16  # long enough that all sequences of a batch are decoded together
_FIRST, _IDS = 32, 64  # token ids that any vocabulary has

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
_AFTER_REASONING = "<|start|>assistant<|channel|>final<|message|>"  # gpt-oss' own words


@dataclass(frozen=True)
class Request:
    """One request of the OpenAI API, without the model's name.

    Without a ``cache_salt`` of its own it gets a new one, and misses the prefix cache.
    """

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """Requests that are sent together; the log and the record have the name."""

    name: str
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Shape:
    """Limits of a server, from its command."""

    max_len: int
    """Tokens of prompt and answer together."""
    chunk: int
    """Most tokens of a prompt that one step of the engine takes."""
    max_seqs: int
    """Most sequences of one step."""
    captured: tuple[int, ...] = ()
    """Batch sizes with a CUDA graph."""

    @classmethod
    def of(cls, command: Sequence[str], captured: tuple[int, ...]) -> Shape:
        """Return the shape that a command gives.

        Without ``--max-num-batched-tokens`` vLLM uses 2048 to 16384, depending on the device. The
        server itself reports ``max_len`` later.
        """
        return cls(
            max_len=arguments.positive(command, "--max-model-len", 4096),
            chunk=arguments.positive(command, "--max-num-batched-tokens", 8192),
            max_seqs=arguments.positive(command, "--max-num-seqs", 64),
            captured=captured,
        )

    def lengths(self, more: Sequence[int] = ()) -> list[int]:
        """Return the lengths of prompts to try, ascending."""
        around = (self.chunk - 1, self.chunk, self.chunk + 1, 2 * self.chunk + 17)
        most = max(1, self.max_len - _TOKENS)
        wanted = {min(length, most) for length in (*_LENGTHS, *around, *more)}
        return sorted(length for length in wanted if length > 0)

    def batches(self) -> list[int]:
        """Return the numbers of sequences at once to try, ascending."""
        wanted = {*_BATCHES, *self.captured, self.max_seqs}
        return sorted(size for size in wanted if size <= self.max_seqs)


def full(shape: Shape, more: Sequence[int] = ()) -> list[Step]:
    """Return all steps.

    Args:
        more: further lengths of prompts, from the record.
    """
    length = max(1, min(200, shape.max_len - _TOKENS))
    begun = (_prompt(length, 0, cache_salt="a beginning of the warm-up"),)
    return [
        *_kinds(shape),
        *(Step(f"prompt of {n} tokens", (_prompt(n, n),)) for n in shape.lengths(more)),
        Step("a beginning", begun),
        Step("the same beginning again", begun),
        *(_batch(shape, n) for n in shape.batches()),
        _mixture(shape),
    ]


def quick(shape: Shape, more: Sequence[int] = ()) -> list[Step]:
    """Return the steps for a server with filled caches: the work that every process does once."""
    lengths = shape.lengths()
    chosen = sorted({lengths[0], lengths[-1], *(n for n in shape.lengths(more) if n in more)})
    return [
        *_kinds(shape),
        *(Step(f"prompt of {n} tokens", (_prompt(n, n),)) for n in chosen),
        *(_batch(shape, n) for n in sorted({shape.batches()[0], shape.batches()[-1]})),
        _mixture(shape),
    ]


def digest(shape: Shape) -> str:
    """Return a digest of a shape's warm-up, which differs between releases."""
    text = json.dumps([[s.name, [r.body for r in s.requests]] for s in full(shape)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _prompt(length: int, variant: int, tokens: int = _TOKENS, **options: Any) -> Request:
    """A prompt of that many tokens, greedy by default; the variant makes its words."""
    ids = [_FIRST + (variant + index * (1 + variant % 7)) % _IDS for index in range(length)]
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **options}
    return Request(COMPLETIONS, body)


def _batch(shape: Shape, size: int) -> Step:
    length = max(1, min(24, shape.max_len - _BATCH_TOKENS))
    tokens = min(_BATCH_TOKENS, shape.max_len - length)
    return Step(
        f"{size} at once", tuple(_prompt(length, variant, tokens) for variant in range(size))
    )


def _mixture(shape: Shape) -> Step:
    """Return all kinds of sampling in one batch, with a long prompt."""
    kinds = [request for step in _kinds(shape) for request in step.requests]
    long = _prompt(max(1, min(2 * shape.chunk, shape.max_len - _TOKENS)), 5)
    return Step("all kinds at once", (*kinds, long))


def _kinds(shape: Shape) -> list[Step]:
    """Return a step for each way to sample and each endpoint."""
    # if the first request were refused for its length, its endpoint would count as unused
    tokens = max(1, min(8, shape.max_len // 2))
    length = max(1, min(20, shape.max_len - tokens))
    sampling: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"temperature": 0.7},
        "top-p": {"temperature": 1, "top_p": 0.9},
        "top-k": {"temperature": 1, "top_k": 20},
        "top-k and top-p": {"temperature": 1, "top_k": 20, "top_p": 0.9},
        "min-p": {"temperature": 1, "min_p": 0.05},
        "seed": {"temperature": 1, "seed": 7},
        "logprobs": {"logprobs": 5},
        "logprobs of sampled tokens": {"temperature": 1, "top_p": 0.9, "logprobs": 1},
        "logprobs of the prompt": {"prompt_logprobs": 1},
        "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        "bias": {"logit_bias": {"40": 2}, "min_tokens": 2, "stop": ["\x00"]},
        "bad words": {"bad_words": ["bad"]},
        "two answers": {"temperature": 1, "n": 2},
        "streamed": {"stream": True},
        "JSON schema": {"structured_outputs": {"json": _SCHEMA}},
        "regular expression": {"structured_outputs": {"regex": "[a-f]{2,9}"}},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
        "JSON schema after reasoning": {
            "prompt": _AFTER_REASONING,
            "structured_outputs": {"json": _SCHEMA},
        },
    }
    steps = [
        Step(name, (_prompt(length, variant, tokens, **options),))
        for variant, (name, options) in enumerate(sampling.items(), start=1)
    ]
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    chats: dict[str, dict[str, Any]] = {
        "chat": {"temperature": 0},
        "chat with a JSON schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "ab", "schema": _SCHEMA},
            }
        },
        "chat with logprobs": {"logprobs": True, "top_logprobs": 3},
        "chat with tools": {"tools": _TOOLS, "tool_choice": "auto"},
        "chat with a tool that must be called": {"tools": _TOOLS, "tool_choice": "required"},
        "chat with reasoning, streamed": {"reasoning_effort": "low", "stream": True},
    }
    steps += [
        Step(name, (Request(CHAT, {"messages": messages, "max_tokens": 16, **options}),))
        for name, options in chats.items()
    ]
    answer = {"input": messages[0]["content"], "max_output_tokens": 16}
    return [*steps, Step("responses", (Request(RESPONSES, answer),))]
