"""The tools of the clients that tests run, and what was called."""

import json
from collections.abc import Callable
from typing import Any

CALLED: list[list[Any]] = []


def weather(city: str) -> str:
    """Weather of a city."""
    CALLED.append(["weather", {"city": city}])
    return json.dumps({"degrees": 21})


def add(a: int, b: int) -> str:
    """Add two numbers."""
    CALLED.append(["add", {"a": a, "b": b}])
    return str(a + b)


FUNCTIONS: dict[str, Callable[..., str]] = {"weather": weather, "add": add}


def _schema(kind: str, *names: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name in names}
    return {"type": "object", "properties": properties, "required": list(names)}


SCHEMAS = {"weather": _schema("string", "city"), "add": _schema("integer", "a", "b")}


def run(name: str, arguments: str | dict[str, Any]) -> str:
    """Run a tool with a call's arguments."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return FUNCTIONS[name](**found)


def report(answer: str | None, cut: object) -> None:
    """Print what a client did, for the test: calls, answer, and what it says of a cut answer."""
    print(json.dumps({"called": CALLED, "answer": answer, "cut": cut}), flush=True)
    CALLED.clear()
