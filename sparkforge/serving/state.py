"""What the entrypoint tells the health check: is the server still to be called *starting*?

The two are processes of their own. A file in the folder for temporary files joins them; the mark in
it tells this start of the container from earlier ones.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

READY = "ready"


def this_start() -> str:
    """When process 1 began: what an earlier start of this container left does not count."""
    return Path("/proc/1/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]


def path() -> Path:
    """Return where the state lies."""
    return Path(tempfile.gettempdir()) / "sparkforge-state.json"


def write(words: str) -> None:
    """Say how far the server is; ``READY`` once it may be called healthy.

    Raises:
        OSError: the folder for temporary files cannot be written.
    """
    whole = path().with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps({"start": this_start(), "state": words}), encoding="utf-8")
    whole.replace(path())


def read() -> str:
    """Return how far the server is; ``READY`` where nobody said."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return READY
    if not isinstance(found, dict) or found.get("start") != this_start():
        return READY
    return str(found.get("state", READY))
