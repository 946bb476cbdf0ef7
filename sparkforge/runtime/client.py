"""Requests to a running OpenAI server: one chat client for doctor's report and for accept.

Answers come from outside: a wrong shape is a ValueError, a broken connection an OSError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkforge.core import plain
from sparkforge.core.errors import UsageError

if TYPE_CHECKING:
    import requests

CHAT, COMPLETIONS, RESPONSES = "/chat/completions", "/completions", "/responses"
LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
SILENCE_S = 600.0
"""Longest time without a byte: a long prompt, or a kernel that is compiled."""
_SHOWN = 300  # characters of a server's text in a message
_MOST_BYTES = 64 << 20
"""Limit of an answer: no OpenAI server sends more. One of a whole context has some MiB."""
_PIECE_BYTES = 512  # of a stream: small, so that a piece is not held back for the next
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Address of a server."""

    url: str
    """With ``/v1`` at its end."""
    key: str = ""
    """API key, or ""."""

    @property
    def root(self) -> str:
        """The URL without ``/v1``: of ``/health`` and ``/metrics``."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class Model:
    """The served model: its name, and tokens of prompt and answer together."""

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
        return plain.json_of(self.text)


@dataclass(frozen=True)
class Said:
    """A chat's answer, streamed or not."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    finish: str = ""
    """``finish_reason``."""
    prompt_tokens: int = 0
    tokens: int = 0
    """``prompt_tokens``, ``tokens``: counted by the server; 0: it did not say."""
    reasoning_last: bool = False
    """Reasoning came after content."""
    complete: bool = True
    """The stream ended with ``[DONE]``."""
    moments: tuple[float, ...] = ()
    """Seconds from the request to each piece of a stream."""

    @property
    def empty(self) -> bool:
        """There is neither reasoning nor content nor a call."""
        return not (self.reasoning or self.content or self.calls)


def place_of(variables: Mapping[str, str], url: str | None = None) -> Place:
    """Return the server of Compose's variables, with the key in SPARKFORGE_API_KEY_FILE.

    Args:
        url: of another server, with or without ``/v1``; None: Compose's port.

    Raises:
        UsageError: it is no address of HTTP.
    """
    if url is None:
        bind = variables.get("SPARKFORGE_BIND") or LOOPBACK
        host = LOOPBACK if bind in ("0.0.0.0", "localhost") else bind
        port = variables.get("SPARKFORGE_PORT") or 8000
        return Place(f"http://{host}:{port}/v1", api_key(variables))
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
    """Return the key in the file that Compose mounts; "": none, or it cannot be read or sent."""
    named = variables.get("SPARKFORGE_API_KEY_FILE")
    try:
        key = Path(named).expanduser().read_text(encoding="utf-8").strip() if named else ""
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""  # requests then show the server's refusal
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
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        raise ValueError("the answer of /v1/models names no model") from None


def look(place: Place, path: str, timeout_s: float) -> Reply:
    """Return the answer of a page, such as ``/metrics``, whatever its status.

    Args:
        path: below the URL without ``/v1``.
    """
    with (
        session(place) as opened,
        opened.get(f"{place.root}{path}", stream=True, timeout=(CONNECT_S, timeout_s)) as answer,
    ):
        return Reply(answer.status_code, _text(answer))


