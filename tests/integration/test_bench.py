"""`build.py bench` with stand-ins for llama-benchy and for the server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparkforge.check.bench import benchy, result, session
from sparkforge.check.bench.benchy import Call, Tool
from sparkforge.check.bench.result import Identity
from sparkforge.check.bench.session import Measurement
from sparkforge.check.bench.sides import Side
from sparkforge.cli.main import main
from sparkforge.core.errors import (
    CheckError,
    FetchError,
    ServerError,
    UsageError,
)
from sparkforge.core.index import Index
from sparkforge.runtime.client import Place
from sparkforge.runtime.servers import free_port
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store
from tests.support import ROOT

# stands for the interpreter of llama-benchy's environment: -P -c CODE and llama-benchy's options
_FAKE = """\
#!{python}
import json, os, sys
words = sys.argv[4:]
value = lambda name: words[words.index(name) + 1]
print("asked", value("--base-url"), "key", os.environ["LLAMA_BENCHY_KEY"])
book = os.path.join(os.environ["HOME"], ".cache", "llama-benchy")
assert [os.path.getsize(os.path.join(book, one)) > 1000 for one in os.listdir(book)] == [True]
assert os.environ["HF_HUB_OFFLINE"] == "1"
with open({calls!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
said = os.environ.get("FAKE_SAYS")
if said and value("--concurrency") == "2":
    print(said)
    sys.exit(int(os.environ.get("FAKE_EXIT", "1")))
count = int(value("--runs"))
with open({calls!r}) as file:
    joined = len(list(file)) <= int(os.environ.get("FAKE_JOINED", "0"))
def metric(mean):
    return {{"values": [mean + i for i in range(count)]}}
speed = float(os.environ.get("FAKE_SPEED", "60"))
run = {{
    "is_context_prefill_phase": False, "tg_throughput": None if joined else metric(speed),
    "pp_throughput": metric(4000.0), "e2e_ttft": metric(100.0),
}}
with open(value("--emit-progress"), "w") as file:
    tokens = int(os.environ.get("FAKE_TOKENS", value("--tg")))
    end = {{"type": "request_end", "request_id": 1, "total_tokens": tokens}}
    file.write(json.dumps({{"type": "header"}}) + "\\n" + json.dumps(end) + "\\n")
with open(value("--save-result"), "w") as file:
    json.dump({{"version": "0.4.0", "benchmarks": [run]}}, file)
"""


class Serving:
    """A server that lists its model, and needs a key if it has one."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "a-model", "max_model_len": 4096}]}
        self.key = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                known = not outer.key or self.headers["Authorization"] == f"Bearer {outer.key}"
                found: Any = {"/v1/models": outer.models}
                body = found.get(self.path)
                self.send_response(401 if not known else 404 if body is None else 200)
                text = body if isinstance(body, str) else json.dumps(body)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serving() -> Iterator[Serving]:
    one = Serving()
    yield one
    one.close()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in in place of llama-benchy, on an idle machine; the file of its calls."""
    python, log = tmp_path / "python", tmp_path / "calls"
    python.write_text(_FAKE.format(python=sys.executable, calls=str(log)))
    python.chmod(0o755)
    tool = Tool(python, "0.4.0", "1" * 64)
    monkeypatch.setattr(benchy, "install", lambda *words: tool)
    monkeypatch.setattr(session, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(session, "smi", lambda fields: "")
    return log


def tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def bench(tmp_path: Path, *words: str) -> int:
    """Measure a running server as a user does; the result is in ``out``."""
    place = ["--out", str(tmp_path / "out"), "--store", str(tmp_path / "store")]
    return main(["bench", "--target", "spark", "--quick", *place, *words])


def test_running_server_is_measured(
    tmp_path: Path, serving: Serving, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    model = tokenizer(tmp_path / "model")
    words = ["--url", f"{serving.url}/v1/", "--api-key-file", str(tmp_path / "key")]
    assert bench(tmp_path, *words, "--model", str(model), "--json", "-v") == 0
    seen = capsys.readouterr()
    document = json.loads(seen.out)
    found = result.load(tmp_path / "out")
    assert document["folders"] == [str(tmp_path / "out")]
    assert document["results"][0]["started"] == found.started
    assert found.clean
    known = found.identity
    assert (known.origin, known.model, known.table, known.runs) == ("url", "a-model", "quick", 3)
    decode = [one for one in found.samples if one.metric == "decode"]
    assert [one.test for one in decode] == ["pp512 tg32 (c1)", "pp512 tg32 (c2)"]
    assert decode[0].values == (60.0, 61.0, 62.0)
    first, second = (json.loads(line) for line in calls.read_text().splitlines())
    assert first[first.index("--base-url") + 1] == f"{serving.url}/v1"
    assert first[first.index("--tokenizer") + 1] == str(model)
    # the model is asked once whether it makes sense
    assert "--skip-coherence" not in first
    assert "--skip-coherence" in second
    logs = tmp_path / "out" / "llama-benchy" / "round-1"
    assert "key secret" in (logs / "pp512-tg32-c1.log").read_text()
    # the key is in no command line, which everybody on the machine can read
    assert "secret" not in calls.read_text()
    assert "secret" not in seen.err


def test_neither_a_proxy_nor_netrc_counts(
    tmp_path: Path, serving: Serving, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port(0)}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text("default login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    serving.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    words = ["--url", serving.url, "--api-key-file", str(tmp_path / "key")]
    assert bench(tmp_path, *words, "--model", str(tokenizer(tmp_path / "model"))) == 0


def test_two_runs_are_compared(
    tmp_path: Path, serving: Serving, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--url", serving.url, "--model", str(tokenizer(tmp_path / "model"))]
    assert bench(tmp_path, *words) == 0
    (tmp_path / "out").rename(tmp_path / "first")
    monkeypatch.setenv("FAKE_SPEED", "30")
    assert bench(tmp_path, *words) == 0
    pair = (str(tmp_path / "first"), str(tmp_path / "out"))
    assert main(["bench", "compare", *pair]) == CheckError.exit_code


@pytest.mark.parametrize(
    ("name", "value"), [("busy_cores", lambda: 1e9), ("smi", lambda fields: "Not Active, Active")]
)
def test_busy_machine_or_hot_gpu_disturbs(
    tmp_path: Path,
    serving: Serving,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
) -> None:
    monkeypatch.setattr(session, name, value)
    assert bench(tmp_path, "--url", serving.url, "--model", str(tokenizer(tmp_path / "m"))) == 0
    found = result.load(tmp_path / "out")
    assert found.complete
    assert len(found.disturbed) == 1


def test_short_answers_disturb(
    tmp_path: Path, serving: Serving, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TOKENS", "3")
    assert bench(tmp_path, "--url", serving.url, "--model", str(tokenizer(tmp_path / "m"))) == 0
    disturbed = result.load(tmp_path / "out").disturbed
    assert [text.partition(":")[0] for text in disturbed] == ["pp512 tg32 (c1)", "pp512 tg32 (c2)"]
    assert "3.0 of 32 tokens" in disturbed[0]


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    """Check a run that measures nothing."""
    assert bench(tmp_path, *words) == code
    err = capsys.readouterr().err
    assert "hint: " in err
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "result.json").exists()


def test_server_that_cannot_be_measured_is_one_error(
    tmp_path: Path, serving: Serving, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(tokenizer(tmp_path / "model"))]
    here = ["--url", serving.url, *model]
    absent = f"http://127.0.0.1:{free_port(0)}"
    refused(tmp_path, capsys, ServerError.exit_code, "--url", absent, *model)
    refused(tmp_path, capsys, ServerError.exit_code, "--url", "http://a..b", *model)
    serving.key = "secret"
    refused(tmp_path, capsys, ServerError.exit_code, *here)
    serving.key = ""
    answers: list[Any] = [
        "<html>",
        "[" * 100_000,
        [],
        {"data": [1]},
        {"data": 1},
        {"data": []},
        None,
    ]
    for answer in answers:
        serving.models = answer
        refused(tmp_path, capsys, ServerError.exit_code, *here)
    refused(tmp_path, capsys, ServerError.exit_code, "--url", serving.url)  # no tokenizer
    assert not calls.exists()


@pytest.mark.parametrize(
    "says",
    [
        "HTTP 500: the engine is dead",
        "Coherence test FAILED: Expected 'Paris'. Got: x",
        "Falling back to 'gpt2' tokenizer as approximation.",
        "what?",
    ],
)
def test_interrupted_run_keeps_its_tests_and_continues(
    tmp_path: Path,
    serving: Serving,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    says: str,
) -> None:
    monkeypatch.setenv("FAKE_SAYS", says)
    here = ("--url", serving.url, "--model", str(tokenizer(tmp_path / "model")))
    assert bench(tmp_path, *here) == ServerError.exit_code
    assert says in capsys.readouterr().err
    found = result.load(tmp_path / "out")
    assert not found.complete
    assert {one.test for one in found.samples} == {"pp512 tg32 (c1)"}
    logs = tmp_path / "out" / "llama-benchy" / "round-1"
    assert says in (logs / "pp512-tg32-c2.log").read_text()
    monkeypatch.delenv("FAKE_SAYS")
    assert bench(tmp_path, *here, "--runs", "4") == UsageError.exit_code  # another run
    assert bench(tmp_path, *here) == 0
    assert len(calls.read_text().splitlines()) == 3
    again = result.load(tmp_path / "out")
    assert again.clean
    assert again.started == found.started
    assert again.samples[: len(found.samples)] == found.samples
    assert bench(tmp_path, *here) == UsageError.exit_code  # complete
    assert result.load(tmp_path / "out") == again


def test_answer_in_one_piece_is_measured_again(
    tmp_path: Path, serving: Serving, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ("--url", serving.url, "--model", str(tokenizer(tmp_path / "model")))
    monkeypatch.setenv("FAKE_JOINED", "4")
    assert bench(tmp_path, *here) == 0
    assert len(calls.read_text().splitlines()) == 4 + 2
    calls.unlink()
    monkeypatch.setenv("FAKE_JOINED", "5")
    assert bench(tmp_path, *here, "--out", str(tmp_path / "other")) == ServerError.exit_code


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "127.0.0.1:8000"],
        ["--url", "http://user:hunter2@h"],
        ["--url", "http://h", "--api-key-file", __file__],
        ["--url", "http://h", "--api-key-file", "/no/such/file"],
        ["--url", "http://h", "--vs", "unpatched"],
        ["--url", "http://h", "--", "--max-num-seqs", "4"],
        ["--api-key-file", "f"],
        ["--profile-table", "seeds"],
        ["--text", "/no/such/file"],
        ["--runs", "0"],
        ["--vs", "release"],
        [],  # the target has no tiny model
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert bench(tmp_path, *words) == UsageError.exit_code
    assert "hunter2" not in capsys.readouterr().out
    assert not calls.exists()


# -- two servers ---------------------------------------------------------------------------------


class Sides:
    """Two servers that are started in turns; their starts and ends, in order."""

    def __init__(self, folder: Path, serving: Serving) -> None:
        self.folder, self.url, self.events = folder, serving.url, list[str]()
        self.dies = 0

    def side(self, name: str) -> Side:
        @contextmanager
        def start() -> Iterator[Place]:
            self.events.append(f"+{name}")
            if len(self.events) == self.dies:
                raise ServerError("it does not start")
            yield Place(f"{self.url}/v1")
            self.events.append(f"-{name}")

        return Side(name, start, Identity("build", "cpu", options=("--hf-token", "hunter2")))

    def run(self, *, together: bool) -> list[result.Result]:
        tool = benchy.install(Store(self.folder), ROOT, "linux/amd64", NOWHERE)
        home = self.folder / "home"
        if not home.exists():
            benchy.prepare(home, "words " * 1000)
        call = Call(tool, self.folder / "model", home, 1, prefix_caching=False, coherent=False)
        common, tests = Identity("url", "cpu"), benchy.TABLES["quick"][:1]
        out = self.folder / "out"
        sides = [self.side("a"), self.side("b")]
        runs = [Measurement.of(side, common, tests, call, 3, out) for side in sides]
        session.measure(runs, 3, together=together)
        return [run.result for run in runs]


NOWHERE = Access(Index(), {}, offline=True)


@pytest.fixture
def two(tmp_path: Path, serving: Serving, calls: Path) -> Sides:
    tokenizer(tmp_path / "model")
    return Sides(tmp_path, serving)


def test_rounds_take_turns(two: Sides) -> None:
    found = two.run(together=False)
    assert two.events == ["+a", "-a", "+b", "-b", "+b", "-b", "+a", "-a", "+a", "-a", "+b", "-b"]
    for name, one in zip("ab", found, strict=True):
        assert one.complete
        assert [len(samples.values) for samples in one.samples] == [3, 3, 3]
        assert one.identity.options == ("--hf-token", "***")
        assert result.load(two.folder / "out" / name) == one


def test_two_small_servers_run_at_the_same_time(two: Sides) -> None:
    two.run(together=True)
    assert two.events == ["+a", "+b", "-b", "-a"]


def test_rounds_continue_after_a_server_that_did_not_start(two: Sides) -> None:
    two.dies = 7  # the third start is of b's second round: +a -a +b -b +b -b +a
    with pytest.raises(ServerError):
        two.run(together=False)
    kept = [result.load(two.folder / "out" / name) for name in "ab"]
    assert [len(one.samples[0].values) for one in kept] == [1, 2]
    two.events.clear()
    two.dies = 0
    assert all(one.complete for one in two.run(together=False))
    assert two.events == ["+a", "-a", "+a", "-a", "+b", "-b"]


# -- llama-benchy's own environment ----------------------------------------------------------------


def test_its_environment_has_no_client_of_a_hub() -> None:
    """So a tokenizer or a text can't come from one, whatever llama-benchy tries."""
    text = (ROOT / benchy.LOCK).read_text()
    assert "llama-benchy==" in text
    for name in ("huggingface-hub", "transformers", "openai"):
        assert f"\n{name}==" not in text


def test_without_a_network_its_absence_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(FetchError):
        benchy.install(Store(tmp_path / "store"), ROOT, "linux/amd64", NOWHERE)


def test_it_starts_with_the_key_and_drops_idle_connections(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("TCPConnector = dict")
    (tmp_path / "llama_benchy").mkdir()
    (tmp_path / "llama_benchy" / "__main__.py").write_text(
        "import aiohttp, json, os, sys\n"
        "def main():\n"
        "    made = aiohttp.TCPConnector(limit=7, keepalive_timeout=600)\n"
        f"    print(json.dumps([sys.argv[1:], os.environ.get({benchy._KEY!r}), made]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", benchy._START, "--runs", "3"],
        env={benchy._KEY: "k", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    words = ["--runs", "3", "--api-key", "k"]
    assert json.loads(done.stdout) == [words, None, {"limit": 7, "keepalive_timeout": 1}]
