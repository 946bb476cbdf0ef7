"""Replies that gpt-oss may write, with what a client has to see of them, and how each is asked for.

The table of test_conformance.py. A reply is made of messages, so that what is to be seen at any cut
follows from it, and not from a parser.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Encode = Callable[[str], list[int]]
Part = tuple[str, str, str, bool]
"""Kind (reasoning, content, call), name, text, and whether it is whole."""

CHAT, RESPONSES, MESSAGES = ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
LIMITS = dict(zip(ENDPOINTS, ("max_tokens", "max_output_tokens", "max_tokens"), strict=True))
NAMES = ("f", "a.b", "mcp__x-y")
ANYTHING = {"type": "object", "properties": {"a": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@dataclass(frozen=True)
class Message:
    """One message of a reply: what stands between ``<|start|>assistant`` and its end."""

    kind: str
    header: str
    text: str
    name: str = ""
    end: str = ""
    """Empty: the last message has the stop token of its kind, others ``<|end|>``."""


def think(text: str) -> Message:
    return Message("reasoning", "<|channel|>analysis<|message|>", text)


def say(text: str) -> Message:
    """Return a preamble."""
    return Message("content", "<|channel|>commentary<|message|>", text)


def answer(text: str, header: str = "<|channel|>final<|message|>", end: str = "") -> Message:
    return Message("content", header, text, end=end)


PLAIN = tuple(f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))
# as history is rendered, and other forms that the model writes
RENDERED = " to=functions.{}<|channel|>commentary json<|message|>"
CONSTRAINED = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
BARE = "<|channel|>commentary to=functions.{}<|message|>"
IN_ROLE = " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>"
TWICE = " to=functions.{0}<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis to=functions.{} <|constrain|>json<|message|>"
GARBLED = "final<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"


def call(arguments: str, name: str = "f", header: str = RENDERED) -> Message:
    return Message("call", header.format(name), arguments, name)


@dataclass(frozen=True)
class Reply:
    messages: tuple[Message, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More of the request, by endpoint."""
    tools: bool = True
    stop: str = ""
    loose: bool = False
    """What is to be seen of it before its end is not said."""
    endpoints: tuple[str, ...] = ENDPOINTS

    def written(self) -> list[tuple[Message, str, str]]:
        """Return each message with its whole header and its end."""
        found = []
        for place, one in enumerate(self.messages, 1):
            start = "<|start|>assistant" if place > 1 else ""
            stop = "<|call|>" if one.kind == "call" else "<|return|>"
            end = one.end or (stop if place == len(self.messages) else "<|end|>")
            found.append((one, f"{start}{one.header}", end))
        return found

    def tokens(self, encode: Encode) -> list[int]:
        return [token for *_, tokens in self._frames(encode) for token in tokens]

    def _frames(self, encode: Encode) -> list[tuple[Message, int, list[int]]]:
        """Return each message with the length of its header and its tokens."""
        found = []
        for one, start, end in self.written():
            header = encode(start)
            found.append((one, len(header), [*header, *encode(one.text), *encode(end)]))
        return found

    def expected(self, encode: Encode, decode: Callable[[list[int]], str], cut: int) -> list[Part]:
        """Return what there is to see of the first ``cut`` tokens."""
        found: list[Part] = []
        for one, begin, tokens in self._frames(encode):
            if cut < begin:
                break
            whole = cut >= len(tokens)
            text = one.text if whole else decode(tokens[begin : min(cut, len(tokens) - 1)])
            if self.stop and self.stop in text:
                # of a call that a stop string ended nothing is left
                if one.kind != "call":
                    found.append((one.kind, one.name, text.partition(self.stop)[0], True))
                break
            found.append((one.kind, one.name, text, whole))
            cut -= len(tokens)
        return found

    def thought(self, encode: Encode, cut: int) -> int:
        """Return how many of the first ``cut`` tokens are text of the reasoning."""
        count = 0
        for one, begin, tokens in self._frames(encode):
            if one.kind == "reasoning":
                count += max(0, min(cut, len(tokens) - 1) - begin)
            cut -= len(tokens)
        return count

    def made(self, encode: Encode, decode: Callable[[list[int]], str], cut: int) -> int:
        """Return how many tokens the engine makes of the first ``cut``."""
        done = 0
        for _, begin, tokens in self._frames(encode):
            texts = (decode(tokens[begin : begin + n]) for n in range(len(tokens) - begin))
            ends = [done + begin + n for n, text in enumerate(texts) if self.stop in text]
            if self.stop and ends:
                return min(cut, ends[0])
            done += len(tokens)
        return min(cut, done)

    def body(self, endpoint: str, question: str) -> dict[str, Any]:
        """Return the request, without its limit."""
        asked = {"role": "user", "content": question}
        body: dict[str, Any] = {"model": "tiny"}
        body["input" if endpoint == RESPONSES else "messages"] = [asked]
        if self.tools:
            body["tools"] = [_tool(endpoint, name) for name in NAMES]
        if self.stop:
            body["stop_sequences" if endpoint == MESSAGES else "stop"] = [self.stop]
        return body | dict(self.options.get(endpoint, {}))


