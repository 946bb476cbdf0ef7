"""Requests to a running OpenAI server.

An answer of another shape is a ValueError, a broken connection an OSError.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.core.errors import ServerError, UsageError

if TYPE_CHECKING:
    import requests

CHAT, COMPLETIONS = "/chat/completions", "/completions"
LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
SILENCE_S = 600.0
"""Longest time without a byte: a long prompt, or a kernel that is compiled."""
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """A server: its URL, with ``/v1`` at the end, and the API key, or ""."""

    url: str
    key: str = ""

    @property
    def root(self) -> str:
        """The URL without ``/v1``: of ``/health`` and ``/metrics``."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class Model:
    """The served model: its name, and the limit for tokens of prompt and answer together."""

    name: str
    max_len: int


@dataclass(frozen=True)
class Reply:
    """An answer that was not streamed."""

    status: int
    text: str

    def json(self) -> Any:
        """Return the body of an answer with status 200."""
        if self.status != 200:
            raise ValueError(f"status {self.status}: {self.text[:300]}")
        return json.loads(self.text)


@dataclass
class Said:
    """A chat's answer, streamed or not; the server counted the tokens (0: unknown)."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    """Of tools: id, name and arguments, which should be JSON."""
    finish: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    reasoning_last: bool = False
    """Reasoning came after content."""
    complete: bool = True
    """The stream ended with ``[DONE]``."""
    moments: list[float] = field(default_factory=list)
    """Seconds from the request to each piece of a stream."""


def place_of(variables: Mapping[str, str], url: str | None = None) -> Place:
    """Return Compose's server, or that of a URL (UsageError: it is none), with Compose's key."""
    if url is None:
        host = (variables.get("SPARKFORGE_BIND") or LOOPBACK).strip("[]")
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
        host = f"[{host}]" if ":" in host else host
        url = f"http://{host}:{variables.get('SPARKFORGE_PORT') or 8000}"
    # without a password, which would be in results, and in the arguments of llama-benchy
    if not re.fullmatch(r"https?://([\w.-]+|\[[\w:.]+\])(:\d+)?(/[^?#]*)?", url):
        raise UsageError(f"{url!r} is not the URL of a server", "for example http://127.0.0.1:8000")
    return Place(f"{url.rstrip('/').removesuffix('/v1')}/v1", api_key(variables))


def api_key(variables: Mapping[str, str]) -> str:
    """Return the key in the file that Compose mounts; "": none, or none that a header can carry."""
    named = variables.get("SPARKFORGE_API_KEY_FILE")
    try:
        key = Path(named).expanduser().read_text(encoding="utf-8").strip() if named else ""
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""  # the server then answers 401
    return key if len(key.split()) == 1 and key.isascii() and key.isprintable() else ""


def served_model(place: Place) -> Model:
    """Return the model of a server; ServerError if it does not answer, or refuses the key."""
    try:
        first = look(place, "/v1/models", CONNECT_S).json()["data"][0]
        return Model(str(first["id"]), int(first.get("max_model_len") or 4096))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        hint = (
            "start it (build.py up), wait until it is healthy, or give --url; the API key"
            " is in the file that SPARKFORGE_API_KEY_FILE names"
        )
        raise ServerError(f"{place.url}/models names no model: {error}", hint) from None


def look(place: Place, path: str, timeout_s: float) -> Reply:
    """Return the answer to a GET, whatever its status; ``path`` is below the URL without /v1."""
    with _session(place) as session:
        return _reply(session.get(f"{place.root}{path}", timeout=(CONNECT_S, timeout_s)))


def post(place: Place, path: str, body: Json) -> Reply:
    """Send a document; return the answer, whatever its status."""
    with _session(place) as session:
        return _reply(session.post(f"{place.url}{path}", json=body, timeout=SILENCE_S))


def events(place: Place, path: str, body: Json) -> Generator[Json | None, None, None]:
    """Send a request that streams, and yield its events; None: ``[DONE]``. Closing it hangs up."""
    url, limits = f"{place.url}{path}", (CONNECT_S, SILENCE_S)
    with (
        _session(place) as session,
        session.post(url, json=body, stream=True, timeout=limits) as answer,
    ):
        if answer.status_code != 200:
            _reply(answer).json()
        for line in answer.iter_lines():
            name, _, data = line.decode(errors="replace").partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                yield None
                return
            event = json.loads(data)
            if event.get("error"):
                raise ValueError(f"an error in the stream: {data.strip()[:300]}")
            yield event


def _reply(answer: requests.Response) -> Reply:
    return Reply(answer.status_code, answer.content.decode(errors="replace"))


def _session(place: Place) -> requests.Session:
    import requests  # 0.5 s, for which most commands have no use

    session = requests.Session()
    session.trust_env = False  # a proxy has no way to this machine's own server
    if place.key:
        session.headers["Authorization"] = f"Bearer {place.key}"
    return session


def chat(place: Place, body: Json) -> Said:
    """Ask without streaming; an answer of another shape is any error of a lookup or a type."""
    found = post(place, CHAT, body).json()
    (choice,) = found["choices"]
    return _said([{**found, "choices": [{**choice, "delta": choice["message"]}]}, None])


def streamed(place: Place, body: Json) -> Said:
    """Ask with streaming, and read the answer to its end; raises what ``chat`` does."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    return _said(events(place, CHAT, {**body, **more}))


def _said(found: Iterable[Json | None]) -> Said:
    began, said = time.monotonic(), Said(complete=False)
    for event in found:
        if event is None:
            said.complete = True
            break
        if usage := event.get("usage"):
            said.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            said.tokens = int(usage.get("completion_tokens") or 0)
        for choice in event.get("choices") or []:
            said.finish = choice.get("finish_reason") or said.finish
            delta = choice["delta"]
            # two names for it: vLLM's releases changed from one to the other
            thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
            text, called = delta.get("content") or "", delta.get("tool_calls") or []
            said.reasoning_last |= bool(thought and said.content)
            said.reasoning, said.content = said.reasoning + thought, said.content + text
            for at, call in enumerate(called):
                if (call.get("index") or at) == len(said.calls):
                    said.calls.append({"id": call["id"], "name": "", "arguments": ""})
                kept, function = said.calls[call.get("index") or at], call["function"]
                kept["name"] += function.get("name") or ""
                kept["arguments"] += function.get("arguments") or ""
            if thought or text or called:
                said.moments.append(time.monotonic() - began)
    return said
