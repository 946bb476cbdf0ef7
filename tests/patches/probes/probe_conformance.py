"""Ask for replies of the table, cut, whole and streamed, and check the answers.

Arguments: a JSON file; the file for what is wrong, by reply and endpoint: lines that begin with the
cut. The first has ``replies``, names of the table with their cuts (none: every one), and where to
ask: ``model``, the folder of a checkpoint, for a server without an engine; or ``url``, ``key`` and
``words``, what calls each reply in a prompt, for one that runs.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

from tests.patches.conformance import (
    CHAT,
    LIMITS,
    MESSAGES,
    NAMED,
    REPLIES,
    RESPONSES,
    Part,
    Reply,
    as_json,
)
from tests.patches.probes import conformance_views as views
from tests.patches.probes.conformance_history import faults_of_history
from tests.patches.probes.engineless import Core, application

_HARMONY = re.compile(r"<\||functions|\bto\b|commentary|analysis|assistant")


@cache
def encode(text: str) -> list[int]:
    found: list[int] = get_encoding().encode(text, allowed_special="all")
    return found


def decode(tokens: list[int]) -> str:
    found: str = get_encoding().decode(tokens)
    return found


def expected(endpoint: str, reply: Reply, parts: list[Part]) -> list[list[Any]]:
    """Return the parts of a view that these messages have."""
    if endpoint == RESPONSES:
        found = []
        for kind, name, text, whole in parts:
            given = as_json(text)["input"] if name == "patch" and whole else text
            found.append([kind, name, given, "completed" if whole else "incomplete"])
        return found
    if not reply.tools:  # a call that nobody asked for is the answer
        parts = [("content", "", *part[2:]) if part[0] == "call" else part for part in parts]
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[list[Any]] = []
    for kind, name, text, _ in parts:
        if kind == "call":
            calls.append([kind, name, text if endpoint == CHAT else as_json(text), ""])
        elif text:
            texts[kind].append(text)
    return [[kind, "", "\n".join(some), ""] for kind, some in texts.items()] + calls


def comparable(endpoint: str, parts: list[list[Any]], cut: Part | None) -> list[list[Any]]:
    """Return parts without what may be there or not: empty texts, and of the message that was cut
    a half character, a call that has no arguments yet, and in /v1/messages half arguments.
    """
    found: list[list[Any]] = []
    for kind, name, text, status in parts:
        same = [part for part in found if part[0] == kind != "call"]
        if endpoint == MESSAGES and same:
            same[0][2] += text
        elif endpoint == MESSAGES and kind == "call":
            # its form has no place for arguments that are no object
            found.append([kind, name, text if isinstance(text, dict) else {}, status])
        elif kind == "call" or text:
            found.append([kind, name, text, status])
    if cut is not None and found and found[-1][0] == cut[0]:
        last = found[-1]
        if isinstance(last[2], str):
            last[2] = last[2].rstrip("\ufffd")
        if not last[2] or not isinstance(last[2], str):
            found.pop()
    return found


def ends(endpoint: str, reply: Reply, parts: list[Part], *, cut: bool) -> list[Any]:
    called = reply.tools and any(part[0] == "call" for part in parts)
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
    endpoint: str, reply: Reply, cut: int, prompt: int | None, seen: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what is wrong with a view; ``prompt`` is the number of its tokens, if it is known."""
    parts = reply.expected(encode, decode, cut)
    is_cut = cut < reply.made(encode, decode, len(reply.tokens(encode)))
    for part in seen["parts"]:
        if found := _HARMONY.search(f"{part[1]} {part[2]}"):
            yield f"Harmony: {found[0]!r} in {part}"
    if not is_cut and not any(part[0] == "call" or part[2] for part in seen["parts"]):
        yield f"nothing is seen of {parts}"
    if not (reply.loose and is_cut):
        half = next((part for part in parts[-1:] if is_cut and not part[3]), None)
        wanted = comparable(endpoint, expected(endpoint, reply, parts), half)
        found_parts = comparable(endpoint, seen["parts"], half)
        if found_parts != wanted:
            yield f"parts: {found_parts}, not {wanted}"
        if seen["end"] != (end := ends(endpoint, reply, parts, cut=is_cut)):
            yield f"end: {seen['end']}, not {end}"
    made = reply.made(encode, decode, cut)
    thought = None if endpoint == MESSAGES else reply.thought(encode, made)
    usage = [seen["usage"][0] if prompt is None else prompt, made, thought]
    if seen["usage"] != usage:
        yield f"usage: {seen['usage']}, not {usage}"