def post(place: Place, path: str, body: Json | bytes, timeout_s: float = SILENCE_S) -> Reply:
    """Send a request; returns the answer, whatever its status.

    Args:
        body: a document; bytes are sent as they are, as JSON.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with (
        session(place) as opened,
        opened.post(
            f"{place.url}{path}",
            data=data,
            headers={"Content-Type": "application/json"},
            stream=True,
            timeout=timeout_s,  # also of the connection: it counts while a large body is sent
        ) as answer,
    ):
        return Reply(answer.status_code, _text(answer))


def chat(place: Place, body: Json) -> Said:
    """Ask without streaming."""
    found = post(place, CHAT, body).json()
    try:
        choice, usage = found["choices"][0], found.get("usage") or {}
        message = choice["message"]
        calls = tuple(_call(call) for call in message.get("tool_calls") or [])
        return Said(
            reasoning=str(_reasoning(message)),
            content=str(message.get("content") or ""),
            calls=calls,
            finish=choice.get("finish_reason") or "",
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            tokens=int(usage.get("completion_tokens") or 0),
        )
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError):
        raise ValueError(f"no answer of a chat: {json.dumps(found)[:_SHOWN]}") from None


def streamed(place: Place, body: Json) -> Said:
    """Ask with streaming, and read the answer to its end."""
    taken = _Pieces()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    event: Json | None = None
    try:
        for event in events(place, CHAT, {**body, **more}):
            taken.add(event)
        return taken.said()
    except (TypeError, KeyError, AttributeError, OverflowError):
        raise ValueError(f"no event of a chat: {json.dumps(event)[:_SHOWN]}") from None


def events(place: Place, path: str, body: Json) -> Generator[Json | None, None, None]:
    """Send a request that streams, and yield its events; None: ``[DONE]``.

    Closing the iterator hangs up, like a client that leaves.
    """
    with (
        session(place) as opened,
        opened.post(
            f"{place.url}{path}", json=body, stream=True, timeout=(CONNECT_S, SILENCE_S)
        ) as answer,
    ):
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {_text(answer)[:_SHOWN]}")
        for line in _lines(answer):
            name, _, data = line.decode(errors="replace").partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                yield None
                return
            event = plain.json_of(data)
            if isinstance(event, dict):
                if event.get("error"):
                    raise ValueError(f"an error in the stream: {data.strip()[:_SHOWN]}")
                yield event


def _lines(answer: requests.Response) -> Iterator[bytes]:
    """Yield the lines of a body as they come; requests' own would keep one without an end."""
    size, rest = 0, bytearray()
    for piece in answer.iter_content(_PIECE_BYTES):
        size += len(piece)
        _check(size)
        first, *more = piece.split(b"\n")
        rest += first
        for part in more:
            yield bytes(rest)
            rest = bytearray(part)
    if rest:
        yield bytes(rest)


def _text(answer: requests.Response) -> str:
    """Read a body."""
    found = bytearray()
    for piece in answer.iter_content(1 << 16):
        found += piece
        _check(len(found))
    return found.decode(errors="replace")


def _check(size: int) -> None:
    if size > _MOST_BYTES:
        raise OSError(f"an answer of more than {_MOST_BYTES >> 20} MiB")


def session(place: Place) -> requests.Session:
    """Return a session with the key, and without the machine's proxy."""
    import requests  # 0.5 s, for which most commands have no use

    opened = requests.Session()
    opened.trust_env = False  # a proxy has no way to this machine's own server
    if place.key:
        opened.headers["Authorization"] = f"Bearer {place.key}"
    return opened


@dataclass
class _Pieces:
    """Events of a stream, put together. State: the parts so far."""

    began: float = field(default_factory=time.monotonic)
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    moments: list[float] = field(default_factory=list)
    finish: str = ""
    usage: Json = field(default_factory=dict)
    complete: bool = False
    reasoning_last: bool = False

    def add(self, event: Json | None) -> None:
        if event is None:
            self.complete = True
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or []:
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice.get("delta") or {}
            thought, text = _reasoning(delta), delta.get("content") or ""
            self.reasoning_last |= bool(thought and self.content)
            self.reasoning += [thought] if thought else []
            self.content += [text] if text else []
            calls = delta.get("tool_calls") or []
            for call in calls:
                made = _call(call)
                kept = self.calls.setdefault(int(call.get("index") or 0), ["", "", ""])
                kept[0] = kept[0] or made.id
                kept[1] += made.name
                kept[2] += made.arguments
            if thought or text or calls:
                self.moments.append(time.monotonic() - self.began)

    def said(self) -> Said:
        return Said(
            "".join(self.reasoning),
            "".join(self.content),
            tuple(Call(*parts) for parts in self.calls.values()),
            self.finish,
            int(self.usage.get("prompt_tokens") or 0),
            int(self.usage.get("completion_tokens") or 0),
            self.reasoning_last,
            self.complete,
            tuple(self.moments),
        )


def _reasoning(message: Json) -> str:
    # two names for it: vLLM's releases changed from one to the other
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _call(call: Json) -> Call:
    function = call.get("function") or {}
    return Call(
        str(call.get("id") or ""),
        str(function.get("name") or ""),
        str(function.get("arguments") or ""),
    )
