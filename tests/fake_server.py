"""A stand-in for vLLM's server, as far as a supervisor can see it; run as a process of its own.

    fake_server.py PORT [SECONDS-UNTIL-READY [COMPILER]]

Like vLLM it has two processes: this one answers HTTP, and a child, the engine, makes tokens. What
is counted in /metrics changes only with the child's answers. It prints the child's number.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENGINE = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


class Engine:
    """The child, and what is counted of it."""

    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.tokens = 0
        self._lock = threading.Lock()

    def token(self) -> None:
        """Wait for one token, for ever where the child is stopped."""
        with self._lock:
            assert self.child.stdin is not None
            assert self.child.stdout is not None
            self.child.stdin.write(b"1\n")
            self.child.stdin.flush()
            if not self.child.stdout.readline():
                raise ConnectionError("the engine is dead")
            self.tokens += 1

    def serve_a_slow_customer(self) -> None:
        """Make tokens without end, and leave nobody else a turn: a server under load."""
        with self._lock:
            while True:
                time.sleep(0.05)
                self.tokens += 1


def main() -> None:
    """Serve until SIGTERM."""
    port, ready_at = int(sys.argv[1]), time.monotonic() + float([*sys.argv, "0"][2])
    engine = Engine()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, text: str, code: int = 200) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if time.monotonic() < ready_at:
                self._answer("loading", 503)
            elif self.path == "/metrics":
                self._answer(f'# HELP x\nvllm:generation_tokens_total{{e="0"}} {engine.tokens}\n')
            elif self.path == "/v1/models":
                authorized = self.headers.get("Authorization", "none")
                self._answer(json.dumps({"data": [{"id": "m"}], "authorized": authorized}))
            else:
                self._answer("")

        def do_POST(self) -> None:
            if self.path == "/compile":
                # a program of that name, as ninja starts it: in a group of its own
                subprocess.Popen([sys.argv[3], "10"], process_group=0)
                self._answer("")
                return
            if self.path == "/busy":
                threading.Thread(target=engine.serve_a_slow_customer, daemon=True).start()
                self._answer("")
                return
            engine.token()
            self._answer(json.dumps({"usage": {"completion_tokens": 1}}))

    server = ThreadingHTTPServer((os.environ.get("FAKE_HOST", "127.0.0.1"), port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"engine {engine.child.pid}", flush=True)
    print("(Worker pid=1) INFO 11-21 07:21:00 [mxfp4.py:8] Using 'MARLIN' Mxfp4 MoE backend.",
          flush=True)  # fmt: skip
    server.serve_forever()


if __name__ == "__main__":
    main()
