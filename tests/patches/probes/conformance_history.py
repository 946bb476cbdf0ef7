"""What a client sends back of an answer, and what the model reads of it: what it wrote."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

from tests.patches.conformance import (
    CHAT,
    LIMITS,
    MESSAGES,
    PLAIN,
    RENDERED,
    RESPONSES,
    Message,
    Reply,
    answer,
    as_json,
    think,
)

_FRAME = re.compile(r"<\|start\|>(.*?)<\|message\|>(.*?)<\|(?:end|call|return)\|>", re.DOTALL)
_TO = re.compile(r" to=([\w.-]+)")
_ANSWER = Reply((think("Good."), answer("Yes.")))
Frame = tuple[str, str, str, str]


def _encode(text: str) -> list[int]:
    found: list[int] = get_encoding().encode(text, allowed_special="all")
    return found


def frames(text: str) -> list[Frame]:
    """Return role, recipient, channel and text of each message, whatever the form of its header."""
    found = []
    for header, body in _FRAME.findall(text):
        to = _TO.search(header)
        channel = re.search(r"<\|channel\|>(\w+)", header)
        role = "assistant" if header.startswith("assistant") else re.split(r"[ <]", header)[0]
        name = "commentary" if to else channel[1] if channel else ""
        found.append((role, to[1] if to else "", name, body))
    return found


def sent_back(endpoint: str, body: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return the next request, with results of the calls or another question."""
    if endpoint == RESPONSES:
        output = document["output"]
        calls = [item for item in output if "call_id" in item]
        more = [
            {"type": f"{one['type']}_output", "call_id": one["call_id"], "output": "21"}
            for one in calls
        ]
        more = more or [{"role": "user", "content": "More"}]
        return {**body, "input": [*body["input"], *output, *more]}
    if endpoint == CHAT:
        message = document["choices"][0]["message"]
        kept = ("role", "content", "reasoning", "tool_calls")
        said = {name: message[name] for name in kept if message.get(name)}
        for one in said.get("tool_calls", ()):
            one.pop("index", None)
        ids = [one["id"] for one in said.get("tool_calls", ())]
        more = [{"role": "tool", "tool_call_id": call, "content": "21"} for call in ids]
    else:
        said = {"role": "assistant", "content": document["content"]}
        ids = [block["id"] for block in document["content"] if block["type"] == "tool_use"]
        kind = "tool_result"
        results = [{"type": kind, "tool_use_id": call, "content": "21"} for call in ids]
        more = [{"role": "user", "content": results}] if results else []
    more = more or [{"role": "user", "content": "More"}]
    return {**body, "messages": [*body["messages"], said, *more]}


def fits(endpoint: str, reply: Reply) -> bool:
    """Return whether the endpoint's form has a place for all that was written, in its order."""
    if reply.stop or (not reply.tools and reply.loose):
        return False
    kinds = [one.kind for one in reply.messages]
    texts = [kind for kind in kinds if kind != "call"]
    if endpoint == RESPONSES:
        return True
    channel = "commentary" if "call" in kinds else "final"
    contents = [one for one in reply.messages if one.kind == "content"]
    one_of_each = len(set(texts)) == len(texts) and all(channel in one.header for one in contents)
    objects = all(
        isinstance(as_json(one.text or "{}"), dict) for one in reply.messages if one.kind == "call"
    )
    return one_of_each and (endpoint == CHAT or objects)


def _written(messages: Sequence[Message]) -> str:
    """Return messages as the model wrote them, each in a channel that there is."""
    found = ""
    for place, one in enumerate(messages, 1):
        end = "call" if one.kind == "call" and place == len(messages) else "end"
        known = one.kind == "call" or any(name in one.header for name in ("final", "comm", "anal"))
        header = one.header if known else PLAIN[-1]
        found += f"<|start|>assistant{header}{one.text}<|{end}|>"
    return found


async def faults_of_history(
    http: Any, core: Any, endpoint: str, reply: Reply, document: dict[str, Any], first: list[int]
) -> list[str]:
    """Return what is wrong with the next prompt, and after an answer with the one after it."""
    if not fits(endpoint, reply):
        return []
    decode = get_encoding().decode
    core.reply, core.size = _ANSWER.tokens(_encode), 100
    body = {**reply.body(endpoint, "Hello"), LIMITS[endpoint]: 50}
    body.pop("tool_choice", None)
    body = sent_back(endpoint, body, document)
    again = await http.post(endpoint, json=body)
    if again.status_code != 200:
        return [f"history: {again.status_code}: {again.text[:200]}"]
    answered = any(one.kind == "content" and "comm" not in one.header for one in reply.messages)
    acted = [one for one in reply.messages if one.kind != "reasoning"]
    kept = acted if answered else reply.messages
    before, wrote = decode(first).removesuffix("<|start|>assistant"), _written(kept)
    wanted = frames(f"{before}{wrote}")
    found = frames(decode(core.prompt))
    results = found[len(wanted) :]
    faults = list(_differ(endpoint, reply, found[: len(wanted)], wanted))
    exact = all(one.header in (RENDERED.format(one.name), *PLAIN) for one in kept)
    text = decode(core.prompt).removeprefix(before)
    if exact and endpoint != MESSAGES and not text.startswith(wrote):
        faults.append(f"history exactly: {text!r} does not begin with {wrote!r}")
    await http.post(endpoint, json=sent_back(endpoint, body, again.json()))
    wanted = frames(f"{before}{_written(acted)}") + results + [("assistant", "", "final", "Yes.")]
    found = frames(decode(core.prompt))[: len(wanted)]
    return faults + [f"later {fault}" for fault in _differ(endpoint, reply, found, wanted)]


def _differ(endpoint: str, reply: Reply, found: list[Frame], wanted: list[Frame]) -> Iterator[str]:
    calls = [one.text for one in reply.messages if one.kind == "call"]
    if endpoint == MESSAGES and not all(map(_compact, calls)):
        # arguments are an object there, without the spaces of a text
        found, wanted = _meant(found), _meant(wanted)
    if found != wanted:
        differ = [[a, b] for a, b in zip(found, wanted, strict=False) if a != b]
        yield f"history: {differ[:1] or [len(found), len(wanted)]}"


def _compact(text: str) -> bool:
    return json.dumps(as_json(text), ensure_ascii=False, separators=(",", ":")) == text


def _meant(found: list[Frame]) -> list[Any]:
    return [(*one[:3], as_json(one[3] or "{}") if one[1] else one[3]) for one in found]
