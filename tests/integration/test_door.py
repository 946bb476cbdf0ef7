"""The front door: HAProxy itself, in front of a server that notes what reaches it.

The paths of vLLM's own route table, asked by openai's and anthropic's clients:
tests/patches/test_chat.py.
"""

import http.client
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from sparkforge.runtime.servers import free_port
from sparkforge.serving import door
from sparkforge.serving.health import Client, StatusError
from sparkforge.serving.settings import Variables
from tests.fake_server import AtPath
from tests.haproxy import needs_haproxy
from tests.support import PATIENCE_S, wait_for

pytestmark = needs_haproxy

KEY = {"VLLM_API_KEY": "the-key,with-a-comma"}
BEARER = {"Authorization": f"Bearer {KEY['VLLM_API_KEY']}"}
CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
MIB = 1 << 20
ROLES = ("server", "router")


class Behind:
    """A server that notes each request; ``go`` lets a stream continue."""

    def __init__(self, address: Path) -> None:
        self.requests: list[tuple[str, str, Mapping[str, str], bytes]] = []
        self.status = {"GET": 200, "POST": 200}
        self.go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size + 2)[:-2]
                    self.rfile.readline()
                outer.note(self.command, self.path, self.headers, body)
                self.send_response(outer.status.get(self.command, 200))
                self.end_headers()
                self.wfile.write(b"first ")
                if b"stream" in body[:20]:
                    outer.go.wait(PATIENCE_S)
                self.wfile.write(b"last")

            do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = do_PATCH = do_GET

        self._server = AtPath(str(address), Handler)  # type: ignore[arg-type]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def note(self, method: str, path: str, headers: Message, body: bytes) -> None:
        if path != "/health?ready":  # a router's own
            found = {name.lower(): value for name, value in headers.items()}
            self.requests.append((method, path, found, body))

    def close(self) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()


class Front:
    """A front door and what is behind it."""

    def __init__(self, port: int, behind: Behind, opened: door.Door | None, *pids: int) -> None:
        self.port, self.behind, self.opened, self.pids = port, behind, opened, pids

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), source_address=(source, 0))
        made.settimeout(PATIENCE_S)
        return made

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] = {}, body: Any = None, **more: str
    ) -> tuple[int, Mapping[str, str], str]:
        """Return status, headers (lower case) and body of an answer."""
        source = (more.get("source", "127.0.0.1"), 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, PATIENCE_S, source)
        try:
            with suppress(BrokenPipeError):  # the answer came before the end of the body
                connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, found, answer.read().decode()
        finally:
            connection.close()

    def raw(self, request: bytes) -> bytes:
        with self.connect() as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    def rss_mib(self) -> float:
        texts = (Path(f"/proc/{pid}/status").read_text() for pid in self.pids)
        return sum(int(text.split("VmRSS:")[1].split()[0]) for text in texts) / 1024


Start = Callable[..., Front]


