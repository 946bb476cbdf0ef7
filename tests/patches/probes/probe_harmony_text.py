"""What the patched vLLM makes of conversations with long text, beside oss-harmony itself.

Arguments: the number of conversations, and the file for the answers (JSON).
"""

import asyncio
import json
import random
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    RenderConversationConfig,
    Role,
    SystemContent,
    TextContent,
    ToolDescription,
    ToolNamespaceConfig,
)
from vllm.entrypoints.openai.parser import harmony_text, harmony_utils

WORDS = re.findall(
    r"\S+",
    r"""
the quick Brown fOx HTTPServer getElementById iPhone don't WE'LL I'm you'Re naïve Straße ǅungla ʰʷ
日本語の テスト 中文字符 한국어 Привет мир שלום مرحبا हिन्दी ไทย 👩‍👩‍👧‍👦 🇨🇭 😀 12345
1,000.50 ٣٤٥ Ⅷ ½ x² <|start|> <|end|><|message|> <|channel|>final <|constrain|>json
<|reserved_200005|> to=functions.f null nullable // -- == ==== ... "'" \n \\ {"a":[1,-2.5e3]}
http://a.b/c?d=e&f 'S'd 0x1F base64/+A==""",
)
WORDS += ["a\u0301", "e\u0300\u0323", "\u0301\u0302", "\U00012400", "\U00012401 \U0001246e"]
WORDS += [*"\ue000\ufffd\u200b\u200d\x00\x1b\x7f\u0085\u2028\ufeff"]
BLANKS = [" ", "  ", "\n", "\r\n", "\r", "\t", " \n", "\n\n", "\u00a0", "\u3000", "\v\f"]
BLANKS += [" \r\n \n"]
RUNS = [*"xX=é中 \n\r\t1\"\\'/.-_a\u0301😀\u00a0"]
RUNS += ["\r\n", "Ab", "null", "nul", " \n", "a ", "'s", "//\n"]


def text(rng: random.Random, most: int) -> str:
    """Make a text of some kinds, at most about as long."""
    made: list[str] = []
    size = 0
    length = rng.choice([0, 1, 3, 20, 150, most])
    while size < length:
        kind = rng.random()
        if kind < 0.6:
            piece = rng.choice(WORDS) + rng.choice(["", " ", rng.choice(BLANKS)])
        elif kind < 0.8:
            piece = rng.choice(RUNS) * rng.choice([1, 2, 7, 127, 128, 129, 300])
        elif kind < 0.95:
            piece = "".join(rng.choice(BLANKS) for _ in range(rng.randrange(5)))
        else:
            piece = chr(rng.choice([*range(0x20, 0xD800), *range(0xE000, 0x20000)]))
        made.append(piece)
        size += max(1, len(piece))
    return "".join(made)


def schema(rng: random.Random, depth: int) -> Any:
    """Make a JSON schema as clients send them, or odder."""
    found: dict[str, Any] = {}
    for name in ("title", "description", "default"):
        if rng.random() < 0.4:
            found[name] = text(rng, 400)
    if rng.random() < 0.2:
        found["default"] = rng.choice([[text(rng, 300)], {text(rng, 200): None}, 5, None, True])
    kind = rng.choice(["object", "array", "oneOf", "string"] if depth else ["string"])
    if kind == "object":
        names = [text(rng, 140) for _ in range(rng.randrange(4))]
        found["properties"] = {name: schema(rng, depth - 1) for name in names}
        return found | {"type": "object", "required": names[:1]}
    if kind == "array":
        return found | {"type": "array", "items": schema(rng, depth - 1)}
    if kind == "oneOf":
        return found | {"oneOf": [schema(rng, depth - 1) for _ in range(2)]}
    enum = [text(rng, 300) for _ in range(2)]
    return found | {"type": rng.choice(["string", ["string", "x"], text(rng, 200)]), "enum": enum}


def tools(rng: random.Random) -> list[ToolDescription]:
    return [
        ToolDescription.new(
            rng.choice(["f", "n" * 300]),
            text(rng, 600),
            rng.choice([None, {"type": "object", "properties": {"a": schema(rng, 2)}}]),
        )
        for _ in range(rng.randrange(3))
    ]


def message(rng: random.Random) -> Message:
    """Make a message as vLLM makes them, or from a client's own Harmony messages."""
    made = Message.from_role_and_content
    name = rng.choice(["f", "x" * 200, "a.b", "Ünï"])
    match rng.randrange(6):
        case 0:
            system = SystemContent.new().with_conversation_start_date("2026-01-01")
            system = system.with_model_identity(text(rng, 500))
            python = ToolNamespaceConfig(name="python", description=None, tools=tools(rng))
            return made(Role.SYSTEM, system.with_tools(python))
        case 1:
            developer = DeveloperContent.new().with_instructions(text(rng, 1500))
            return made(Role.DEVELOPER, developer.with_function_tools(tools(rng)))
        case 2:
            parts = [TextContent(text=text(rng, 300)) for _ in range(rng.randrange(5))]
            return Message.from_role_and_contents(Role.USER, parts)
        case 3:
            call = made(Role.ASSISTANT, text(rng, 800)).with_channel("commentary")
            return call.with_recipient(f"functions.{name}").with_content_type("json")
        case 4:
            result = Message.from_author_and_content(
                Author.new(Role.TOOL, f"functions.{name}"), text(rng, 1500)
            )
            return result.with_channel("commentary").with_recipient("assistant")
    return made(rng.choice([Role.USER, Role.ASSISTANT]), text(rng, 2500))


