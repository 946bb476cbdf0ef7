"""The question that a server has to answer before it counts as healthy, on a stand-in for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sparkforge.serving.document import Document

from sparkforge.serving import answers
from sparkforge.serving.progress import Client, StatusError
from tests.support import PATIENCE_S

RIGHT = {"content": "17 + 25 = 42.", "reasoning": "Add them."}


def chat(message: Any) -> bytes:
    return json.dumps({"choices": [{"message": message}]}).encode()


def check(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, Mapping[str, Any]], bytes]
) -> tuple[str, list[str]]:
    """Ask a server that answers so, by the number of the request; returns problem and log."""
    said: list[str] = []
    numbers: list[int] = []
    lock = threading.Lock()

    def ask(self: Client, end: float, method: str, path: str, body: Mapping[str, Any]) -> bytes:
        with lock:
            numbers.append(len(numbers))
            number = numbers[-1]
        return answer(number, body)

    monkeypatch.setattr(Client, "ask", ask)
    return answers.check(Client(Path("/nowhere"), 1.0), "the-model", 4096, said.append), said


def test_right_answers_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Mapping[str, Any]] = []
    together = threading.Barrier(answers.TOGETHER)

    def answer(number: int, body: Mapping[str, Any]) -> bytes:
        bodies.append(body)
        if number:  # all of them are on their way before the first is answered
            together.wait(PATIENCE_S)
        return chat(RIGHT)

    problem, said = check(monkeypatch, answer)
    assert problem == ""
    assert len(said) == 2
    assert len(bodies) == 1 + answers.TOGETHER
    assert all(one["temperature"] == 0 and one["model"] == "the-model" for one in bodies)
    assert len({one["cache_salt"] for one in bodies}) == len(bodies)


@pytest.mark.parametrize(
    "message",
    [RIGHT, {"content": None, "reasoning": "17 and 25 make 42"}, {"content": "**42**"}],
    ids=["both", "cut off in its reasoning", "no reasoning"],
)
def test_right(message: Any) -> None:
    assert answers.judge(Document.parse("an answer", chat(message))) == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": None, "reasoning": None}, "without content and reasoning"),
        ({}, "without content and reasoning"),
        ({"content": "", "reasoning": " \n"}, "without content and reasoning"),
        ({"content": "1742 or 425"}, "42 is not in the answer, which ends with '1742 or 425'"),
        ({"content": "\x1b[2J\U0001f600!!!!", "reasoning": "!!"}, r"\x1b[2J\U0001f600!!!!'"),
    ],
    ids=["null", "missing", "empty", "another number", "garbage"],
)
@pytest.mark.parametrize("at", [0, 5], ids=["alone", "one of eight"])
def test_wrong(monkeypatch: pytest.MonkeyPatch, message: Any, words: str, at: int) -> None:
    problem, _ = check(monkeypatch, lambda number, body: chat(message if number == at else RIGHT))
    which = "1 of 8 at once" if at else "asked alone"
    assert problem.startswith(f"'What is 17 + 25?', {which}: ")
    assert words in problem
    assert "\n" not in problem
    assert problem.isascii()
    assert problem.isprintable()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError("late"), "no complete answer within 300 s"),
        (ConnectionResetError("gone"), "ConnectionResetError: gone"),
        (StatusError(500, "POST /v1/chat/completions: 500 no"), "StatusError: POST /v1/chat"),
    ],
    ids=["slow", "gone", "refused"],
)
def test_no_answer(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def answer(number: int, body: Mapping[str, Any]) -> bytes:
        raise error

    problem, _ = check(monkeypatch, answer)
    assert words in problem


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"choices": []}', chat([]), chat({"content": 4})])
def test_odd_shapes(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    problem, _ = check(monkeypatch, lambda number, body: answer)
    assert "DocumentError: " in problem