@pytest.fixture
def start(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a front door; the server's is ready."""
    monkeypatch.setenv("TMPDIR", str(sockets))
    with ExitStack() as stack:

        def begin(role: str = "server", ready: bool = True, **variables: str) -> Front:
            port = free_port(0)
            given = {"SPARKFORGE_LISTEN": f"127.0.0.1:{port}", **variables}
            rules = (read := Variables.read(given)), door.key_of(read, given)
            if role == "server":
                opened = door.Door(*rules)
                stack.callback(opened.close)
                behind = Behind(door.folder() / door.ENGINE)
                stack.callback(behind.close)
                if ready:
                    opened.ready()
                return Front(port, behind, opened, *(process.pid for process in opened.processes))
            behind = Behind(sockets / "replica.sock")
            stack.callback(behind.close)
            replicas = {"r:1": f"unix@{sockets}/replica.sock"}
            text = door.configuration(*rules, "router", replicas)
            process = stack.enter_context(subprocess.Popen(door.command("router", text)))
            stack.callback(process.terminate)
            front = Front(port, behind, None, process.pid)
            wait_for(lambda: serves(front))
            return front

        yield begin


def serves(front: Front) -> bool:
    try:
        return front.ask("GET", "/health")[0] == 200
    except OSError:
        return False


# -- who may ask -----------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_what_is_not_named_does_not_exist(start: Start, role: str) -> None:
    front = start(role, **KEY)
    for path in (
        *("/invocations", "/tokenize", "/generative_scoring", "/scale_elastic_ep", "/docs", "/"),
        *("/openapi.json", "/version", "/v1/", "/v1/embeddings", "/v1/load_lora_adapter"),
        *("/v1/chat/completions/", "//v1/chat/completions", "/v1/chat/completions/render"),
        *("/v1/responses/a/b", "/v1/responses/../models", "/V1/models", "/v1/%6dodels"),
        *("/health/", "/metrics/x", "/v1/chat/completions;x"),
    ):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert front.ask(method, path, BEARER)[0] == 404, (method, path)
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        assert front.ask(method, CHAT, BEARER)[0] == 404
    assert front.ask("POST", "/v1/models", BEARER)[0] == 404
    assert not front.behind.requests


@pytest.mark.parametrize("role", ROLES)
def test_a_key_opens_and_nothing_else_does(start: Start, role: str) -> None:
    front = start(role, **KEY)
    key = KEY["VLLM_API_KEY"]
    wrong: list[dict[str, str]] = [
        *({}, {"x-api-key": ""}, {"x-api-key": "the-key"}, {"X-Sparkforge-Probe": "1"}),
        *({"Authorization": f"Bearer {key}x"}, {"Authorization": f"Basic {key}"}),
        {"x-api-key": "wrong", "Authorization": "Bearer wrong"},
    ]
    asked = [("POST", CHAT), ("POST", "/v1/messages"), ("GET", "/v1/models"), ("GET", "/metrics")]
    for headers in wrong:
        for method, path in asked:
            status, answered, text = front.ask(method, path, headers, "{}")
            assert (status, answered["www-authenticate"]) == (401, "Bearer"), headers
            assert json.loads(text)["error"]["type"] == "AuthenticationError"
    assert not front.behind.requests
    assert front.ask("GET", "/health")[0] == 200
    right = [BEARER, {"authorization": f"bearer {key}"}, {"X-API-Key": key}]
    for headers in (*right, {**right[0], "x-api-key": "w"}, {**right[2], "Authorization": "w"}):
        for method, path in asked:
            assert front.ask(method, path, headers, "{}")[0] == 200, headers


def test_vllm_gets_neither_key_nor_origin_nor_headers_of_ours(start: Start) -> None:
    front = start(**KEY, SPARKFORGE_ORIGINS="http://a:1")
    ours = {"X-Sparkforge-Probe": "1", "x-sparkforge-else": "2", "Origin": "http://a:1"}
    given = {**BEARER, "x-api-key": "x", "X-Other": "y", **ours}
    assert front.ask("POST", CHAT, given, "{}")[0] == 200
    headers = set(front.behind.requests[-1][2])
    assert "x-other" in headers
    assert not headers & {"authorization", "x-api-key", "origin", *map(str.lower, ours)}


@pytest.mark.parametrize("role", ROLES)
def test_without_a_key_pages_of_others_may_neither_ask_nor_read(start: Start, role: str) -> None:
    front = start(role)
    port = front.port
    for host in ("localhost", "127.0.0.1", "[::1]", f"LOCALHOST:{port}", f"127.0.0.1:{port}"):
        assert front.ask("POST", CHAT, {"Host": host}, "{}")[0] == 200, host
    hosts = ("evil.example", "localhost.evil", "127.0.0.1.evil:80", "a,localhost", "x@localhost")
    for host in hosts:
        assert front.ask("POST", CHAT, {"Host": host}, "{}")[0] in (400, 403), host
    assert front.raw(b"GET /v1/models HTTP/1.0\r\n\r\n").split()[1] == b"403"
    count = len(front.behind.requests)
    for origin in ["http://evil.example", "null", f"http://localhost:{port}", "https://localhost"]:
        status, headers, _ = front.ask("POST", CHAT, {"Origin": origin}, "{}")
        assert status == 403, origin
        assert "access-control-allow-origin" not in headers
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert front.ask("OPTIONS", CHAT, asked)[0] == 403
    assert len(front.behind.requests) == count


def test_named_pages_may_ask_and_read(start: Start) -> None:
    front = start(SPARKFORGE_ORIGINS="http://localhost:3000, https://chat.example")
    asked = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    status, headers, _ = front.ask("OPTIONS", CHAT, asked)
    assert status == 204
    assert headers["access-control-allow-origin"] == "https://chat.example"
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    for path, expected in ((CHAT, 200), ("/nowhere", 404)):
        page = "http://localhost:3000"
        status, headers, _ = front.ask("POST", path, {"Origin": page}, "{}")
        assert (status, headers["access-control-allow-origin"]) == (expected, page)
        assert headers["vary"] == "Origin"
    assert front.ask("POST", CHAT, {"Origin": "http://localhost:30000"}, "{}")[0] == 403


@pytest.mark.parametrize(
    ("variables", "origin"), [(KEY, 200), ({"SPARKFORGE_ALLOW_OPEN": "1"}, 403)]
)
def test_any_host_is_served_with_a_key_or_where_it_is_open(
    start: Start, variables: dict[str, str], origin: int
) -> None:
    front = start(SPARKFORGE_BIND="0.0.0.0", SPARKFORGE_OPEN_METRICS="1", **variables)
    assert front.ask("GET", "/metrics")[0] == 200
    host = {**BEARER, "Host": "spark:8000"}
    assert front.ask("POST", CHAT, host, "{}")[0] == 200
    status, headers, _ = front.ask("POST", CHAT, {**host, "Origin": "http://evil.example"}, "{}")
    assert status == origin
    assert "access-control-allow-origin" not in headers


# -- how much --------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_has_a_limit_and_arrives_whole(start: Start, role: str, chunked: bool) -> None:
    front = start(role)

    def post(size: int) -> int:
        body = os.urandom(size)
        pieces = (body[at : at + 70_001] for at in range(0, size, 70_001))
        status = front.ask("POST", CHAT, {}, pieces if chunked else body)[0]
        if status == 200:
            assert front.behind.requests.pop()[3] == body
        assert not front.behind.requests
        return status

    # a router holds no body: its servers refuse what has no length
    large = 200 if chunked and role == "router" else 413
    assert [post(size) for size in (1, 8 * MIB, 8 * MIB + 1, 9 * MIB)] == [200, 200, large, large]


def test_half_requests_and_tiny_chunks_cost_nobody_anything(start: Start) -> None:
    front = start()
    heads = [
        b"",
        b"POST /v1/chat",
        HEAD + b"Content-Length: 99\r\n\r\nx",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100,
    ]
    with ExitStack() as stack:
        for number in range(200):
            connection = stack.enter_context(front.connect())
            connection.sendall(heads[number % len(heads)])
        assert front.ask("POST", CHAT, {}, "{}")[0] == 200
        assert len(front.behind.requests) == 1  # nothing of a request that is not whole
        tiny = stack.enter_context(front.connect())
        tiny.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            tiny.sendall(b"1\r\nx\r\n" * 10_000)
        tiny.sendall(b"0\r\n\r\n")
        assert tiny.recv(1 << 16).split()[1] == b"200"
        assert front.behind.requests[-1][3] == b"x" * 200_000


def test_one_source_cannot_keep_others_out(start: Start) -> None:
    front = start()
    with ExitStack() as stack:
        idle = []
        for _ in range(600):
            with suppress(ConnectionResetError):  # refused before connect() came back
                idle.append(stack.enter_context(front.connect()))
        began = time.monotonic()
        assert front.ask("GET", "/health", source="127.0.0.2")[0] == 200
        assert time.monotonic() - began < 9  # those before it wait for 10
        closed = 0
        for connection in idle:
            connection.setblocking(False)
            try:
                closed += connection.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            except BlockingIOError:
                pass
        assert len(idle) - closed >= 256


def test_large_bodies_are_bounded_in_memory_and_for_one_source(start: Start) -> None:
    front = start()
    declared = HEAD + b"Content-Length: 8388608\r\n\r\n"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n7fffff\r\n"

    def fill(connection: socket.socket) -> None:
        try:
            for _ in range(127):
                connection.sendall(b"x" * 65536)
        except OSError:  # refused
            pass

    with ExitStack() as stack:
        threads = []
        for number in range(60):
            connection = stack.enter_context(front.connect())
            connection.sendall(chunked if number % 2 else declared)
            threads.append(threading.Thread(target=fill, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        body = b"y" * (4 * MIB)
        assert front.ask("POST", CHAT, {}, body)[0] == 503
        assert front.ask("POST", CHAT, {}, body[: MIB // 5])[0] == 200
        assert front.ask("POST", CHAT, {}, body, source="127.0.0.2")[0] == 200
        assert 100 < front.rss_mib() < 512
    assert [len(one[3]) for one in front.behind.requests] == [MIB // 5, 4 * MIB]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "begin",
    [b"GET /health HTTP/1.1\r\nX: ", HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: "],
    ids=["head", "trailer"],
)
def test_what_has_no_end_fills_no_memory(start: Start, role: str, begin: bytes) -> None:
    front = start(role)
    with ExitStack() as stack:
        for _ in range(50):
            connection = stack.enter_context(front.connect())
            connection.settimeout(0.2)
            with suppress(OSError):  # refused, or held back
                connection.sendall(begin)
                for _ in range(60):
                    connection.sendall(b"x" * 65536)
        assert front.rss_mib() < 120
        assert front.ask("GET", "/health", source="127.0.0.2")[0] == 200
        front.behind.go.set()


@pytest.mark.parametrize("role", ROLES)
def test_requests_that_two_readers_would_read_differently_are_refused(
    start: Start, role: str
) -> None:
    front = start(role)
    for lines in (
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5, 6",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Host: evil.example",
        "Transfer-Encoding : chunked",
    ):
        request = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n\r\nhello"
        assert front.raw(request.encode()).split()[1] in (b"400", b"403"), lines
    upgrade = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert not front.raw(upgrade).startswith(b"\x00")  # no frame of HTTP/2
    assert front.ask("POST", CHAT, {"X-Long": "x" * 70_000}, "{}")[0] == 431
    assert front.ask("POST", f"{CHAT}?{'x' * 20_000}", {}, "{}")[0] == 431
    assert not front.behind.requests


def test_nobody_gets_a_tunnel(start: Start) -> None:
    front = start()
    asked = front.ask("GET", "/v1/models", {"Connection": "upgrade", "Upgrade": "h2c"})
    assert (asked[0], asked[2]) == (200, "first last")
    headers = front.behind.requests[-1][2]
    assert "upgrade" not in headers and "upgrade" not in headers.get("connection", "")


def test_a_router_repeats_what_a_server_refuses(start: Start) -> None:
    front = start("router")
    front.behind.status["POST"] = 503
    assert front.ask("POST", CHAT, body=b"x" * 250_000)[0] == 503
    assert [len(body) for *_, body in front.behind.requests] == [250_000] * 4


def test_a_stream_passes_piece_by_piece(start: Start) -> None:
    front = start()
    with front.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\nstream"
        )
        seen = b""
        while b"first" not in seen:
            seen += connection.recv(1 << 16)
        assert b"last" not in seen
        front.behind.go.set()
        while b"last" not in seen:
            seen += connection.recv(1 << 16)


# -- the server's state ----------------------------------------------------------


def test_states(start: Start) -> None:
    front = start(ready=False)
    assert front.opened is not None

    def statuses() -> list[int]:
        asked = (("GET", "/health"), ("GET", "/health?ready"), ("POST", CHAT), ("GET", "/metrics"))
        cancel = ("POST", "/v1/responses/r_1/cancel")
        return [
            front.ask(*one, {}, "{}" if one[0] == "POST" else None)[0] for one in (*asked, cancel)
        ]

    assert statuses() == [503] * 5
    assert int(front.ask("POST", CHAT, {}, "{}")[1]["retry-after"]) > 0
    front.opened.refuse(True)
    assert statuses() == [503] * 5
    front.opened.refuse(False)
    front.opened.ready()
    assert statuses() == [200] * 5
    front.opened.stall(True)
    assert statuses() == [200, 404, 200, 200, 200]
    front.opened.stall(False)
    front.opened.refuse(True)
    assert statuses() == [200, 404, 503, 200, 200]
    assert front.ask("POST", CHAT, {"X-Sparkforge-Probe": "1"}, "{}")[0] == 503
    front.opened.refuse(False)
    assert statuses() == [200] * 5
    front.behind.close()
    assert statuses() == [503] * 5


def test_a_router_tells_of_its_servers(start: Start) -> None:
    front = start("router", **KEY)
    assert front.ask("GET", "/health")[2] == "1 of 1 replicas serve: r:1 answers\n"
    assert front.ask("GET", "/replicas/r:1/metrics")[0] == 401
    assert front.ask("GET", "/replicas/r:1/metrics", BEARER)[0] == 200
    assert front.behind.requests[-1][1] == "/metrics"
    assert "haproxy_server" in front.ask("GET", "/metrics", BEARER)[2]
    assert front.ask("GET", "/replicas/r:2/metrics", BEARER)[0] == 404
    # the key goes on: the servers ask for it, too
    assert front.behind.requests[-1][2]["authorization"] == BEARER["Authorization"]
    front.behind.status["GET"] = 404
    wait_for(lambda: front.ask("GET", "/health")[2].startswith("0 of 1"))
    front.behind.close()
    # two checks, a second apart: after the first alone it still counts as a busy server
    down = "0 of 1 replicas serve: r:1 is down\n"
    wait_for(lambda: front.ask("GET", "/health")[::2] == (503, down))
    client = Client(door.folder() / door.OWN, PATIENCE_S)
    with pytest.raises(StatusError, match="0 of 1 replicas serve: r:1 is down"):
        client.ask(time.monotonic() + PATIENCE_S, "GET", "/health")
