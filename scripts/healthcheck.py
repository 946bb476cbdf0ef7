"""Is the server well? Ends with 0 if so, else with 1 and one line that says why.

Asks for the engine's own health and the list of models. The first time in a container's life it
also asks for one token, so that "healthy" means that the model has answered; later not, because
under load that request would wait behind all others and a busy server would count as a sick one.
"""

import http.client
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 8.0  # below the time-out of the image's HEALTHCHECK, so that the reason is still printed

MARK = Path(tempfile.gettempdir()) / "sparkforge-answered"


def ask(method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """One request to the server in this container; anything but 200 is an error."""
    port = int(os.environ.get("SPARKFORGE_LISTEN_PORT", "8000"))
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        reason = answer[:200].decode(errors="replace")
        raise ValueError(f"{method} {path}: {response.status} {reason}")
    return answer


def this_start() -> str:
    """When process 1 began: a mark left by an earlier start of this container does not count."""
    return Path("/proc/1/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]


def check() -> None:
    ask("GET", "/health")
    models = json.loads(ask("GET", "/v1/models"))["data"]
    if not models:
        raise ValueError("the server has no model")
    if MARK.is_file() and MARK.read_text(encoding="ascii") == this_start():
        return
    body = {"model": models[0]["id"], "prompt": "1", "max_tokens": 1}
    usage = json.loads(ask("POST", "/v1/completions", body))["usage"]
    if usage["completion_tokens"] < 1:
        raise ValueError("the model made no token")
    MARK.write_text(this_start(), encoding="ascii")


if __name__ == "__main__":
    try:
        check()
    except (OSError, http.client.HTTPException, LookupError, ValueError) as error:
        print(f"unhealthy: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