@dataclass(frozen=True)
class Asked:
    http: httpx2.AsyncClient
    core: Core | None = None

    async def faults(self, endpoint: str, reply: Reply, cut: int, question: str) -> list[str]:
        """Return what is wrong with the answers at a cut."""
        tokens = reply.tokens(encode)
        if self.core is not None:
            self.core.reply, self.core.size = tokens, 1 + cut % 3
        body = {**reply.body(endpoint, question), LIMITS[endpoint]: cut}
        options: dict[str, Any] = {"stream": True}
        if endpoint == CHAT:
            options["stream_options"] = {"include_usage": True}
        whole = await self.http.post(endpoint, json=body)
        stream = await self.http.post(endpoint, json=body | options)
        found: list[str] = []
        documents = {}
        if whole.status_code == 200:
            documents["whole"] = whole.json()
            found += views.faults_of_whole(endpoint, documents["whole"])
        else:
            found.append(f"whole: {whole.status_code}: {whole.text[:200]}")
        try:
            found += views.faults_of_stream(endpoint, views.events(stream.content))
            documents["streamed"] = views.assembled(endpoint, stream.content)
        except Exception as error:  # whatever a package says of it
            found.append(f"streamed: {type(error).__name__}: {error}: {stream.text[-200:]}")
        prompt = None if self.core is None else len(self.core.prompt)
        seen = {name: views.view(endpoint, document) for name, document in documents.items()}
        for name, one in seen.items():
            faults = faults_of_view(endpoint, reply, cut, prompt, one)
            found += [f"{name}: {fault}" for fault in faults]
        parts = [comparable(endpoint, one["parts"], None) for one in seen.values()]
        if reply.loose and len(parts) == 2 and parts[0] != parts[1]:
            found.append(f"whole {parts[0]}, streamed {parts[1]}")
        if self.core is not None and cut == len(tokens):
            first = self.core.prompt
            for name, document in documents.items():
                given = (endpoint, reply, document, first)
                faults_again = await faults_of_history(self.http, self.core, *given)
                found += [f"{name}: {fault}" for fault in faults_again]
        return found


async def run(given: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    if "model" in given:
        app, core = await application(given["model"])
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://t")
        asked, at_once = Asked(http, core), asyncio.Semaphore(1)
    else:
        headers = {"Authorization": f"Bearer {given['key']}"}
        http = httpx2.AsyncClient(base_url=given["url"], headers=headers, timeout=120)
        asked, at_once = Asked(http), asyncio.Semaphore(4)
    words = given.get("words", {})

    async def faults(name: str, endpoint: str, cut: int) -> list[str]:
        async with at_once:
            question = words.get(name, "Hello")
            found = await asked.faults(endpoint, REPLIES[name], cut, question)
        return [f"{cut}: {one}" for one in found]

    async def of(name: str, cuts: list[int] | None, endpoint: str) -> list[str]:
        every = range(1, len(REPLIES[name].tokens(encode)) + 1)
        found = await asyncio.gather(*(faults(name, endpoint, cut) for cut in cuts or every))
        return [line for lines in found for line in lines]

    async with http:
        return {
            name: {endpoint: await of(name, cuts, endpoint) for endpoint in REPLIES[name].endpoints}
            for name, cuts in given["replies"].items()
        }


def main(request: Path, out: Path) -> None:
    given = json.loads(request.read_text(encoding="utf-8"))
    out.write_text(json.dumps(asyncio.run(run(given))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
