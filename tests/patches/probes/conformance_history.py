"""What a client sends back of an answer, and what the model reads of it: what it wrote."""

import re
from collections.abc import AsyncIterator
from typing import Any

from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

from tests.patches.conformance import CHAT, LIMITS, MESSAGES, PLAIN, RENDERED, RESPONSES, Reply, as_json

_FRAME = re.compile(r"<\|start\|>(.*?)<\|message\|>(.*?)<\|(?:end|call|return)\|>", re.DOTALL)
_TO = re.compile(r" to=([\w.-]+)")
Frame = tuple[str, str, str, str]


def frames(text: str) -> list[Frame]:
    """Return role, recipient, channel and text of each message, whatever the form of its header."""
    found = []
    for header, body in _FRAME.findall(text):
        to = _TO.search(header)
        channel = re.search(r"<\|channel\|>(\w+)", header)
        role = re.split(r"[ <]", header)[0]
        found.append((role, to[1] if to else "", channel[1] if channel else "", body))
    return found


def sent_back(endpoint: str, body: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return the next request, with results of the calls or another question."""
    if endpoint == RESPONSES:
        output = document["output"]
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        kind = "function_call_output"
        more = [{"type": kind, "call_id": call, "output": "21"} for call in calls]
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
    if reply.loose or reply.stop:
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


async def faults_of_history(
    asked: Any, core: Any, endpoint: str, reply: Reply, document: dict[str, Any], first: list[int]
) -> AsyncIterator[str]:
    if not fits(endpoint, reply):
        return
    body = {**reply.body(endpoint), LIMITS[endpoint]: 50}
    body.pop("tool_choice", None)
    again = await asked.post(endpoint, sent_back(endpoint, body, document))
    if again.status_code != 200:
        yield f"history: {again.status_code}: {again.text[:200]}"
        return
    decode = get_encoding().decode
    drops = any("final" in one.header for one in reply.messages)
    kept = [one for one in reply.messages if not (drops and one.kind == "reasoning")]
    wrote = "".join(
        f"<|start|>assistant{one.header}{one.text}<|{'call' if one.kind == 'call' else 'end'}|>"
        for one in kept
    )
    before = decode(first).removesuffix("<|start|>assistant")
    wanted, found = frames(f"{before}{wrote}"), frames(decode(core.prompt))[: len(frames(before)) + len(kept)]
    if endpoint == MESSAGES:
        compact = all(_compact(one.text) for one in kept if one.kind == "call")
        if not compact:
            wanted, found = ([(*one[:3], as_json(one[3]) or one[3]) for one in each] for each in (wanted, found))
    if found != wanted:
        differ = next(([a, b] for a, b in zip(found, wanted, strict=False) if a != b), [len(found), len(wanted)])
        yield f"history: {differ[0]}, not {differ[1]}"
    elif all(one.header in (RENDERED.format(one.name), *PLAIN) for one in kept):
        text = f"{before}{wrote}"
        if endpoint != MESSAGES and not decode(core.prompt).startswith(text):
            yield f"history: {decode(core.prompt)!r} does not begin with {text!r}"


def _compact(text: str) -> bool:
    import json

    return json.dumps(as_json(text), ensure_ascii=False, separators=(",", ":")) == text
