"""A running server as ``accept`` sees it, and what a check of it is."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sparkforge.core.run import glimpse
from sparkforge.runtime import client
from sparkforge.runtime.client import Model, Place, Said
from sparkforge.serving.profile import Profile

ASK_S = 60.0
"""For one request, or one call of docker."""
_TOKENS = 512  # of an answer: reasoning of low effort takes tens, the rest is a reserve


class Unmet(Exception):
    """A check failed; the message says what was expected, and what came."""


class Unseen(Exception):
    """A check is not possible here; the message is the reason."""


@dataclass(frozen=True)
class Container:
    """A server's output since its last start, its user's own options, and its image."""

    log: str = ""
    options: Sequence[str] = ()
    image: str = ""
    problem: str = ""
    """Why none was found."""


@dataclass(frozen=True)
class Subject:
    """The server under test."""

    place: Place
    model: Model
    profile: Profile = field(default_factory=Profile)
    container: Container = field(default_factory=Container)
    long_tokens: int = 100_000

    def body(self, asked: str | Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Return a chat at temperature 0, of one question or of messages."""
        return {
            "model": self.model.name,
            "messages": [{"role": "user", "content": asked}] if isinstance(asked, str) else asked,
            "temperature": 0,
            "reasoning_effort": "low",
            "max_tokens": min(_TOKENS, max(1, self.model.max_len // 2)),
            **options,
        }

    def chat(self, asked: str | Sequence[Mapping[str, Any]], **options: Any) -> Said:
        """Ask without streaming."""
        return client.chat(self.place, self.body(asked, **options))

    def streamed(self, asked: str | Sequence[Mapping[str, Any]], **options: Any) -> Said:
        """Ask with streaming."""
        return client.streamed(self.place, self.body(asked, **options))

    def metrics(self, name: str) -> dict[str, float]:
        """Return the values of a metric in /metrics, by labels; raises Unseen."""
        text = client.look(self.place, "/metrics", ASK_S).text
        found = re.findall(rf"(?m)^{name}(?:\{{(.*)\}})? (\S+)$", text)
        if not found:
            raise Unseen(f"/metrics has no {name} (--disable-log-stats?)")
        return {labels: float(value) for labels, value in found}


def container_of(place: Place) -> Container:
    """Return Compose's container that publishes a port of this machine."""
    url = urlsplit(place.url)
    if url.hostname not in ("127.0.0.1", "::1", "localhost"):
        return Container(problem=f"{url.hostname} may be another machine: name its log with --log")
    port = f"publish={url.port or (443 if url.scheme == 'https' else 80)}"
    service = "label=com.docker.compose.service"
    try:
        names = _docker("ps", "-q", "--filter", service, "--filter", port).split()
        if not names:
            return Container(problem=f"no container of Compose has {port}")
        found = json.loads(_docker("inspect", names[0]))[0]
        output = _docker("logs", "--since", found["State"]["StartedAt"], names[0])
    except Unseen as why:
        return Container(problem=str(why))
    config = found["Config"]
    pairs = dict(text.partition("=")[::2] for text in config["Env"])
    own = (*pairs.get("SPARKFORGE_EXTRA_ARGS", "").split(), *(config["Cmd"] or ()))
    return Container(output, own, config.get("Image", ""))


def _docker(*words: str) -> str:
    """Return the output of docker, of both streams; raises Unseen."""
    seen = glimpse("docker", *words, timeout_s=ASK_S)
    if seen.code != 0:
        raise Unseen(f"docker {words[0]}: {shown(seen.problem or seen.err)}")
    return seen.out + (seen.err if words[0] == "logs" else "")


CHECKS: dict[str, tuple[str, Callable[[Subject], str]]] = {}
"""The checks by name, in their order, each with the hint for a failure."""
_Read = Callable[[Subject], str]


def check(hint: str = "see the server's log") -> Callable[[_Read], _Read]:
    """Add a function to the checks: its name and docstring are the check's."""

    def add(read: _Read) -> _Read:
        CHECKS[read.__name__.replace("_", " ")] = hint, read
        return read

    return add


def judge(name: str, subject: Subject) -> dict[str, Any]:
    """Return the result of a check, whatever the server does."""
    hint, read = CHECKS[name]
    began = time.monotonic()
    try:
        state, seen = "ok", read(subject)
    except Unseen as reason:
        state, seen = "not checked", str(reason)
    except Unmet as why:
        state, seen = "fail", str(why)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as why:
        # no answer, or one of another shape
        state, seen = "fail", f"expected an answer, got {type(why).__name__}: {shown(str(why))}"
    hint = hint if state == "fail" else ""
    seconds = round(time.monotonic() - began, 2)
    return {"name": name, "state": state, "seconds": seconds, "seen": seen, "hint": hint}


def need(truth: object, expected: str, got: object) -> None:
    """Raise Unmet unless ``truth`` is true."""
    if not truth:
        raise Unmet(f"expected {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """Return a value on one short line."""
    line = " ".join((value if isinstance(value, str) else repr(value)).split())
    printable = "".join(letter if letter.isprintable() else "?" for letter in line)
    return (printable if len(printable) <= 160 else f"{printable[:160]}…") or "nothing"
