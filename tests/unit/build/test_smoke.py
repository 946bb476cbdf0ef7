"""The smoke test, tried on servers that break one promise each; and how servers are started."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import smoke
from sparkforge.build.results import WheelResult
from sparkforge.build.smoke import from_environment, of_release, originals
from sparkforge.build.stages import wheels
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.runtime import servers
from sparkforge.runtime.servers import LOOPBACK, Launch, Server
from sparkforge.sources import sources
from tests.results import context_of, item, reached
from tests.support import make_sdist, make_wheel

TIMEOUT_S = 60.0
CLEAN = (0, 0.1, False)


@dataclass
class Behaviour:
    """What a stand-in for vLLM does; the defaults are right."""

    status: int = 200
    drift: int = 0  # added to tokens from the second long completion on
    more_tokens: int = 0  # that the usage counts
    stream_shift: int = 0
    stopped: tuple[int, float, bool] = CLEAN
    ended: int | None = None
    said: str = "the last words"
    one_token_first_kills: bool = False
    asked: int = 0
    whole: int = 0


class _Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send(200, {})

    def do_POST(self) -> None:
        b = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        b.asked += 1
        if b.one_token_first_kills and b.asked == 1 and len(body["prompt"]) == 1:
            return self._send(500, {})
        count, length = body["max_tokens"], len(body["prompt"])
        usage = {
            "prompt_tokens": length,
            "completion_tokens": count + b.more_tokens,
            "total_tokens": length + count,
        }
        if body.get("stream"):
            return self._stream([n + b.stream_shift for n in range(count)], usage)
        tokens = [n + (b.drift if b.whole else 0) for n in range(count)]
        b.whole += count > 1
        choice = {"token_ids": tokens, "text": "x"}
        return self._send(b.status, {"choices": [choice], "usage": usage})

    def _send(self, status: int, body: Any) -> None:
        self._write(status, json.dumps(body))

    def _stream(self, tokens: list[int], usage: dict[str, Any]) -> None:
        events = [{"choices": [{"token_ids": [n]}]} for n in tokens]
        lines = [json.dumps(one) for one in [*events, {"choices": [], "usage": usage}]]
        self._write(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))

    def _write(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


class FakeServer(Server):
    """A server on loopback; its behaviour says how the process ends."""

    def __init__(self, url: str, behaviour: Behaviour) -> None:
        super().__init__(url, None, Path())  # type: ignore[arg-type]
        self.__dict__["behaviour"] = behaviour

    def exited(self) -> int | None:
        return self.__dict__["behaviour"].ended  # type: ignore[no-any-return]

    def output(self) -> str:
        return self.__dict__["behaviour"].said  # type: ignore[no-any-return]

    def stop(self) -> tuple[int, float, bool]:
        return self.__dict__["behaviour"].stopped  # type: ignore[no-any-return]


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[FakeServer]:
    handler = type("Handler", (_Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer((LOOPBACK, 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield FakeServer(f"http://{LOOPBACK}:{server.server_port}", behaviour)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_right_server_passes() -> None:
    with serving(Behaviour()) as server:
        report = smoke.exercise(server, TIMEOUT_S)
    assert report.tokens == 24
    assert report.release == ""


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"status": 500}, "status 500"),
        ({"one_token_first_kills": True}, "status 500"),
        ({"drift": 1}, "a second completion"),
        ({"more_tokens": 1}, "usage"),
        ({"stream_shift": 1}, "the streamed completion"),
        ({"stopped": (0, 0.1, True)}, "left processes running"),
        ({"stopped": (1, 0.1, False)}, "exit code 1"),
        ({"ended": 1}, "exited with code 1"),
    ],
)
def test_a_wrong_answer_fails(wrong: Any, complaint: str) -> None:
    broken = serving(replace(Behaviour(), **wrong))
    with broken as server, pytest.raises(ServerError) as caught:
        smoke.exercise(server, TIMEOUT_S)
    assert complaint in str(caught.value)
    assert "the last words" in str(caught.value)


@pytest.mark.parametrize(
    ("release", "passes"),
    [
        (Behaviour(ended=1, said=f"{smoke.STOCK_ERROR}. weight_key=kMxfp4Static\nbye"), True),
        (Behaviour(ended=1, said="ImportError: libgomp"), False),
        (Behaviour(), False),  # it serves
    ],
)
def test_the_release_must_refuse_for_the_known_reason(release: Behaviour, passes: bool) -> None:
    with serving(release) as server:
        if passes:
            assert smoke.refusal(server, TIMEOUT_S) == smoke.STOCK_ERROR
        else:
            with pytest.raises(ServerError) as caught:
                smoke.refusal(server, TIMEOUT_S)
            assert caught.value.exit_code == ServerError.exit_code


# -- how servers are started ---------------------------------------------------------------------


@pytest.mark.parametrize("source", ["git", "release"])
def test_originals_are_those_of_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    files = {"vllm/a.py": b"1", "vllm/b.py": b"2"}
    # only what it has to read has the files: of git that is the wheel, else the sdist
    wheel = make_wheel(tmp_path, "vllm", "1.0", files if source == "git" else {})
    sdist = make_sdist(tmp_path, "vllm", "1.0", files if source == "release" else {})
    monkeypatch.setattr(wheels, "release_wheel", lambda *_: wheel)
    monkeypatch.setattr(sources, "fetch_release_file", lambda *_: sdist)

    def of(*replaced: str) -> dict[str, str]:
        result = WheelResult("x.whl", "0" * 64, "1", replaced=replaced)
        built = {"vllm": reached(item(result), result)}
        found = originals(context_of("cpu", source=source), built, tmp_path)
        return {name: path.read_text() for name, path in found.items()}

    assert of("vllm/a.py") == {"vllm/a.py": "1"}
    with pytest.raises(KeyError):
        of("vllm/c.py")


def started(
    monkeypatch: pytest.MonkeyPatch, folder: Path, options: list[str], *arguments: str
) -> list[str]:
    """Return what an environment's ``vllm serve`` gets after its address."""
    commands: list[list[str]] = []
    monkeypatch.setattr(servers, "from_command", lambda command, *_: commands.append(command))
    from_environment(folder, Launch(folder, options, arguments), folder, folder)
    (command,) = commands
    assert command[command.index("serve") + 1] == str(folder)
    return command[command.index("--served-model-name") + 2 :]


