"""The entrypoint's lines in the container's log."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line between the server's."""
    print(f"entrypoint: {text}", file=sys.stderr, flush=True)
