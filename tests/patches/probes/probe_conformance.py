"""Ask for each reply of the table, cut at every token, whole and streamed, and check the answers.

Arguments: a JSON file with ``model``, the folder of a checkpoint, and ``replies``, names of the
table; the file for what is wrong, by reply and endpoint: lists of one line each.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

from tests.patches.conformance import (
    CHAT,
    ENDPOINTS,
    LIMITS,
    MESSAGES,
    NAMED,
    REPLIES,
    RESPONSES,
    Part,
    Reply,
    answer,
    as_json,
)
from tests.patches.probes import conformance_views as views
from tests.patches.probes.conformance_history import faults_of_history
from tests.patches.probes.engineless import Core, application

_HARMONY = re.compile(r"<\||functions|\bto=|commentary|analysis|assistant")
_MOST = 3  # lines of a kind


def encode(text: str) -> list[int]:
    found: list[int] = get_encoding().encode(text, allowed_special="all")
    return found


def decode(tokens: list[int]) -> str:
    found: str = get_encoding().decode(tokens)
    return found


def expected(endpoint: str, parts: list[Part]) -> list[list[Any]]:
    """Return the parts of a view that these messages have."""
    if endpoint == RESPONSES:
        return [[*part[:3], "completed" if part[3] else "incomplete"] for part in parts]
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[list[Any]] = []
    for kind, name, text, whole in parts:
        if kind == "call":
            # what a client makes of half the arguments is its own matter
            meant = as_json(text or "{}") if whole else None
            calls.append([kind, name, text if endpoint == CHAT else meant, ""])
        elif text:
            texts[kind].append(text)
    return [[kind, "", "\n".join(found), ""] for kind, found in texts.items()] + calls


def comparable(endpoint: str, parts: list[list[Any]], cut: Part | None) -> list[list[Any]]:
    """Return parts without what may be there or not: empty texts, and of the message that was cut
    a half character, a call that has no arguments yet, and in /v1/messages half arguments.
    """
    found: list[list[Any]] = []
    for kind, name, text, status in parts:
        if endpoint == MESSAGES and kind != "call" and found and found[-1][0] == kind:
            found[-1][2] += text
        elif kind == "call" or text:
            found.append([kind, name, text, status])
    if cut is not None and found and found[-1][0] == cut[0]:
        last = found[-1]
        if cut[0] != "call":
            last[2] = last[2].rstrip("\ufffd")
        if not last[2] or (endpoint == MESSAGES and cut[0] == "call"):
            found.pop()
    return found


def ends(endpoint: str, reply: Reply, parts: list[Part], *, cut: bool) -> list[Any]:
    called = any(part[0] == "call" for part in parts)
    named = reply.options == NAMED
    if endpoint == CHAT:
        return ["length" if cut else "tool_calls" if called and not named else "stop"]
    if endpoint == RESPONSES:
        return ["incomplete", "max_output_tokens"] if cut else ["completed", None]
    if cut:
        return ["max_tokens", None]
    if reply.stop and reply.stop != "nowhere":
        return ["stop_sequence", reply.stop]
    return ["tool_use" if called else "end_turn", None]


def faults_of_view(
    endpoint: str, reply: Reply, cut: int, prompt: int, seen: dict[str, Any]
) -> Iterator[str]:
    parts = reply.expected(encode, decode, cut)
    is_cut = cut < reply.made(encode, decode, len(reply.tokens(encode)))
    for part in seen["parts"]:
        if found := _HARMONY.search(f"{part[1]} {part[2]}"):
            yield f"Harmony: {found[0]!r} in {part}"
    if not is_cut and not any(part[0] != "reasoning" for part in seen["parts"]):
        yield f"nothing is seen of {parts}"
    if not reply.loose:
        half = next((part for part in parts[-1:] if is_cut and not part[3]), None)
        wanted = comparable(endpoint, expected(endpoint, parts), half)
        found_parts = comparable(endpoint, seen["parts"], half)
        if found_parts != wanted:
            yield f"parts: {found_parts}, not {wanted}"
        if seen["end"] != (end := ends(endpoint, reply, parts, cut=is_cut)):
            yield f"end: {seen['end']}, not {end}"
    thought = None if endpoint == MESSAGES else reply.thought(encode, cut)
    usage = [prompt, reply.made(encode, decode, cut), thought]
    if seen["usage"] != usage:
        yield f"usage: {seen['usage']}, not {usage}"


class Asked:
    def __init__(self, http: httpx2.AsyncClient, core: Core) -> None:
        self._http, self._core = http, core

    async def post(self, endpoint: str, body: dict[str, Any]) -> httpx2.Response:
        return await self._http.post(endpoint, json=body)

    async def faults(self, endpoint: str, reply: Reply, cut: int) -> list[str]:
        """Return what is wrong with the answers at a cut."""
        core, tokens = self._core, reply.tokens(encode)
        core.reply = tokens
        body = {**reply.body(endpoint), LIMITS[endpoint]: cut}
        found: list[str] = []
        core.size = 1 + cut % 3
        whole = await self.post(endpoint, body)
        options: dict[str, Any] = {"stream": True}
        if endpoint == CHAT:
            options["stream_options"] = {"include_usage": True}
        stream = await self.post(endpoint, body | options)
        prompt = len(core.prompt)
        documents = {}
        try:
            if whole.status_code != 200:
                found.append(f"whole: {whole.status_code}: {whole.text[:200]}")
            else:
                documents["whole"] = whole.json()
                found += views.faults_of_whole(endpoint, documents["whole"])
        except Exception as error:
            found.append(f"whole: {type(error).__name__}: {error}")
        try:
            found += views.faults_of_stream(endpoint, views.events(stream.content))
            documents["streamed"] = views.assembled(endpoint, stream.content)
        except Exception as error:
            found.append(f"streamed: {type(error).__name__}: {error}")
        seen = {name: views.view(endpoint, document) for name, document in documents.items()}
        for name, one in seen.items():
            found += [
                f"{name}: {fault}" for fault in faults_of_view(endpoint, reply, cut, prompt, one)
            ]
        if reply.loose and len(seen) == 2:
            whole_parts, streamed_parts = (
                comparable(endpoint, one["parts"], None) for one in seen.values()
            )
            if whole_parts != streamed_parts:
                found.append(f"whole {whole_parts}, streamed {streamed_parts}")
        if cut == len(tokens):
            first = core.prompt
            core.reply, core.size = answer_tokens(), 100
            for name, document in documents.items():
                again = faults_of_history(self, core, endpoint, reply, document, first)
                found += [f"{name}: {fault}" async for fault in again]
        return found


def answer_tokens() -> list[int]:
    return Reply((answer("Yes."),)).tokens(encode)


async def run(model: str, names: list[str]) -> dict[str, dict[str, list[str]]]:
    app, core = await application(model)
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    found: dict[str, dict[str, list[str]]] = {}
    async with httpx2.AsyncClient(transport=transport, base_url="http://t") as http:
        asked = Asked(http, core)
        for name in names:
            reply = REPLIES[name]
            found[name] = {}
            for endpoint in ENDPOINTS:
                lines: list[str] = []
                for cut in range(1, len(reply.tokens(encode)) + 1):
                    lines += [f"{cut}: {one}" for one in await asked.faults(endpoint, reply, cut)]
                found[name][endpoint] = lines
    return found


def main(request: Path, out: Path) -> None:
    asked = json.loads(request.read_text(encoding="utf-8"))
    out.write_text(json.dumps(asyncio.run(run(asked["model"], asked["replies"]))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
