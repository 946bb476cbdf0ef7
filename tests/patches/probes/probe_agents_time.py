"""How long vLLM's renderer and parser take for gpt-oss, without a server.

Argument: the file for the answers (JSON): for each case the number of tokens, and the seconds of
CPU time of a quarter of it and of the whole.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from tests.patches.probes.harmony import Tokenizer, parser_class, renderer

CODE = Path(asyncio.base_events.__file__).read_text(encoding="utf-8") * 20
WHY, SAID, COMMAND = "I read the file first.", "The file is edited, and all tests pass.", "sed 1q f"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
RUN: dict[str, Any] = {"name": "run", "description": "Run a command"}
SIZES = {"small": (1200, 200), "large": (12, 40_000)}
"""Number of calls, and characters of their results: each some 95,000 tokens, or a few more."""
TURN = 6  # calls between two questions
NEXT = "<|start|>assistant<|channel|>"
THOUGHT = f"analysis<|message|>{CODE[:200]}<|end|>{NEXT}"
CALL = f'commentary to=functions.run <|constrain|>json<|message|>{{"command": "{COMMAND}"}}<|call|>'


def results(count: int, size: int) -> Iterator[tuple[int, str]]:
    return ((at, CODE[at * size % 480_000 :][:size]) for at in range(count))


def chat(count: int, size: int) -> dict[str, Any]:
    function = {"name": "run", "arguments": json.dumps({"command": COMMAND})}
    asked: list[dict[str, Any]] = []
    for at, text in results(count, size):
        if at % TURN == 0:
            asked += [{"role": "assistant", "content": SAID}, {"role": "user", "content": "Go on"}]
        call = {"id": f"c{at}", "type": "function", "function": function}
        asked.append({"role": "assistant", "reasoning": WHY, "tool_calls": [call]})
        asked.append({"role": "tool", "tool_call_id": f"c{at}", "content": text})
    return {"messages": asked, "tools": [{"type": "function", "function": RUN}]}


def responses(count: int, size: int) -> dict[str, Any]:
    call = {"type": "function_call", "name": "run", "arguments": json.dumps({"command": COMMAND})}
    content = [{"type": "reasoning_text", "text": WHY}]
    thought = {"type": "reasoning", "summary": [], "content": content}
    asked: list[dict[str, Any]] = []
    for at, text in results(count, size):
        if at % TURN == 0:
            asked += [{"role": "assistant", "content": SAID}, {"role": "user", "content": "Go on"}]
        named = {"call_id": f"c{at}"}
        asked += [{**thought, "id": f"r{at}"}, call | named]
        asked.append({"type": "function_call_output", "output": text} | named)
    return {"input": asked, "tools": [{"type": "function", **RUN}]}


def messages(count: int, size: int) -> dict[str, Any]:
    thought = {"type": "thinking", "thinking": WHY, "signature": ""}
    call = {"type": "tool_use", "name": "run", "input": {"command": COMMAND}}
    asked: list[dict[str, Any]] = []
    for at, text in results(count, size):
        result = {"type": "tool_result", "tool_use_id": f"c{at}", "content": text}
        asked.append({"role": "assistant", "content": [thought, {**call, "id": f"c{at}"}]})
        asked.append({"role": "user", "content": [result, {"type": "text", "text": "Go on"}]})
    body = {"messages": asked, "tools": [{**RUN, "input_schema": SCHEMA}]}
    return {"model": "m", "max_tokens": 1, **body}


async def chat_prompt(request: Any) -> list[int]:
    _, (given,) = await renderer(1 << 20).render_chat(request)
    found: list[int] = given["prompt_token_ids"]
    return found


async def responses_prompt(request: Any) -> list[int]:
    found: list[int] = (await renderer(1 << 20).render_responses(request)).engine_input[
        "prompt_token_ids"
    ]
    return found


async def messages_prompt(request: Any) -> list[int]:
    return await chat_prompt(AnthropicServingMessages.to_chat_completion_request(request))


async def rendered() -> dict[str, Any]:
    found = {}
    for body, kind, prompt in (
        (chat, ChatCompletionRequest, chat_prompt),
        (responses, ResponsesRequest, responses_prompt),
        (messages, AnthropicMessagesRequest, messages_prompt),
    ):
        for name, (count, size) in SIZES.items():
            seconds, tokens = [], 0
            for asked in (body(count // 4, size), body(count, size)):
                times = []
                for _ in range(3):
                    request: Any = kind.model_validate(asked)
                    began = time.process_time()
                    tokens = len(await prompt(request))
                    times.append(time.process_time() - began)
                seconds.append(min(times))
            found[f"{body.__name__}, {name}"] = [tokens, *seconds]
    return found


def parsed() -> dict[str, Any]:
    make = parser_class()
    asked = [{"role": "user", "content": "Hi"}]
    request = ChatCompletionRequest(model="m", messages=asked, stop=["nowhere in it"])

    def whole(ids: list[int]) -> None:
        assert make(Tokenizer()).parse("", request, True, ids)[0]

    def streamed(ids: list[int]) -> None:
        parser = make(Tokenizer())
        for at, token in enumerate(ids, 1):
            parser.parse_delta("", [token], request, finished=at == len(ids))

    def large(share: int) -> str:
        text = CODE[: 250_000 // share]
        head = f"<|channel|>analysis<|message|>{text}<|end|>{NEXT}"
        return f"{head}final<|message|>{text}<|return|>"

    def small(share: int) -> str:
        return (
            f"<|channel|>{f'{THOUGHT}{CALL}{NEXT}' * (1_200 // share)}final<|message|>Hi<|return|>"
        )

    found, encoding = {}, get_encoding()
    cases: list[tuple[Callable[[int], str], Callable[[list[int]], None]]]
    cases = [(large, whole), (large, streamed), (small, streamed)]
    for text, read in cases:
        seconds, ids = [], list[int]()
        for share in (4, 1):
            ids, times = encoding.encode(text(share), allowed_special="all"), []
            for _ in range(2):
                began = time.process_time()
                read(ids)
                times.append(time.process_time() - began)
            seconds.append(min(times))
        found[f"{text.__name__}, {read.__name__}"] = [len(ids), *seconds]
    return found


if __name__ == "__main__":
    get_encoding()
    answers = {"rendered": asyncio.run(rendered()), "parsed": parsed()}
    Path(sys.argv[1]).write_text(json.dumps(answers))
