"""What the entrypoint tells the health check: is the server still to be called *starting*?

The two are processes of their own. A file in the folder for temporary files joins them; the mark in
it tells this start of the container from earlier ones.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.document import Document, DocumentError

READY = "ready"


def this_start() -> str:
    """When process 1 began: what an earlier start of this container left does not count."""
    return Path("/proc/1/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]


def path() -> Path:
    """Return where the state lies."""
    return Path(tempfile.gettempdir()) / "sparkforge-state.json"


@dataclass(frozen=True)
class State:
    """How far the server is.

    Attributes:
        words: for the health check's line; ``READY`` once the server may be called healthy.
        given_up: no server will be started any more; the words say why.
    """

    words: str
    given_up: bool = False


def write(state: State) -> None:
    """Say how far the server is.

    Raises:
        OSError: the folder for temporary files cannot be written.
    """
    whole = path().with_suffix(f".{os.getpid()}")
    document = {"start": this_start(), "state": state.words, "given_up": state.given_up}
    whole.write_text(json.dumps(document), encoding="utf-8")
    whole.replace(path())


def read() -> State:
    """Return how far the server is; ``READY`` where nobody said, or no file of ours is there."""
    try:
        found = Document.load(path())
        if found.get(str, "start") == this_start():
            return State(found.get(str, "state"), found.get(bool, "given_up"))
    except (FileNotFoundError, DocumentError):
        pass  # then the server itself is asked
    return State(READY)
