"""A check: its subject, and its row of the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkforge.inspect.accept.behind import Behind, Unseen
from sparkforge.runtime.client import Model, Place
from sparkforge.serving.profile import Profile

State = Literal["ok", "fail", "not checked"]
STATES: tuple[State, ...] = ("ok", "fail", "not checked")
LOAD, ACCURACY = "load: ", "accuracy"
"""Start of the names of the rows of ``--load``, and the name of the row of ``--gpqa``."""
_TOKENS = 512  # of an answer: reasoning of low effort takes tens, the rest is a reserve
_SHOWN = 160  # characters of a server's words in a row


@dataclass(frozen=True)
class Subject:
    """The server under test.

    Attributes:
        profile: of the target; ``answers``: its model has its real weights, so words are judged.
        behind: the server's process, as far as it is visible.
        long_tokens: limit for the long prompt.
    """

    place: Place
    model: Model
    profile: Profile = field(default_factory=Profile)
    behind: Behind = field(default_factory=Behind)
    long_tokens: int = 100_000

    def body(
        self, asked: str | Sequence[Mapping[str, Any]], tokens: int = _TOKENS, **options: Any
    ) -> dict[str, Any]:
        """Return a chat at temperature 0, of one question or of messages."""
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return {
            "model": self.model.name,
            "messages": messages,
            "temperature": 0,
            "reasoning_effort": "low",
            "max_tokens": min(tokens, max(1, self.model.max_len // 2)),
            **options,
        }


class Unmet(Exception):
    """A check failed.

    Args:
        hint: the next step; "": the check's own.
    """

    def __init__(self, expected: str, got: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected, self.got, self.hint = expected, got, hint


def need(truth: object, expected: str, got: object, hint: str = "") -> None:
    """Raise Unmet unless ``truth`` is true."""
    if not truth:
        raise Unmet(expected, shown(got), hint)


def shown(value: object) -> str:
    """Return a value on one short line."""
    text = value if isinstance(value, str) else repr(value)
    line = " ".join(text.split())
    return ascii(line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…")[1:-1] or "nothing"


@dataclass(frozen=True)
class Check:
    """One promise.

    Attributes:
        what: its subject; Markdown.
        hint: for a failure without its own.
        run: returns the reading; raises Unmet or Unseen.
    """

    name: str
    what: str
    hint: str
    run: Callable[[Subject], str]


@dataclass(frozen=True)
class Row:
    """The result of a check.

    Attributes:
        seen: the reading; "" if it failed, the reason if it was not checked.
        expected, got, hint: of a failure.
    """

    name: str
    state: State
    seconds: float
    seen: str = ""
    expected: str = ""
    got: str = ""
    hint: str = ""

    @property
    def words(self) -> str:
        """The verdict in one line."""
        if self.state == "fail":
            return f"expected {self.expected}, got {self.got}"
        return self.seen


def judged(check: Check, subject: Subject) -> Row:
    """Run one check; return its row, whatever the server does."""
    began = time.monotonic()

    def row(state: State, **more: str) -> Row:
        return Row(check.name, state, round(time.monotonic() - began, 2), **more)

    try:
        return row("ok", seen=check.run(subject))
    except Unseen as reason:
        return row("not checked", seen=str(reason))
    except Unmet as error:
        return row("fail", expected=error.expected, got=error.got, hint=error.hint or check.hint)
    except (OSError, ValueError) as error:  # no answer, or one of unknown shape
        got = f"{type(error).__name__}: {shown(str(error))}"
        return row("fail", expected="an answer", got=got, hint=check.hint)
