"""Is the server well? Ends with 0 if so, else with 1 and one line that says why.

While it starts (loading, warm-up) it is not well yet. Then well means progress: the engine has
taken a step since the last check, or makes a token now, for a prompt of one token and for a longer
one. The process that looks into vLLM's ``/health`` alone calls a stopped engine well.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

# the image's own copy lies beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import access, cluster, state
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.progress import Client, Counters
from sparkforge.serving.settings import listen_port

SECONDS = 6.0  # below the time-out of the image's HEALTHCHECK, so that the reason is still printed

MARK = Path(tempfile.gettempdir()) / "sparkforge-progress.json"


def last_seen() -> Counters | None:
    """Return the counters of the last check in this start of the container, if there was one."""
    try:
        mark = Document.load(MARK)
        if mark.get(str, "start") != state.this_start():
            return None
        return {str(name): str(value) for name, value in mark.get(dict, "counters").items()}
    except (FileNotFoundError, DocumentError):  # one that was killed while it wrote leaves half
        return None


class NotReadyError(Exception):
    """The model is downloaded or loaded, or the warm-up made; the message says how far it is."""


class GivenUpError(Exception):
    """No server will be started any more; the message says why."""


def check() -> None:
    """Raise an error where the server is not well.

    Raises:
        NotReadyError, GivenUpError: there is none to ask.
        Exception: its message says what was asked and answered.
    """
    found = state.read()
    if found.given_up:
        raise GivenUpError(found.words)
    if found.words != state.READY:
        raise NotReadyError(found.words)
    if os.environ.get("SPARKFORGE_CLUSTER_ROLE") == "worker":
        cluster.check_mark()  # it answers nobody: well means that the head is there
        return
    client = Client(listen_port(os.environ), SECONDS, access.api_key(os.environ))
    counters = client.observe(last_seen())
    document = json.dumps({"start": state.this_start(), "counters": counters})
    try:
        MARK.write_text(document, encoding="utf-8")
    except OSError as error:  # the server is well; the next check asks for tokens again
        print(f"healthy; {MARK} cannot be written: {error}")


def one_line(error: Exception) -> str:
    """Return an error's words, short and printable."""
    words = " ".join(str(error).split())[:500]
    return "".join(one if one.isprintable() else "?" for one in words)


if __name__ == "__main__":
    try:
        check()
    except NotReadyError as error:
        print(f"starting: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except GivenUpError as error:
        print(f"unhealthy: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:  # whatever it is, Docker's log is to have one line that says so
        print(f"unhealthy: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
