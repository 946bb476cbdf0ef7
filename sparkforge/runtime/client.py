"""Requests to a running OpenAI server.

An answer of another shape is a ValueError, a broken connection an OSError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkforge.core.errors import ServerError, UsageError

if TYPE_CHECKING:
    import requests

CHAT, COMPLETIONS, RESPONSES = "/chat/completions", "/completions", "/responses"
LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
SILENCE_S = 600.0
"""Longest time without a byte: a long prompt, or a kernel that is compiled."""
_SHOWN = 300  # characters of a server's text in a message
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Address of a server.

    Attributes:
        url: with ``/v1`` at its end.
        key: API key, or "".
    """

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
class Call:
    """A tool call; ``arguments`` should be JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """An answer that was not streamed."""

    status: int
    text: str

    def json(self) -> Any:
        """Return the body of an answer with status 200."""
        if self.status != 200:
            raise ValueError(f"status {self.status}: {self.text[:_SHOWN]}")
        try:
            return json.loads(self.text)
        except RecursionError as error:
            raise ValueError(f"not JSON: {error}") from None


@dataclass(frozen=True)
class Said:
    """A chat's answer, streamed or not.

    Attributes:
        finish: ``finish_reason``.
        prompt_tokens, tokens: counted by the server; 0: unknown.
        reasoning_last: reasoning came after content.
        complete: the stream ended with ``[DONE]``.
        moments: seconds from the request to each piece of a stream.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    reasoning_last: bool = False
    complete: bool = True
    moments: tuple[float, ...] = ()

    @property
    def empty(self) -> bool:
        """There is neither reasoning nor content nor a call."""
        return not (self.reasoning or self.content or self.calls)


def place_of(variables: Mapping[str, str], url: str | None = None) -> Place:
    """Return the server of Compose's variables, with the key in SPARKFORGE_API_KEY_FILE.

    Args:
        url: of another server, with or without ``/v1``; None: Compose's address and port.

    Raises:
        UsageError: it is no address of HTTP.
    """
    if url is None:
        bind = (variables.get("SPARKFORGE_BIND") or LOOPBACK).strip("[]")
        host = {"0.0.0.0": LOOPBACK, "localhost": LOOPBACK, "::": "::1"}.get(bind, bind)
        host = f"[{host}]" if ":" in host else host
        url = f"http://{host}:{variables.get('SPARKFORGE_PORT') or 8000}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # a password would be in results, and in the arguments of llama-benchy
        good = good and not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{url!r} is not the URL of a server", "for example http://127.0.0.1:8000")
    return Place(f"{url.rstrip('/').removesuffix('/v1')}/v1", api_key(variables))


def api_key(variables: Mapping[str, str]) -> str:
    """Return the key in the file that Compose mounts; "": none, or unreadable."""
    named = variables.get("SPARKFORGE_API_KEY_FILE")
    try:
        key = Path(named).expanduser().read_text(encoding="utf-8").strip() if named else ""
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""  # the server then answers 401
    return key if is_key(key) else ""


def is_key(text: str) -> bool:
    """Return whether a header can carry a key; the error about another would show it."""
    return len(text.split()) == 1 and text.isascii() and text.isprintable()


def model_of(place: Place) -> Model:
    """Return the model that a server serves.

    Raises:
        ConnectionError: nothing answers there.
        OSError: the answer breaks off.
        ValueError: it is an error, or no list of models.
    """
    import requests

    try:
        found = look(place, "/v1/models", CONNECT_S).json()
    except requests.ConnectionError as error:
        raise ConnectionError(str(error)) from None
    try:
        first = found["data"][0]
        return Model(str(first["id"]), int(first.get("max_model_len") or 4096))
    except (TypeError, LookupError, AttributeError, OverflowError):
        raise ValueError("the answer of /v1/models names no model") from None


def served_model(place: Place) -> Model:
    """Return the model of a server that must run.

    Raises:
        ServerError: it does not answer, or refuses the key.
    """
    try:
        return model_of(place)
    except ConnectionError:
        msg = f"nothing answers at {place.url}"
        hint = "start it (docker compose up -d), wait until it is healthy, or give --url"
        raise ServerError(msg, hint) from None
    except (OSError, ValueError) as error:
        msg = f"{place.url}/models: {error}"
        hint = "the API key is in the file that SPARKFORGE_API_KEY_FILE (bench: --api-key-file)"
        raise ServerError(msg, f"{hint} names; the URL has no path") from None


