"""What vLLM makes of requests of agents to gpt-oss, without a server.

Argument: the file for the answers (JSON).
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai_harmony import Message, Role
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.harmony import harmony_to_response_output
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from tests.patches.probes.harmony import renderer

USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "x"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"}


def function(name: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, **more}
    return {"type": "function", "name": name, "description": "D", "parameters": parameters}


def in_chat(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**tool, "type": "function"}} for tool in tools]


CODEX = [
    {"type": "custom", "name": "apply_patch", "description": "P", "format": GRAMMAR},
    {"type": "namespace", "name": "mcp", "description": "", "tools": [function("read")]},
]
CODEX += [{"type": name} for name in ("web_search", "image_generation", "local_shell")]
PATCH = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": 'a "b"'}
DONE = {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"}
READ = {"type": "function_call", "call_id": "2", "name": "read", "arguments": "{}"}
READ_TEXT = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
READ_DONE = {"type": "function_call_output", "call_id": "2", "output": READ_TEXT}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def outcome(ask: Callable[[], Any]) -> str:
    """Return the prompt, or the error."""
    try:
        found = ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if hasattr(found, "error"):
        return f"error: {found.error.message}"
    given = found.engine_input if hasattr(found, "engine_input") else found[1][0]
    text: str = get_encoding().decode(given["prompt_token_ids"])
    return text


def chat(*messages: dict[str, Any], **options: Any) -> str:
    body = {"messages": messages or [USER], **options}
    ask = ChatCompletionRequest.model_validate
    return outcome(lambda: asyncio.run(renderer(4096).render_chat(ask(body))))


def responses(*items: dict[str, Any], **options: Any) -> str:
    body = {"input": list(items) or "Hi", **options}
    ask = ResponsesRequest.model_validate
    return outcome(lambda: asyncio.run(renderer(4096).render_responses(ask(body))))


def messages(**body: Any) -> Any:
    return AnthropicMessagesRequest(model="m", max_tokens=1, **{"messages": [USER]} | body)


def prefill() -> str:
    """Return the error; without one, this goes on to what is not there."""
    one: Any = AnthropicServingMessages.__new__(AnthropicServingMessages)
    one.online_renderer, one.log_error_stack = renderer(4096), False
    request = messages(messages=[USER, {"role": "assistant", "content": "So"}])
    return outcome(lambda: asyncio.run(one.create_messages(request)))


def server_tool() -> str:
    convert = AnthropicServingMessages.to_chat_completion_request
    return outcome(lambda: asyncio.run(renderer(4096).render_chat(convert(messages(tools=TOOLS)))))


def cut_call() -> list[Any]:
    """Return the last block and the stop reason of a call that max_tokens ended."""
    function = {"name": "f", "arguments": '{"a": "b'}
    message = {"role": "assistant", "tool_calls": [{"function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
    response = ChatCompletionResponse(model="m", choices=[choice], usage=usage)
    one: Any = AnthropicServingMessages.__new__(AnthropicServingMessages)
    try:
        found = one.messages_full_converter(response)
    except ValueError as error:
        return [str(error)]
    return [found.content[-1].name, found.content[-1].input, found.stop_reason]


def calls() -> list[Any]:
    """Return the items of calls, as a response has them."""
    named = [{"type": "custom", "name": "patch"}, *CODEX[1:]]
    tools = ResponsesRequest.model_validate({"input": "Hi", "tools": named}).tools
    found = []
    for name, text in (("patch", '{"input": "a"}'), ("mcp__read", "{}")):
        call = Message.from_role_and_content(Role.ASSISTANT, text)
        call = call.with_channel("commentary").with_recipient(f"functions.{name}")
        (item,) = harmony_to_response_output(call, frozenset())
        item = getattr(serving, "name_tool_call", lambda one, _: one)(item, tools)
        found.append([item.type, item.name, item.namespace])
    return found


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
FIELDS = {
    "place": {"$ref": "#/$defs/Place", "description": "Line one\nline two"},
    "how": {"enum": ["fast", 1, None]},
}
TURN = {"role": "assistant", "reasoning": "Why", "content": "Wait", "tool_calls": [CALL]}
OTHER_CALL = {**CALL, "function": {"name": "g", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "21"}
TEXT = {"type": "text", "text": "Look"}
WHY = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Why"}]}
BOTH = [function("f"), function("g")]
ONLY_F = {"mode": "auto", "tools": [{"type": "function", "name": "f"}]}
ONLY_F_CHAT = {"mode": "auto", "tools": in_chat({"name": "f"})}
TOOLS = [
    {"name": "f", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search"},
]

ANSWERS: dict[str, Any] = {
    "schema": chat(tools=in_chat(function("f", FIELDS, **{"$defs": {"Place": PLACE}}))),
    "turn": chat(USER, TURN, RESULT),
    "items": responses(USER, WHY, {"role": "assistant", "content": "Wait"}, READ, READ_DONE),
    "codex": responses(tools=CODEX),
    "codex again": responses(USER, PATCH, DONE, {**READ, "namespace": "mcp"}, READ_DONE),
    "calls": calls(),
    "cut call": cut_call(),
    "effort": chat(chat_template_kwargs={"reasoning_effort": "high"}),
    "continue": chat(continue_final_message=True, add_generation_prompt=False),
    "prefill": prefill(),
    "texts": chat({"role": "user", "content": [TEXT, {"type": "text", "text": "here"}]}),
    "image": chat({"role": "user", "content": [TEXT, IMAGE, TEXT]}),
    "input image": responses({"role": "user", "content": [INPUT_IMAGE]}),
    "allowed": chat(
        tools=in_chat(*BOTH), tool_choice={"type": "allowed_tools", "allowed_tools": ONLY_F_CHAT}
    ),
    "allowed item": responses(tools=BOTH, tool_choice={"type": "allowed_tools", **ONLY_F}),
    "one id": chat(USER, {**TURN, "tool_calls": [CALL, OTHER_CALL]}, RESULT, RESULT),
    "nulls": responses(background=None, truncation=None, tools=None, tool_choice=None),
    "new tool": responses(tools=[function("f"), {"type": "of-tomorrow"}]),
    "server tool": server_tool(),
    "chat tool": chat(tools=[*in_chat(function("f")), {"type": "mcp", "server_label": "x"}]),
}
Path(sys.argv[1]).write_text(json.dumps(ANSWERS))
