"""What clients see of an answer of the three endpoints, by the official packages' own rules."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import anthropic
import httpx2
import openai
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from tests.patches.conformance import CHAT, ENDPOINTS, MESSAGES, RESPONSES

Document = dict[str, Any]
_WHOLE = dict(zip(ENDPOINTS, map(TypeAdapter, (ChatCompletion, Response, Message)), strict=True))
_CHUNK = TypeAdapter(ChatCompletionChunk)
_EVENT = {
    get_args(kind.model_fields["type"].annotation)[0]: TypeAdapter(kind)
    for union in (ResponseStreamEvent, RawMessageStreamEvent)
    for kind in get_args(get_args(union)[0])
}
_STREAM: dict[str, bytes] = {}
_ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def _client(kind: Any, url: str) -> Any:
    def answer(_: httpx2.Request) -> httpx2.Response:
        kept = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=kept, content=_STREAM["body"])

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    return kind(api_key="x", base_url=url, http_client=http, max_retries=0)


_OPENAI = _client(openai.OpenAI, "http://x/v1")
_ANTHROPIC = _client(anthropic.Anthropic, "http://x")


def assembled(endpoint: str, stream: bytes) -> Document:
    """Return the whole answer that the official package makes of a stream."""
    _STREAM["body"] = stream
    found: Any = None
    if endpoint == CHAT:
        with _OPENAI.chat.completions.stream(**_ASKED) as chunks:
            for _ in chunks:
                pass
            found = chunks.current_completion_snapshot
    elif endpoint == RESPONSES:
        with _OPENAI.responses.stream(model="tiny", input="x") as events:
            for event in events:
                found = getattr(event, "response", found)
    else:
        with _ANTHROPIC.messages.stream(max_tokens=1, **_ASKED) as events:
            found = events.get_final_message()
    document: Document = found.model_dump(mode="json", warnings=False)
    return document


def view(endpoint: str, document: Document) -> dict[str, Any]:
    """Return parts (kind, name, text, status), why it ended, and usage."""
    usage = document["usage"] or {}
    if endpoint == CHAT:
        (choice,) = document["choices"]
        message = choice["message"]
        parts = [["reasoning", "", message.get("reasoning"), ""]]
        parts += [["content", "", message["content"], ""]]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        parts += [["call", one["name"], one["arguments"], ""] for one in calls]
        thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        counts = [usage.get("prompt_tokens"), usage.get("completion_tokens"), thought]
        end = [choice["finish_reason"]]
    elif endpoint == RESPONSES:
        parts = [_item(item) for item in document["output"]]
        thought = (usage.get("output_tokens_details") or {}).get("reasoning_tokens")
        counts = [usage.get("input_tokens"), usage.get("output_tokens"), thought]
        end = [document["status"], (document["incomplete_details"] or {}).get("reason")]
    else:
        parts = [_block(block) for block in document["content"]]
        counts = [usage.get("input_tokens"), usage.get("output_tokens"), None]
        end = [document["stop_reason"], document.get("stop_sequence")]
    return {"parts": [part for part in parts if part[2] is not None], "end": end, "usage": counts}


def _item(item: Document) -> list[Any]:
    if item["type"] == "function_call":
        name = "__".join(filter(None, (item.get("namespace"), item["name"])))
        return ["call", name, item["arguments"], item["status"]]
    if item["type"] == "custom_tool_call":
        return ["call", item["name"], item["input"], item.get("status")]
    kind = {"reasoning": "reasoning", "message": "content"}[item["type"]]
    text = "".join(one["text"] for one in item["content"] or ())
    # a status is optional here
    return [kind, "", text, item["status"] or "completed"]


def _block(block: Document) -> list[Any]:
    if block["type"] == "tool_use":
        return ["call", block["name"], block["input"], ""]
    kind, name = {"thinking": ("reasoning", "thinking"), "text": ("content", "text")}[block["type"]]
    return [kind, "", block[name], ""]


def events(stream: bytes) -> list[Document]:
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def faults_of_whole(endpoint: str, document: Document) -> Iterator[str]:
    yield from _invalid(_WHOLE[endpoint], document)


def _invalid(adapter: Any, document: Document) -> Iterator[str]:
    try:
        adapter.validate_python(document)
    except ValidationError as error:
        # of a union's members those of another type say nothing
        errors = error.errors()
        others = {one["loc"][:-1] for one in errors if one["loc"][-1:] == ("type",)}
        first = next((one for one in errors if one["loc"][:-1] not in others), errors[0])
        place = ".".join(map(str, first["loc"]))
        yield f"invalid {document.get('type', 'chunk')}: {place}: {first['msg']}"


def faults_of_stream(endpoint: str, found: list[Document]) -> Iterator[str]:
    """Yield what is wrong with the events of a stream, apart from their texts."""
    for event in found:
        yield from _invalid(_CHUNK if endpoint == CHAT else _EVENT[event["type"]], event)
    rules = {CHAT: _chunks, RESPONSES: _items, MESSAGES: _blocks}
    yield from rules[endpoint](found)


def _differ(name: str, values: Iterable[Any]) -> Iterator[str]:
    kinds = list(dict.fromkeys(values))
    if len(kinds) != 1:
        yield f"{name}: {kinds}"


def _chunks(found: list[Document]) -> Iterator[str]:
    yield from _differ("ids", (chunk["id"] for chunk in found))
    choices = [choice for chunk in found for choice in chunk["choices"]]
    ends = [choice["finish_reason"] for choice in choices]
    if any(ends[:-1]) or not ends[-1]:
        yield f"finish reasons: {ends}"
    calls: list[str] = []
    for choice in choices:
        for one in choice["delta"].get("tool_calls") or ():
            if one.get("id"):
                calls.append(one["id"])
            if one["index"] != len(calls) - 1:
                yield f"index {one['index']} of call {len(calls)}"
    if len(set(calls)) != len(calls):
        yield f"ids of calls: {calls}"


def _items(found: list[Document]) -> Iterator[str]:
    numbers = [event["sequence_number"] for event in found]
    if numbers != list(range(len(found))):
        yield f"sequence numbers: {numbers}"
    last = found[-1]["response"]
    if found[-1]["type"] != f"response.{last['status']}":
        yield f"status {last['status']} in {found[-1]['type']}"
    yield from _differ("ids", (one["response"]["id"] for one in (found[0], found[1], found[-1])))
    done: list[Document] = []
    current: Document | None = None
    text: dict[str, str] = {}
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        if event.get("output_index") != len(done):
            yield f"{kind}: output_index {event.get('output_index')} of item {len(done)}"
        if kind == "output_item.added":
            current, text = event["item"], {}
            if current.get("status", "in_progress") != "in_progress":
                yield f"{kind}: status {current['status']}"
            continue
        if current is None:
            yield f"{kind} before an item"
            continue
        if kind == "output_item.done":
            item = event["item"]
            if item["id"] != current["id"]:
                yield f"ids of an item: {current['id']}, {item['id']}"
            if _item(item)[2] != text.get("delta", "") or text.get("done", "") != _item(item)[2]:
                yield f"{item['type']}: deltas {text}, item {_item(item)[2]!r}"
            done.append(item)
            current = None
            continue
        if event["item_id"] != current["id"]:
            yield f"{kind}: id {event['item_id']} of item {current['id']}"
        if event.get("content_index", 0) != 0:
            yield f"{kind}: content_index {event['content_index']}"
        if kind.endswith(".delta"):
            text["delta"] = text.get("delta", "") + event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            text["done"] = event["text"]
        elif kind == "function_call_arguments.done":
            text["done"] = event["arguments"]
        elif kind == "custom_tool_call_input.done":
            text["done"] = event["input"]
    if current is not None:
        yield f"no end of {current['type']}"
    if last["output"] != done:
        pairs = zip(last["output"], done, strict=False)
        differ = [
            [n, a.get(n), b.get(n)] for a, b in pairs for n in {*a, *b} if a.get(n) != b.get(n)
        ]
        count = [len(last["output"]), len(done)]
        yield f"output of the response is not what was streamed: {differ or count}"


def _blocks(found: list[Document]) -> Iterator[str]:
    kinds = [event["type"] for event in found if event["type"] != "ping"]
    if kinds[:1] + kinds[-2:] != ["message_start", "message_delta", "message_stop"]:
        yield f"events: {kinds}"
    inside, count = "", 0
    for event in found[1:-2]:
        if event["index"] != count:
            yield f"index {event['index']} of block {count}"
        if event["type"] == "content_block_start":
            if inside:
                yield f"{inside} is open"
            inside = event["content_block"]["type"]
        elif event["type"] == "content_block_stop":
            inside, count = "", count + 1
        else:
            wanted = {"thinking_delta": "thinking", "signature_delta": "thinking"}
            wanted |= {"text_delta": "text", "input_json_delta": "tool_use"}
            if wanted[event["delta"]["type"]] != inside:
                yield f"{event['delta']['type']} in {inside}"
    if inside:
        yield f"{inside} has no end"
