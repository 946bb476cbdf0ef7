"""Is the server well? Ends with 0 if so, else with 1 and one line that says why.

While it starts (loading, warm-up) it is not well yet. Then well means progress: the engine has
taken a step since the last check, or makes one token now. The process that looks into vLLM's
``/health`` alone calls a stopped engine well.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

# the image's own copy lies beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import access, cluster, state
from sparkforge.serving.progress import PROBLEMS, Client, Counters

SECONDS = 6.0  # below the time-out of the image's HEALTHCHECK, so that the reason is still printed

MARK = Path(tempfile.gettempdir()) / "sparkforge-progress.json"


def last_seen() -> Counters | None:
    """Return the counters of the last check in this start of the container, if there was one."""
    try:
        mark = json.loads(MARK.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # ValueError: a check that was killed while it wrote
        return None
    if not isinstance(mark, dict) or mark.get("start") != state.this_start():
        return None
    counters: Counters = mark["counters"]
    return counters


class NotReadyError(Exception):
    """The server loads its model or makes its warm-up; the message says how far it is."""


def check() -> None:
    """Raise one of ``PROBLEMS``, AccessError or NotReadyError where the server is not well."""
    if os.environ.get("SPARKFORGE_CLUSTER_ROLE") == "worker":
        cluster.check_mark()  # it answers nobody: well means that the head is there
        return
    if (words := state.read()) != state.READY:
        raise NotReadyError(words)
    port = int(os.environ.get("SPARKFORGE_LISTEN_PORT") or "8000")
    client = Client(port, SECONDS, access.api_key(os.environ))
    counters = client.observe(last_seen())
    MARK.write_text(
        json.dumps({"start": state.this_start(), "counters": counters}), encoding="utf-8"
    )


if __name__ == "__main__":
    try:
        check()
    except NotReadyError as error:
        print(f"starting: {error}", file=sys.stderr)
        sys.exit(1)
    except (*PROBLEMS, access.AccessError) as error:
        print(f"unhealthy: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