def look(place: Place, path: str, timeout_s: float) -> Reply:
    """Return the answer to a GET, such as of ``/metrics``, whatever its status.

    Args:
        path: below the URL without ``/v1``.
    """
    with session(place) as opened:
        answer = opened.get(f"{place.root}{path}", timeout=(CONNECT_S, timeout_s))
        return Reply(answer.status_code, answer.content.decode(errors="replace"))


def post(place: Place, path: str, body: Json | bytes, timeout_s: float = SILENCE_S) -> Reply:
    """Send a request; return the answer, whatever its status.

    Args:
        body: a document; bytes are sent as they are, as JSON.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with session(place) as opened:
        answer = opened.post(f"{place.url}{path}", data=data, headers=headers, timeout=timeout_s)
        return Reply(answer.status_code, answer.content.decode(errors="replace"))


def chat(place: Place, body: Json) -> Said:
    """Ask without streaming."""
    found = post(place, CHAT, body).json()
    try:
        choices = [{**choice, "delta": choice["message"]} for choice in found["choices"][:1]]
        return _said([{**found, "choices": choices}, None])
    except (TypeError, LookupError, AttributeError):
        raise ValueError(f"no answer of a chat: {json.dumps(found)[:_SHOWN]}") from None


def streamed(place: Place, body: Json) -> Said:
    """Ask with streaming, and read the answer to its end."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        return _said(events(place, CHAT, {**body, **more}))
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"no event of a chat: {error!r}") from None


def _said(found: Iterable[Json | None]) -> Said:
    """Put the events of an answer together."""
    began = time.monotonic()
    reasoning, content, finish = "", "", ""
    calls: dict[int, list[str]] = {}
    moments: list[float] = []
    usage: Json = {}
    complete = reasoning_last = False
    for event in found:
        if event is None:
            complete = True
            break
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            finish = choice.get("finish_reason") or finish
            delta = choice["delta"]
            # two names for it: vLLM's releases changed from one to the other
            thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
            text, called = delta.get("content") or "", delta.get("tool_calls") or []
            reasoning_last |= bool(thought and content)
            reasoning, content = reasoning + thought, content + text
            for at, call in enumerate(called):
                kept = calls.setdefault(call.get("index") or at, ["", "", ""])
                function = call["function"]
                kept[0] = kept[0] or call.get("id") or ""
                kept[1] += function.get("name") or ""
                kept[2] += function.get("arguments") or ""
            if thought or text or called:
                moments.append(time.monotonic() - began)
    return Said(
        reasoning,
        content,
        tuple(Call(*parts) for parts in calls.values()),
        finish,
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        reasoning_last,
        complete,
        tuple(moments),
    )


def events(place: Place, path: str, body: Json) -> Generator[Json | None, None, None]:
    """Send a request that streams, and yield its events; None: ``[DONE]``.

    Closing the generator hangs up, like a client that leaves.
    """
    with (
        session(place) as opened,
        opened.post(
            f"{place.url}{path}", json=body, stream=True, timeout=(CONNECT_S, SILENCE_S)
        ) as answer,
    ):
        if answer.status_code != 200:
            raise ValueError(
                f"status {answer.status_code}: {answer.content.decode(errors='replace')[:_SHOWN]}"
            )
        for line in answer.iter_lines():
            name, _, data = line.decode(errors="replace").partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                yield None
                return
            event = json.loads(data)
            if event.get("error"):
                raise ValueError(f"an error in the stream: {data.strip()[:_SHOWN]}")
            yield event


def session(place: Place) -> requests.Session:
    """Return a session with the key, and without the machine's proxy."""
    import requests  # 0.5 s, for which most commands have no use

    opened = requests.Session()
    opened.trust_env = False  # a proxy has no way to this machine's own server
    if place.key:
        opened.headers["Authorization"] = f"Bearer {place.key}"
    return opened
