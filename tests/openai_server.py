"""A stand-in for an OpenAI server, in a thread: it keeps every promise of accept but one.

It answers as the real model would, in canned words. A fault is the name of the promise that it
breaks.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support import PATIENCE_S

KEY = "the-key-of-this-test"
MAX_LEN = 8192
THOUGHT = ["The", " user", " wants", " a", " short", " and", " right", " answer"]
Json = dict[str, Any]


class Fake(ThreadingHTTPServer):
    """State: the fault, and counters."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, fault: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = fault
        self.lock = threading.Lock()
        self.running = 0
        self.most = 0  # at once, so far
        self.answered = 0
        self.looked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients go away

    def metrics(self) -> str:
        label = '{engine="0",model_name="m"}'
        self.looked += 1
        running = self.running + (self.fault == "leaks a request" and self.answered > 0)
        lines = [
            "# HELP vllm:num_requests_running x",
            f"vllm:num_requests_running{label} {running}.0",
            f"vllm:num_requests_waiting{label} 0.0",
            f"vllm:kv_cache_usage_perc{label} {running / 100}",
            f"vllm:generation_tokens_total{label} {100 * self.looked}.0",
        ]
        if self.fault == "no statistics":
            lines = lines[:1]
        off = 0.0 if self.fault == "a kernel is off" else 1.0
        if self.fault != "no kernels":
            lines.append(f'vllm:decode_kernels_in_use{{engine="0",kind="MXFP4 experts"}} {off}')
        return "\n".join([*lines, ""])


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _end(self, status: int, found: Json | str) -> None:
        data = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _events(self, found: list[Json], *, done: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for one in found:
            self.wfile.write(f"data: {json.dumps(one)}\n\n".encode())
            self.wfile.flush()
        if done:
            self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._end(200, self.server.metrics())
        elif self.headers.get("Authorization") != f"Bearer {KEY}":
            self._end(401, {"error": "Unauthorized"})
        else:
            self._end(200, {"data": [{"id": "m", "max_model_len": MAX_LEN}]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        fake, fault = self.server, self.server.fault
        if fault == "dies":
            return
        if self.headers.get("Authorization") != f"Bearer {KEY}" and fault != "needs no key":
            self._end(401, {"error": "Unauthorized"})
            return
        body = json.loads(data)
        if body["model"] != "m" and fault != "serves any model":
            self._end(404, {"error": "no such model"})
        elif body.get("max_tokens", 1) < 0:
            self._end(400, {"error": "max_tokens"})
        elif b"image" in data and fault != "drops images":
            self._end(400, {"error": "no images"})
        elif body.get("continue_final_message") and fault != "ignores options":
            self._end(400, {"error": "continue_final_message"})
        elif b"web_search" in data and fault == "refuses other tools":
            self._end(400, {"error": "web_search"})
        else:
            with fake.lock:
                fake.running += 1
                fake.most = max(fake.most, fake.running)
                fake.answered += 1
            try:
                answers = (self._chat, self._responses, self._messages, self._endless)
                paths = ("chat/completions", "responses", "messages", "completions")
                answers[paths.index(self.path.removeprefix("/v1/"))](body)
            finally:
                with fake.lock:
                    fake.running -= 1

    def _chat(self, body: Json) -> None:
        fault = self.server.fault
        message, finish = self._message(body)
        for stop in body.get("stop", []) if fault != "keeps stop strings" else []:
            message["content_"] = ["".join(message["content_"]).partition(stop)[0]]
        if body.get("ignore_eos") and fault != "ends for ever":
            message["content_"] += [" on"] * body["max_tokens"]
        words = [*message["reasoning_"], *message["content_"]]
        frame = [] if message.get("tool_calls") else ["<|channel|>", "<|end|>"]
        tokens = [*frame, *words]
        most = body["max_tokens"]
        if len(tokens) > most and fault != "ignores max_tokens":
            tokens = tokens[:most]
            finish = finish if fault == "ends a cut call" else "length"
            message |= {"reasoning_": tokens[2:], "content_": [], "tool_calls": []}
            if fault == "leaks a header":
                message["content_"] = ["<|start|>assistant"]
        prompt = sum(len(str(one.get("content") or "").split()) for one in body["messages"])
        prompt = min(prompt, 90) if fault == "cuts prompts" else prompt
        usage: Json = {"prompt_tokens": prompt, "completion_tokens": len(tokens)}
        usage["completion_tokens_details"] = {"reasoning_tokens": len(message["reasoning_"])}
        if body.get("stream"):
            self._stream_chat(body, message, finish, usage)
            return
        calls = message.get("tool_calls") or []
        said: Json = {
            "reasoning": "".join(message["reasoning_"]) or None,
            "content": "".join(message["content_"]) or None,
            "tool_calls": calls,
        }
        choice = {"message": said, "finish_reason": finish}
        of_template = body.get("chat_template_kwargs", {}) if fault != "ignores options" else {}
        effort = body["reasoning_effort"] or of_template.get("reasoning_effort", "medium")
        self._end(200, {"choices": [choice], "usage": usage, "prompt_token_ids": [effort]})

    def _responses(self, body: Json) -> None:
        fault, tokens = self.server.fault, min(20, body["max_output_tokens"])
        status = "completed" if tokens == 20 or fault == "completes a cut" else "incomplete"
        items: list[Json] = [
            {"type": "reasoning", "id": "r", "status": "completed"},
            {"type": "function_call", "id": "f", "call_id": "c", "status": status},
        ]
        found = {"status": status, "output": items, "usage": {"output_tokens": tokens}}
        if not body.get("stream"):
            self._end(200, found)
            return
        kind, again = "response.output_item.done", {}
        if fault == "makes ids twice":
            again = {"call_id": "d"}
        events: list[Json] = [{"type": kind, "item": item | again} for item in items]
        self._events([*events, {"type": f"response.{status}", "response": found}], done=False)

    def _messages(self, body: Json) -> None:
        ends = self.server.fault == "ends a turn with a call"
        stop = "end_turn" if ends else "tool_use"
        self._end(200, {"content": [{"type": "tool_use"}], "stop_reason": stop})

    def _message(self, body: Json) -> tuple[Json, str]:
        """Return what the model says, as words, and why it ends."""
        fault = self.server.fault
        asked = body["messages"][-1]
        text, thought = str(asked["content"]), list(THOUGHT)
        if asked["role"] == "tool":
            content = "" if fault == "no answer to a result" else "It is 21 degrees"
        elif "tools" in body:
            if fault == "calls no tool" or (fault == "streams no call" and body.get("stream")):
                return {"reasoning_": thought, "content_": ["No", " tool"]}, "stop"
            written = '{"city": ' if fault == "cuts arguments" else '{"city": "Paris"}'
            every = fault == "allows all tools"
            name = body["tools"][0]["function"]["name"] if every else "weather"
            call = {
                "id": "call-1",
                "index": 0,
                "type": "function",
                "function": {"name": name, "arguments": written},
            }
            return {"reasoning_": thought, "content_": [], "tool_calls": [call]}, "tool_calls"
        elif "response_format" in body:
            content = "21 degrees" if fault == "writes no JSON" else '{"temperature": 21}'
        elif "Which word" in text:
            content = "kingfisher"
        else:
            content = "It is 41 ." if fault == "counts wrong" else "It is 42 ."
        if fault == "is empty" or (fault == "is empty at once" and self._together()):
            content, thought = "", []
        if fault == "splits nothing":
            content, thought = "".join(thought) + content, []
        if fault == "shows Harmony":
            content = f"<|channel|>final {content}"
        pieces = [f"{' ' if i else ''}{word}" for i, word in enumerate(content.split())]
        return {"reasoning_": thought, "content_": pieces}, "stop"

    def _together(self) -> bool:
        """Wait a moment for others; returns whether there are some, or were before the last."""
        end = time.monotonic() + PATIENCE_S
        while self.server.most < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return self.server.most > 1

    def _stream_chat(self, body: Json, message: Json, finish: str, usage: Json) -> None:
        fault = self.server.fault
        thoughts: list[Json] = [{"reasoning": word} for word in message["reasoning_"]]
        contents: list[Json] = [{"content": word} for word in message["content_"]]
        calls: list[Json] = []
        for call in message.get("tool_calls") or []:
            written = call["function"]["arguments"]
            whole = {**call, "function": {**call["function"], "arguments": written[:3]}}
            calls += [
                {"tool_calls": [whole]},
                {"tool_calls": [{"index": 0, "function": {"arguments": written[3:]}}]},
            ]
        deltas = [*thoughts, *contents, *calls]
        if fault == "reasons last":
            deltas = [*contents, *thoughts]
        events: list[Json] = [{"choices": [{"delta": one}]} for one in deltas]
        events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
        events.append({"choices": [], "usage": usage})
        if fault == "breaks a stream":
            events[3] = {"error": {"message": "the engine is dead"}}
        self._events(events, done=fault != "never ends a stream")

    def _endless(self, body: Json) -> None:
        self.send_response(200)
        self.end_headers()
        while True:  # until the client goes away
            self.wfile.write(b'data: {"choices": [{"text": " a"}]}\n\n')
            self.wfile.flush()
            time.sleep(0.01)


@contextmanager
def serving(fault: str = "") -> Iterator[Fake]:
    """Serve on a free port of loopback."""
    fake = Fake(fault)
    thread = threading.Thread(target=fake.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.shutdown()
        fake.server_close()
        thread.join()