def itself(messages: list[Message]) -> list[int]:
    """Return oss-harmony's own tokens, as vLLM gives them to the engine."""
    tokens: list[int] = harmony_utils._use_legacy_tool_call_headers(
        harmony_utils.get_encoding().render_conversation_for_completion(
            Conversation.from_messages(harmony_utils.auto_drop_analysis_messages(messages)),
            Role.ASSISTANT,
            config=RenderConversationConfig(auto_drop_analysis=False),
        )
    )
    # of another patch, which may be left out
    goes_on: Callable[[list[int]], list[int]]
    goes_on = getattr(harmony_utils, "_go_on_after_calls", list)
    return goes_on(tokens)


def outcome(render: Callable[[list[Message]], list[int]], messages: list[Message]) -> Any:
    try:
        return render(messages)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Spy:
    """The Rust half of oss-harmony; it notes what it is given to encode."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.longest, self.size = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("encode", "render_conversation_for_completion"):
            return found

        def noted(*args: Any, **options: Any) -> Any:
            given = args[0] if name == "encode" else options["conversation_json"]
            given = json.dumps(json.loads(given), ensure_ascii=False) if name != "encode" else given
            self.size = max(self.size, len(given))
            parts = re.split("[\U00012400-\U0001246e]", given)
            self.longest = max([self.longest, *map(len, parts)])
            return found(*args, **options)

        return noted


def places(long: str) -> dict[str, list[Message]]:
    """Return a conversation for each place that a client can fill."""
    properties = {long: {"type": "string", "enum": [long], "default": long, "description": long}}
    tool = ToolDescription.new("f", long, {"type": "object", "properties": properties})
    of = Message.from_role_and_content
    return {
        "user": [of(Role.USER, long)],
        "instructions": [of(Role.DEVELOPER, DeveloperContent.new().with_instructions(long))],
        "schema": [of(Role.DEVELOPER, DeveloperContent.new().with_function_tools([tool]))],
        "name": [of(Role.ASSISTANT, "{}").with_recipient(long).with_channel("commentary")],
        "result": [Message.from_author_and_content(Author.new(Role.TOOL, "functions.f"), long)],
    }


def unbroken() -> dict[str, Any]:
    """Say what oss-harmony sees of 200,000 characters without a break in each place."""
    encoding = harmony_utils.get_encoding()
    seen: dict[str, Any] = {}
    inner = encoding._inner
    for character in "x \n=é中":
        for place, messages in places(character * 200_000).items():
            encoding._inner = spy = Spy(inner)
            try:
                tokens = harmony_utils.render_for_completion(messages)
                text = encoding.decode(tokens)
            finally:
                encoding._inner = inner
            whole = text.count(character) >= 200_000
            seen[f"{place} of {character!r}"] = [spy.longest, spy.size, whole]
    return seen


def refused() -> dict[str, Any]:
    """Return the errors of texts that are not encoded."""
    cases = {
        "blank": places(" " * 1_000_000)["user"],
        "many tokens": places("\u00e9" * 1_100_000)["user"],
        "nearly as blank": places(" " * 999_000)["user"],
        "schema": places("x" * 300_000)["schema"],
        "numerals": places("".join(map(chr, range(0x12400, 0x1246F))) * 20)["schema"],
        "numerals as text": places("".join(map(chr, range(0x12400, 0x1246F))) * 20)["user"],
        "surrogate": places("a\ud83d" * 2000)["user"],
        "surrogate in a schema": places("a\ud83d" * 2000)["schema"],
    }
    found = {}
    for name, messages in cases.items():
        said = outcome(harmony_utils.render_for_completion, messages)
        found[name] = said if isinstance(said, str) else "rendered"
        if name.startswith("surrogate"):
            found[name] = said == outcome(itself, messages)
    return found


async def threads() -> dict[str, Any]:
    """Return which threads render conversations of several sizes."""
    ran: list[str] = []
    real = harmony_text.HarmonyOutline._encode

    def noted(*args: Any) -> list[int]:
        ran.append(threading.current_thread().name)
        tokens: list[int] = real(*args)
        return tokens

    harmony_text.HarmonyOutline._encode = noted
    found: dict[str, Any] = {}
    for size in (100, 3_000, 300_000):
        ran.clear()
        tokens = await harmony_utils.render_for_completion_async(places("x" * size)["user"])
        found[str(size)] = [sorted(set(ran)), len(tokens) > 0]
    harmony_text.HarmonyOutline._encode = real
    return found


def main() -> None:
    wrong: list[str] = []
    count, rendered = int(sys.argv[1]), 0
    for seed in range(count):
        rng = random.Random(seed)
        messages = [message(rng) for _ in range(rng.choice([1, 1, 2, 4, 20]))]
        # every other one as it is, which is as short as many are
        harmony_utils.MAX_SHORT_TEXT = seed % 2 * harmony_text.MAX_SHORT_TEXT
        ours = outcome(harmony_utils.render_for_completion, messages)
        expected = outcome(itself, messages)
        rendered += isinstance(expected, list)
        if ours != expected:
            wrong.append(f"{seed}: {ours if isinstance(ours, str) else ''} {messages}"[:2000])
    harmony_utils.MAX_SHORT_TEXT = harmony_text.MAX_SHORT_TEXT
    answers = {
        "rendered": rendered,
        "wrong": wrong,
        "unbroken": unbroken(),
        "refused": refused(),
        "threads": asyncio.run(threads()),
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
