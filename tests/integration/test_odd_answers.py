"""Servers that answer in ways that no vLLM should: the health check says so in one line, in time.

One server, and one table of answers; the supervisor on such servers: test_supervise.py.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkforge.serving import state
from sparkforge.serving.progress import PROBLEMS, Client
from tests.support import health, inner

Send = Callable[[bytes], None]
DEEP = "[" * 200_000


def ok(text: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


WELL: Mapping[str, bytes] = {
    "/health": ok(""),
    "/metrics": ok('vllm:generation_tokens_total{e="0"} 1\n'),
    "/v1/models": ok('{"data": [{"id": "m", "max_model_len": 600}]}'),
    "/v1/completions": ok('{"usage": {"completion_tokens": 1}}'),
}


@contextmanager
def serving(
    sockets: Path, answers: Mapping[str, bytes], send: Callable[[Send, bytes], None]
) -> Iterator[Path]:
    """Answer requests by their path until the block ends; ``send`` passes the bytes on."""
    threads: list[threading.Thread] = []

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                request = b""
                while b"\r\n\r\n" not in request:
                    piece = connection.recv(1 << 16)
                    if not piece:
                        return
                    request += piece
                send(connection.sendall, answers[request.split()[1].decode()])
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # a close with unread bytes would be a reset
                    pass
            except OSError:  # the one that asked has had enough
                pass

    def accept(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(connection,)))
            threads[-1].start()

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(inner(sockets)))
        server.listen()
        accepting = threading.Thread(target=accept, args=(server,))
        accepting.start()
        try:
            yield inner(sockets)
        finally:
            server.shutdown(socket.SHUT_RDWR)  # accept() alone does not notice a close
            accepting.join()
            for one in threads:
                one.join()


def at_once(send: Send, answer: bytes) -> None:
    send(answer)


def dripping(send: Send, answer: bytes) -> None:
    for byte in answer.ljust(10_000):
        send(bytes([byte]))
        time.sleep(0.3)


def without_end(send: Send, answer: bytes) -> None:
    while True:
        send(answer)


def assert_one_line(said: subprocess.CompletedProcess[str], words: str) -> None:
    assert said.returncode == 1
    assert said.stdout == ""
    assert said.stderr.startswith("unhealthy: ")
    assert said.stderr.count("\n") == 1
    assert words in said.stderr
    assert len(said.stderr) < 700


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/v1/models", ok("[1]"), "data.0 of the answer of /v1/models is missing"),
        ("/v1/models", ok('{"data": ["x"]}'), "data.0 of the answer of /v1/models is 'x', not a"),
        ("/v1/models", ok('{"data": []}'), "data.0 of the answer of /v1/models is missing"),
        ("/v1/models", ok('{"data": [{"id": 5}]}'), "is 5, not a string"),
        (
            "/v1/models",
            ok('{"data": [{"id": "m", "max_model_len": 1e999}]}'),
            "is inf, not an integer",
        ),
        ("/v1/models", ok(DEEP), "nested too deeply"),
        ("/v1/models", ok('{"data":' * 100 + "1" + "}" * 100), "nested too deeply"),
        ("/v1/completions", ok('{"usage": null}'), "usage.completion_tokens"),
        ("/v1/completions", ok('{"usage": {"completion_tokens": "1"}}'), "is '1', not an integer"),
        (
            "/v1/completions",
            ok('{"usage": {"completion_tokens": true}}'),
            "is True, not an integer",
        ),
        ("/v1/completions", ok('{"usage": {"completion_tokens": 0}}'), "made no token"),
        ("/v1/completions", ok("5"), "usage.completion_tokens"),
        ("/v1/completions", ok(DEEP), "nested too deeply"),
        ("/v1/completions", ok("9" * 5000), "is not JSON"),
        ("/v1/completions", b"HTTP/1.1 500 x\r\nContent-Length: 3\r\n\r\na\nb", "500 a b"),
        ("/metrics", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff", "UnicodeDecodeError"),
        ("/metrics", b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n", "Incomplete"),
        ("/metrics", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "IncompleteRead"),
        ("/health", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "BadStatusLine"),
        ("/health", b"", "RemoteDisconnected"),
        ("/health", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n", "100 headers"),
    ],
)
def test_a_wrong_answer_is_one_line(sockets: Path, path: str, answer: bytes, words: str) -> None:
    with serving(sockets, {**WELL, path: answer}, at_once):
        assert_one_line(health(sockets), words)


@pytest.mark.parametrize("path", WELL)
def test_a_look_has_one_deadline_however_the_bytes_come(sockets: Path, path: str) -> None:
    def send(real: Send, answer: bytes) -> None:
        (dripping if answer is WELL[path] else at_once)(real, answer)

    begin = time.monotonic()
    with serving(sockets, WELL, send) as address, pytest.raises(PROBLEMS):
        Client(address, 1.0).observe(None)
    # far below the 3000 s that the answer takes
    assert time.monotonic() - begin < 100


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 20),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"8000\r\n" + b"x" * 32768,
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=["body", "chunks", "1xx"],
)
def test_an_answer_without_end_is_bounded(sockets: Path, answer: bytes) -> None:
    with (
        serving(sockets, {**WELL, "/health": answer}, without_end) as address,
        pytest.raises(PROBLEMS),
    ):
        Client(address, 3.0).observe(None)


def test_the_health_check_ends_in_the_time_that_docker_gives_it(sockets: Path) -> None:
    begin = time.monotonic()
    with serving(sockets, WELL, dripping):
        assert_one_line(health(sockets), "TimeoutError: the answer is not complete in time")
    assert time.monotonic() - begin < 100  # 6 s on a machine that has nothing else to do


@pytest.mark.parametrize(
    "text", [DEEP, "{}", '{"start": ', "5", '{"start": 7, "counters": 1}', '{"start": "7"}']
)
@pytest.mark.parametrize("name", ["sparkforge-progress.json", "sparkforge-state.json"])
def test_a_damaged_file_of_its_own_is_as_none(sockets: Path, name: str, text: str) -> None:
    (sockets / name).write_text(text)
    with serving(sockets, WELL, at_once):
        said = health(sockets)
    assert (said.returncode, said.stderr) == (0, "")


def test_a_damaged_mark_of_this_start_is_as_none(sockets: Path) -> None:
    mark = json.dumps({"start": state.this_start(), "counters": [["x"]]})
    (sockets / "sparkforge-progress.json").write_text(mark)
    with serving(sockets, WELL, at_once):
        assert health(sockets).returncode == 0


def test_a_full_disk_for_its_mark_makes_no_server_ill(sockets: Path) -> None:
    (sockets / "sparkforge-progress.json").symlink_to("/dev/full")
    with serving(sockets, WELL, at_once):
        said = health(sockets)
    assert said.returncode == 0
    assert "cannot be written" in said.stdout


def test_a_folder_that_makes_no_sense_is_one_line() -> None:
    assert_one_line(health(Path("/dev/null")), "")
