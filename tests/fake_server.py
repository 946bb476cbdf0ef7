"""A stand-in for vLLM's server, as far as a supervisor can see it; run as a process of its own.

    fake_server.py PORT|SOCKET [SECONDS-UNTIL-READY [COMPILER]]

Like vLLM it has two processes: this one answers HTTP, and a child, the engine, makes tokens. What
is counted in /metrics changes only with the child's answers. It prints the child's number.

A request with the word FAKE_FAILS is answered 500, one with FAKE_REFUSES 400, and with FAKE_HANGS
never; one with FAKE_DIES ends the server with SIGILL. FAKE_ANSWER is what each chat says.
FAKE_LOADS_S is SECONDS-UNTIL-READY where that is not given.
FAKE_REFERENCE names a preflight's reference, whose prompts are answered right. FAKE_SAYS is said at
the start, FAKE_LATE at the end. With FAKE_ENGINE_DIES, the name of a signal, the engine ends by it
at the first request, and the server after it, as vLLM does. FAKE_TOKEN_S is how long the engine
takes for a token. With FAKE_PEER, HOST:PORT, a token needs a byte there and back from who connects,
as of an all-reduce.
"""

import itertools
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

ENGINE = """
import os, socket, sys, time
where, _, port = os.environ.get("FAKE_PEER", "").rpartition(":")
peer = socket.create_server((where, int(port))).accept()[0] if port else None
for line in sys.stdin:
    if peer is not None:
        peer.sendall(b"1")
        while not peer.recv(1):  # no collective of NCCL notices that a rank has gone
            time.sleep(60)
    print(line, end="", flush=True)
"""


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
            time.sleep(float(os.environ.get("FAKE_TOKEN_S", "0")))
            self.child.stdin.write(b"1\n")
            self.child.stdin.flush()
            if not self.child.stdout.readline():
                raise ConnectionError("the engine is dead")
            self.tokens += 1

    def serve_a_slow_customer(self, begun: Callable[[], None]) -> NoReturn:
        """Make tokens without end, and leave nobody else a turn: a server under load."""
        with self._lock:
            begun()
            while True:
                time.sleep(0.05)
                self.tokens += 1


def right(known: Any) -> Any:
    """Answer a prompt of a preflight as its reference has it."""
    pairs = zip(known["tokens"][1:], known["prompt"], strict=True)
    logprobs = [None, *({str(token): {"logprob": one}} for token, one in pairs)]
    following = {"token_logprobs": [one["logprob"] for one in known["next"]]}
    tokens = [one["token"] for one in known["next"]]
    return {"choices": [{"prompt_logprobs": logprobs, "token_ids": tokens, "logprobs": following}]}


class AtPath(ThreadingHTTPServer):
    """Listens on a socket in a folder."""

    address_family = socket.AF_UNIX
    request_queue_size = 128
    server_bind = socketserver.TCPServer.server_bind


def end(*_: object) -> None:
    """Say what is to be said late, and end."""
    # print() raises where the signal has come during another print()
    os.write(1, f"{os.environ.get('FAKE_LATE', '')}\n".encode())
    sys.exit(0)


def main() -> None:
    """Serve until SIGTERM."""
    loads_s = float(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("FAKE_LOADS_S", "0"))
    ready_at = time.monotonic() + loads_s
    engine = Engine()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, text: str, code: int = 200) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if text:  # a pipe that was closed takes no empty write
                self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if time.monotonic() < ready_at:
                self._answer("loading", 503)
            elif self.path == "/metrics":
                tokens = f'vllm:generation_tokens_total{{e="0"}} {engine.tokens}\n'
                self._answer(f"# HELP x\n{tokens}")
            elif self.path == "/v1/models":
                authorized = self.headers.get("Authorization", "none")
                known = [{"id": "m", "max_model_len": 600}]
                self._answer(json.dumps({"data": known, "authorized": authorized}))
            else:
                self._answer("")

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if self.path == "/compile":
                # a program of that name, as ninja starts it: in a group of its own
                subprocess.Popen([sys.argv[3], "600"], process_group=0)
                self._answer("")
                return
            if self.path == "/spin":
                # in one call, so that no other thread gets a turn
                began = time.thread_time()  # a busy machine makes it longer, not shorter
                sum(itertools.repeat(1, 10**7))
                sum(itertools.repeat(1, int(10**7 * 8 / (time.thread_time() - began))))
                self._answer("")
                return
            if self.path == "/busy":
                engine.serve_a_slow_customer(lambda: self._answer(""))
            for word, code in (("FAKE_FAILS", 500), ("FAKE_REFUSES", 400)):
                if (wanted := os.environ.get(word)) and wanted in text:
                    self._answer("so it was asked for", code)
                    return
            if (wanted := os.environ.get("FAKE_DIES")) and wanted in text:
                os.kill(os.getpid(), signal.SIGILL)
                time.sleep(600)  # another thread may receive it, and this one must not answer
            if wanted := os.environ.get("FAKE_ENGINE_DIES"):
                engine.child.send_signal(signal.Signals[wanted])
                said = f"died unexpectedly (exit code: {engine.child.wait()}), shutting down"
                print(f"ERROR 11-21 [multiproc_executor.py:314] Worker proc W {said}", flush=True)
                self._answer("EngineCore encountered an issue", 500)
                os._exit(0)
            if (wanted := os.environ.get("FAKE_HANGS")) and wanted in text:
                time.sleep(600)
            prompt = json.loads(text).get("prompt", [])
            engine.token()
            usage = {"completion_tokens": 1}
            if (path := os.environ.get("FAKE_REFERENCE")) and len(prompt) > 1:
                for known in json.loads(Path(path).read_text())["answers"]:
                    if known["tokens"] == prompt:
                        self._answer(json.dumps(right(known)))
                        return
            message = {"content": os.environ.get("FAKE_ANSWER")}
            self._answer(json.dumps({"usage": usage, "choices": [{"message": message}]}))

    ThreadingHTTPServer.request_queue_size = 128  # a warm-up sends many at once
    if sys.argv[1].isdecimal():
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    else:
        server = AtPath(sys.argv[1], Handler)  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, end)
    print(f"engine {engine.child.pid} of {os.getpid()}", flush=True)
    print(os.environ.get("FAKE_SAYS", ""), flush=True)
    print(
        "(Worker pid=1) INFO 11-21 07:21:00 [mxfp4.py:8] Using 'MARLIN' Mxfp4 MoE backend.",
        flush=True,
    )
    server.serve_forever()


if __name__ == "__main__":
    main()
