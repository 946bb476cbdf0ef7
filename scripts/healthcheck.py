"""The image's health check: exit code 0, or 1 and one line with the reason.

A server that starts (loading, warm-up) is not healthy yet. After that, healthy means progress: the
engine has taken a step since the last check, or makes a token now, for a prompt of one token and
for a longer one. vLLM's ``/health`` alone reports a stopped engine as healthy.
"""

import os
import sys
import time
from pathlib import Path

# the image's own copy is beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import door, health

SECONDS = 6.0  # below the time-out of the image's HEALTHCHECK, which would hide the reason


def check() -> str:
    """Check the server; returns the reason why it is not healthy, or "".

    Raises:
        Exception: the server is not healthy; the message has request and answer.
    """
    text, given_up = health.read_mark("state") or (health.READY, False)
    if given_up:
        return f"unhealthy: {text}"
    if text != health.READY:
        return f"starting: {text}"
    client = health.Client(door.folder() / door.OWN, SECONDS)
    if os.environ.get("SPARKFORGE_CLUSTER_ROLE") == "worker":
        # it takes no requests: healthy means a link to the head
        return "" if health.read_mark("linked") else "unhealthy: no link to the head"
    if door.REPLICAS in os.environ:  # a router, whose answer is a line about its servers
        print(client.ask(time.monotonic() + SECONDS, "GET", "/health").decode().strip())
    else:
        health.write_mark("progress", client.observe(health.read_mark("progress")))
    return ""


if __name__ == "__main__":
    try:
        problem = check()
    except Exception as error:  # one line for Docker's log, whatever it is
        problem = f"unhealthy: {type(error).__name__}: {error}"
    if problem:
        text = " ".join(problem.split())[:500]
        sys.exit("".join(letter if letter.isprintable() else "?" for letter in text))