def test_restored_files_come_before_the_environments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package, old = tmp_path / "venv/lib/python/site-packages/demo", tmp_path / "old"
    package.mkdir(parents=True)
    old.write_text("the release's")
    given: list[Any] = []
    monkeypatch.setattr(servers, "from_command", lambda *words: given.extend(words))
    launch = Launch(tmp_path, [], (), {"PYTHONPATH": "/mask"})
    from_environment(tmp_path, launch, tmp_path / "work", tmp_path, {"demo/a.py": old})
    _, _, variables, work = given
    first, _, last = variables["PYTHONPATH"].partition(":")
    assert last == "/mask"
    assert Path(first).parent == work
    assert Path(first, "demo/a.py").read_text() == "the release's"


def test_a_server_gets_our_options_as_the_plugin_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--moe-backend", "bf16_dequant", "--enforce-eager", "--mxfp4-layers", "qkv,o"]
    assert started(monkeypatch, tmp_path, options, "--moe-backend=auto", "--mxfp4_layers=o") == [
        "--enforce-eager",
        "--moe-backend=auto",
        '--additional-config={"sparkforge":{"mxfp4_layers":"o"}}',
    ]
    assert started(monkeypatch, tmp_path, of_release(options)) == ["--enforce-eager"]
    with pytest.raises(UsageError):
        started(monkeypatch, tmp_path, options, "--additional-config", "[]")
