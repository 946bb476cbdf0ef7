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
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.progress import Client, Counters

SECONDS = 6.0  # below the time-out of the image's HEALTHCHECK, which would hide the reason

MARK = Path(tempfile.gettempdir()) / "sparkforge-progress.json"


def last_seen() -> Counters | None:
    """Return the counters of the last check in this start of the container, if there was one."""
    try:
        mark = Document.load(MARK)
        if mark.get(str, "start") != state.this_start():
            return None
        return {str(name): str(value) for name, value in mark.get(dict, "counters").items()}
    except (FileNotFoundError, DocumentError):  # a check that was killed leaves half a file
        return None


class NotReadyError(Exception):
    """The server is not ready yet; the message gives its progress."""


class GivenUpError(Exception):
    """No server will be started any more; the message gives the reason."""


def check() -> None:
    """Check the server.

    Raises:
        NotReadyError, GivenUpError: there is no server to ask.
        router.NoReplicaError: this is the router, and none of its servers serves.
        Exception: the server is not healthy; the message has request and answer.
    """
    current = state.read()
    if current.given_up:
        raise GivenUpError(current.text)
    if current.text != state.READY:
        raise NotReadyError(current.text)
    if os.environ.get("SPARKFORGE_CLUSTER_ROLE") == "worker":
        cluster.check_mark()  # it takes no requests: healthy means a link to the head
        return
    if router.asked(os.environ):
        print(router.check())
        return
    client = Client(door.own_socket(), SECONDS)
    counters = client.observe(last_seen())
    document = json.dumps({"start": state.this_start(), "counters": counters})
    try:
        MARK.write_text(document, encoding="utf-8")
    except OSError as error:  # the server is healthy; the next check requests tokens again
        print(f"healthy; {MARK} cannot be written: {error}")


def one_line(error: Exception) -> str:
    """Return an error's message, short and printable."""
    text = " ".join(str(error).split())[:500]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


if __name__ == "__main__":
    try:
        check()
    except NotReadyError as error:
        print(f"starting: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except (GivenUpError, router.NoReplicaError) as error:
        print(f"unhealthy: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:  # one line for Docker's log, whatever it is
        print(f"unhealthy: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