def _tool(endpoint: str, name: str) -> dict[str, Any]:
    if endpoint == MESSAGES:
        return {"name": name, "description": "D", "input_schema": ANYTHING}
    function = {"name": name, "description": "D", "parameters": ANYTHING}
    if endpoint == CHAT:
        return {"type": "function", "function": function}
    return {"type": "function", **function}


Options = Mapping[str, Mapping[str, Any]]
NAMED: Options = {
    CHAT: {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    RESPONSES: {"tool_choice": {"type": "function", "name": "f"}},
    MESSAGES: {"tool_choice": {"type": "tool", "name": "f"}},
}
REQUIRED: Options = {
    CHAT: {"tool_choice": "required"},
    RESPONSES: {"tool_choice": "required"},
    MESSAGES: {"tool_choice": {"type": "any"}},
}
_JSON = {"type": "json_schema", "name": "x", "schema": SCHEMA}
IN_SCHEMA: Options = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": _JSON}},
    RESPONSES: {"text": {"format": _JSON}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}

# What every endpoint can say and take back as the model wrote it: the kinds that issue 31 names.
KINDS = {
    "text": Reply((answer("Hello you."),), tools=False),
    "reasoning": Reply((think("Think hard."), answer("Hello.")), tools=False),
    "tool": Reply((think("Why."), call('{"a":1}'))),
    "parallel": Reply((think("Why."), call('{"a":1}'), call('{"a":"x"}', "a.b"))),
    "named": Reply((think("Why."), call('{"a":1}', header=CONSTRAINED)), NAMED),
    "required": Reply((call('{"a":[]}', "mcp__x-y", CONSTRAINED),), REQUIRED),
    "schema": Reply(
        (think("So."), answer('{"a":1}', "<|channel|>final <|constrain|>json<|message|>")),
        IN_SCHEMA,
        tools=False,
    ),
    "preamble": Reply((think("Why."), say("I look."), call('{"a":1}'))),
}
# and what they cannot, or what the model should not have written
ODD = {
    "spaces": Reply((call('{ "a":  1,\n"b" : "\u00e9 \U0001f9be"}'),)),
    "emoji": Reply((think("So \U0001f9be."), answer("Day \U0001f9be")), tools=False),
    "no arguments": Reply((call("{}"),)),
    "empty arguments": Reply((think("Why."), call(""))),
    "broken arguments": Reply((call('{"a": '),)),
    "list of arguments": Reply((call("[1]"),)),
    "bare call": Reply((call('{"a":1}', header=BARE),)),
    "call in role": Reply((call('{"a":1}', header=IN_ROLE),)),
    "call twice": Reply((think("Why."), call('{"a":1}', header=TWICE))),
    "call in analysis": Reply((think("Why."), call('{"a":1}', header=ANALYSIS))),
    "garbled role": Reply((think("Why."), call('{"a":1}', header=GARBLED)), loose=True),
    "empty thought": Reply((think(""), answer("Hi.")), tools=False),
    "two thoughts": Reply((think("First."), think("Second."), call('{"a":1}'))),
    "thought after preamble": Reply((think("One."), say("I look."), think("Two."), call("{}"))),
    "preamble, then answer": Reply((think("One."), say("I look."), answer("Done."))),
    "final after final": Reply((answer("One."), answer("Two.")), tools=False),
    "preamble alone": Reply((say("I look."),)),
    "stop in answer": Reply((think("Hm."), answer("Hello you there.")), tools=False, stop="you"),
    "stop in reasoning": Reply((think("Think hard."), answer("Hi.")), tools=False, stop="hard"),
    "stop in arguments": Reply((say("I look."), call('{"city":1}')), stop="city"),
    "stop nowhere": Reply((say("I look."), call('{"a":1}')), stop="nowhere"),
    "call without tools": Reply((call('{"a":1}'),), tools=False, loose=True),
    "no channel": Reply((answer("Hi.", "<|message|>"),), tools=False),
    "unknown channel": Reply((answer("Hi.", "<|channel|>Final<|message|>"),), tools=False),
    "no header": Reply((think("Why?"), answer("Hi.", "")), tools=False, loose=True),
}
# as Codex has them; the client's own form of a call is not a function's
_CUSTOM = {RESPONSES: {"tools": [{"type": "custom", "name": "patch", "description": "D"}]}}
_READ = {"type": "function", "name": "read", "description": "D", "parameters": ANYTHING}
_SPACE = {"type": "namespace", "name": "mcp", "description": "D", "tools": [_READ]}
_IN_SPACE = {RESPONSES: {"tools": [_SPACE]}}
CODEX = {
    "custom": Reply(
        (think("Why."), call('{"input":"a \\"b\\"\\n\u00e9"}', "patch")),
        _CUSTOM,
        loose=True,
        endpoints=(RESPONSES,),
    ),
    "namespace": Reply(
        (call('{"a":1}', "mcp__read"), call('{"a":2}', "mcp__read", CONSTRAINED)),
        _IN_SPACE,
        endpoints=(RESPONSES,),
    ),
}
REPLIES = {**KINDS, **ODD, **CODEX}


def as_json(text: str) -> Any:
    """Return what a call's arguments mean; None where they are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
