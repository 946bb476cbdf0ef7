"""The state of the server, from the entrypoint to the health check.

The two are separate processes. They share a file in the folder for temporary files, and the file
names this start of the container: a state from an earlier start does not count.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.log import say

READY = "ready"


def this_start() -> str:
    """Return the start time of process 1, which identifies this start of the container."""
    return Path("/proc/1/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]


def path() -> Path:
    """Return the file of the state."""
    return Path(tempfile.gettempdir()) / "sparkforge-state.json"


@dataclass(frozen=True)
class State:
    """Progress of the server."""

    text: str
    """For the health check's line; ``READY`` once the server may count as healthy."""
    given_up: bool = False
    """No server will be started any more; the text gives the reason."""


def write(state: State) -> None:
    """Store the state; OSError if the folder for temporary files cannot be written."""
    temporary = path().with_suffix(f".{os.getpid()}")
    document = {"start": this_start(), **asdict(state)}
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.replace(path())


def tell(text: str, *, given_up: bool = False) -> None:
    """Store the state; a failure is logged."""
    try:
        write(State(text, given_up))
    except OSError as error:
        say(f"warning: the health check does not get the server's state: {error}")


def read() -> State:
    """Return the state; ``READY`` where there is none of this start: then the server is asked."""
    try:
        document = Document.load(path())
        if document.get(str, "start") == this_start():
            return State(document.get(str, "text"), document.get(bool, "given_up"))
    except (FileNotFoundError, DocumentError):
        pass
    return State(READY)
