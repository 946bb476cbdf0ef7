"""The package openai: loops with tools by hand, as its guides have them."""

import sys
from typing import Any

import openai

from tests.patches.clients.tools import FUNCTIONS, SCHEMAS, report, run

URL, KEY, MODEL, JOB, CUT = sys.argv[1:]
CLIENT = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
FLAT = [
    {"type": "function", "name": name, "description": tool.__doc__, "parameters": SCHEMAS[name]}
    for name, tool in FUNCTIONS.items()
]
NESTED = [
    {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
    for tool in FLAT
]


def chat(*, streamed: bool) -> None:
    """Chat completions."""

    def ask(messages: list[Any], **options: Any) -> Any:
        words = {"model": MODEL, "messages": messages, "tools": NESTED, **options}
        if not streamed:
            return CLIENT.chat.completions.create(**words).choices[0]
        with CLIENT.chat.completions.stream(**words) as stream:
            return stream.get_final_completion().choices[0]

    messages: list[Any] = [{"role": "user", "content": JOB}]
    while (choice := ask(messages)).finish_reason == "tool_calls":
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            said = run(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    try:
        cut = ask([{"role": "user", "content": CUT}], max_completion_tokens=20).finish_reason
    except openai.LengthFinishReasonError as error:  # how this package's streams say it
        cut = error.completion.choices[0].finish_reason
    report(choice.message.content, cut)


def responses(*, streamed: bool) -> None:
    """Responses, with the whole conversation in each request."""

    def ask(asked: list[Any], **options: Any) -> Any:
        words = {"model": MODEL, "input": asked, "tools": FLAT, "store": False, **options}
        if not streamed:
            return CLIENT.responses.create(**words)
        with CLIENT.responses.stream(**words) as stream:
            events = list(stream)
        return events[-1].response

    asked: list[Any] = [{"role": "user", "content": JOB}]
    while True:
        found = ask(asked)
        calls = [one for one in found.output if one.type == "function_call"]
        if not calls:
            break
        asked += found.output
        asked += [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": run(call.name, call.arguments),
            }
            for call in calls
        ]
    cut = ask([{"role": "user", "content": CUT}], max_output_tokens=20)
    report(found.output_text, [cut.status, cut.incomplete_details.reason])


for loop in (chat, responses):
    for way in (False, True):
        loop(streamed=way)
