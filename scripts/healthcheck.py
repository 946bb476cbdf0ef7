"""The image's health check: exit code 0, or 1 and one line with the reason.

A server that starts (loading, warm-up) is not healthy yet. After that, healthy means progress: the
engine has taken a step since the last check, or makes a token now, for a prompt of one token and
for a longer one. vLLM's ``/health`` alone reports a stopped engine as healthy.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

# the image's own copy is beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import cluster, door, router, state
from sparkforge.serving.progress import Client, Counters

SECONDS = 6.0  # below the time-out of the image's HEALTHCHECK, which would hide the reason

MARK = Path(tempfile.gettempdir()) / "sparkforge-progress.json"


def last_seen() -> Counters | None:
    """Return the counters of the last check in this start of the container, if there was one."""
    try:
        mark = json.loads(MARK.read_bytes())
        return dict(mark["counters"]) if mark["start"] == state.this_start() else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None  # a check that was killed leaves half a file


def check() -> str:
    """Check the server; returns the reason why it is not healthy, or "".

    Raises:
        Exception: the server is not healthy; the message has request and answer.
    """
    current = state.read()
    if current.given_up:
        return f"unhealthy: {current.text}"
    if current.text != state.READY:
        return f"starting: {current.text}"
    if os.environ.get("SPARKFORGE_CLUSTER_ROLE") == "worker":
        cluster.check_mark()  # it takes no requests: healthy means a link to the head
    elif router.asked(os.environ):
        print(router.check())
    else:
        counters = Client(door.own_socket(), SECONDS).observe(last_seen())
        document = json.dumps({"start": state.this_start(), "counters": counters})
        try:
            MARK.write_text(document, encoding="utf-8")
        except OSError as error:  # the server is healthy; the next check requests tokens again
            print(f"healthy; {MARK} cannot be written: {error}")
    return ""


if __name__ == "__main__":
    try:
        problem = check()
    except Exception as error:  # one line for Docker's log, whatever it is
        problem = f"unhealthy: {type(error).__name__}: {error}"
    if problem:
        text = " ".join(problem.split())[:500]
        sys.exit("".join(letter if letter.isprintable() else "?" for letter in text))
