"""The package anthropic: a loop with tools by hand, whole and streamed, and its own runner."""

import sys
from typing import Any

import anthropic

from tests.patches.clients.tools import FUNCTIONS, SCHEMAS, report, run

URL, KEY, MODEL, JOB, CUT, *MORE = sys.argv[1:]
CLIENT = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOLS = [
    {"name": name, "description": tool.__doc__, "input_schema": SCHEMAS[name]}
    for name, tool in FUNCTIONS.items()
]


def ask(messages: list[Any], *, streamed: bool, tokens: int = 1000) -> Any:
    words: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": tokens}
    words["tools"] = TOOLS
    if not streamed:
        return CLIENT.messages.create(**words)
    with CLIENT.messages.stream(**words) as stream:
        return stream.get_final_message()


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def loop(*, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": JOB}]
    while (found := ask(messages, streamed=streamed)).stop_reason == "tool_use":
        messages.append({"role": "assistant", "content": found.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": run(block.name, block.input),
            }
            for block in found.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    cut = ask([{"role": "user", "content": CUT}], streamed=streamed, tokens=20)
    report(text(found), cut.stop_reason)


def runner() -> None:
    tools = [anthropic.beta_tool(tool) for tool in FUNCTIONS.values()]

    def ask(content: str, tokens: int) -> Any:
        asked: Any = [{"role": "user", "content": content}]
        words: Any = {"model": MODEL, "max_tokens": tokens, "tools": tools}
        if MORE == ["no thread"]:
            words["thread"] = False
        return CLIENT.beta.messages.tool_runner(messages=asked, **words).until_done()

    answer = text(ask(JOB, 1000))
    report(answer, ask(CUT, 20).stop_reason)


for way in (False, True):
    loop(streamed=way)
runner()
