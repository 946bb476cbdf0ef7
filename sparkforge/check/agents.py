"""Checks of accept for agents: cut answers, stop strings, tools, parts and options.

They judge the shape of an answer, so that any words of the model will do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkforge.check.subject import FUNCTION, TOKENS, TOOLS, WEATHER, Subject, need
from sparkforge.runtime import client

_RESPONSES, _MESSAGES = "/responses", "/messages"
_ASKED = "Greet me in one sentence."
_IMAGE = "data:image/png;base64,AAAA"
_SERVED = "the image has none of our patches, or a proxy in front changes answers (docs/clients.md)"
_CLOCK = {"type": "function", "function": {**FUNCTION, "name": "clock", "description": "Time"}}
_ITEM = {"type": "function", **FUNCTION}  # a tool of /v1/responses
_CODEX: Sequence[client.Json] = [
    _ITEM,
    {"type": "custom", "name": "apply_patch", "description": "Edits files"},
    {"type": "namespace", "name": "mcp", "description": "", "tools": [{**_ITEM, "name": "read"}]},
    {"type": "web_search"},
]


def cut_chat(subject: Subject) -> str:
    """Cut at any token a chat says `length`, and has no token of Harmony."""
    usage = client.post(subject.place, client.CHAT, subject.body(_ASKED)).json()["usage"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    # the frame of the reasoning has three tokens before it, that of the answer six after it
    ends = [*range(1, 5), *range(thought + 3, thought + 10)]
    ends = [end for end in ends if end < usage["completion_tokens"]]
    for at, end in enumerate(ends):
        said = subject.chat(_ASKED, max_tokens=end, stream=at % 2 == 1)
        need("<|" not in said.reasoning + said.content, "no token of Harmony", said.content)
        need(said.finish == "length", f"finish_reason length after {end} tokens", said.finish)
    return f"{len(ends)} cuts"


def cut_call(subject: Subject) -> str:
    """A call that is cut says `length`, and `response.incomplete`."""
    whole = subject.chat([WEATHER], tools=TOOLS)
    for stream in (False, True):
        end = max(1, whole.tokens - 3)
        said = subject.chat([WEATHER], tools=TOOLS, max_tokens=end, stream=stream)
        need(said.finish == "length", "finish_reason length", said.finish)
    found = _events(subject)[-1]["response"]["usage"]["output_tokens"]
    last = _events(subject, max_output_tokens=max(1, found - 3))[-1]
    need(last["type"] == "response.incomplete", "response.incomplete at the end", last["type"])
    states = [item.get("status") for item in last["response"]["output"]]
    need(states[-1:] != ["completed"], "an incomplete item at the end", states)
    return "chat, streamed chat, /v1/responses"


def stop_string(subject: Subject) -> str:
    """A stop string is in no text."""
    stop = subject.chat(_ASKED).content.split()[1]
    for stream in (False, True):
        said = subject.chat(_ASKED, stop=[stop], stream=stream)
        need(said.finish == "stop", "finish_reason stop", said.finish)
        need(stop not in said.reasoning + said.content, f"no {stop!r}", said.content)
    return f"{stop!r} ends an answer"


def ignore_eos(subject: Subject) -> str:
    """`ignore_eos` of benchmarks is answered, streamed too."""
    tokens = min(subject.chat(_ASKED).tokens + 20, subject.model.max_len // 2)
    for stream in (False, True):
        said = subject.chat(_ASKED, ignore_eos=True, max_tokens=tokens, stream=stream)
        need(said.tokens == tokens, f"{tokens} tokens", said.tokens)
    return f"{tokens} tokens"


def ids_of_responses(subject: Subject) -> str:
    """The items of a `/v1/responses` stream have the ids of its last event."""
    found = _events(subject)
    need(found[-1]["type"] == "response.completed", "response.completed", found[-1]["type"])
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    names = ("type", "id", "call_id")
    streamed, kept = (
        [[item.get(name) for name in names] for item in items]
        for items in (done, found[-1]["response"]["output"])
    )
    need(streamed and streamed == kept, f"{kept} streamed", streamed)
    return f"{len(kept)} items"


def tools_of_codex(subject: Subject) -> str:
    """Tools of types `custom`, `namespace` and `web_search` refuse no request."""
    found = client.post(subject.place, _RESPONSES, _body(subject, _CODEX)).json()
    need(found["status"] == "completed", "status completed", found["status"])
    return ", ".join(item["type"] for item in found["output"])


def images(subject: Subject) -> str:
    """An image gets 400 that names it, on all endpoints."""
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    part = {"type": "image_url", "image_url": {"url": _IMAGE}}
    item = {"type": "input_image", "image_url": _IMAGE}
    block = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    for path, body in (
        (client.CHAT, subject.body([{"role": "user", "content": [part]}])),
        (_RESPONSES, _body(subject, [_ITEM], input=[{"role": "user", "content": [item]}])),
        (_MESSAGES, {"model": subject.model.name, "max_tokens": 9, "messages": block}),
    ):
        reply = client.post(subject.place, path, body)
        named = reply.status == 400 and "image" in reply.text
        need(named, f"400 of {path} that names the image", f"{reply.status} {reply.text}")
    return "400"


def options_of_templates(subject: Subject) -> str:
    """`reasoning_effort` of `chat_template_kwargs` counts; `continue_final_message` gets 400."""
    high, prompts = {"reasoning_effort": "high"}, []
    for options in (high, {"reasoning_effort": None, "chat_template_kwargs": high}):
        asked = subject.body(_ASKED, max_tokens=1, return_token_ids=True, **options)
        found = client.post(subject.place, client.CHAT, asked).json()
        prompts.append(found["prompt_token_ids"])
    need(prompts[0] and prompts[0] == prompts[1], "the prompt of high effort", prompts[1])
    begun = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": "Good"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    reply = client.post(subject.place, client.CHAT, subject.body(begun, **more))
    need(reply.status == 400, "400", f"{reply.status} {reply.text}")
    return "high effort; 400"


def tool_of_messages(subject: Subject) -> str:
    """A tool that `/v1/messages` names is called, and ends with `tool_use`."""
    schema = {"input_schema": FUNCTION["parameters"]}
    tool = {name: FUNCTION[name] for name in ("name", "description")} | schema
    choice = {"tool_choice": {"type": "tool", "name": tool["name"]}, "tools": [tool]}
    body = {"model": subject.model.name, "messages": [WEATHER], "max_tokens": TOKENS}
    found = client.post(subject.place, _MESSAGES, body | choice).json()
    blocks = [block["type"] for block in found["content"]]
    need("tool_use" in blocks, "a block tool_use", blocks)
    need(found["stop_reason"] == "tool_use", "stop_reason tool_use", found["stop_reason"])
    return ", ".join(blocks)


def allowed_tools(subject: Subject) -> str:
    """`allowed_tools` of `tool_choice` leaves out the other tools."""
    named = [{"type": "function", "function": {"name": FUNCTION["name"]}}]
    allowed = {"mode": "required", "tools": named}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    said = subject.chat([WEATHER], tools=[_CLOCK, *TOOLS], tool_choice=choice)
    names = {call["name"] for call in said.calls}
    need(names == {FUNCTION["name"]}, f"calls of {FUNCTION['name']}", names)
    return ", ".join(names)


def _body(subject: Subject, tools: Sequence[client.Json], **options: Any) -> client.Json:
    """Return a request of /v1/responses that asks for the weather."""
    asked = {"model": subject.model.name, "input": [WEATHER], "tools": tools, "temperature": 0}
    asked |= {"reasoning": {"effort": "low"}, "max_output_tokens": subject.most_tokens}
    return {**asked, **options}


def _events(subject: Subject, **options: Any) -> list[client.Json]:
    body = _body(subject, [_ITEM], stream=True, **options)
    return [one for one in client.events(subject.place, _RESPONSES, body) if one is not None]


HINTS: Mapping[Callable[[Subject], str], str] = dict.fromkeys(
    (
        *(cut_chat, cut_call, stop_string, ignore_eos, ids_of_responses, tools_of_codex),
        *(images, options_of_templates, tool_of_messages, allowed_tools),
    ),
    _SERVED,
)
