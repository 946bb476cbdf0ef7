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

from sparkforge.cli.main import main
from sparkforge.core.errors import BenchError, FetchError, SmokeError, UsageError
from sparkforge.core.index import Index
from sparkforge.inspect.bench import benchy, guard, result, session, tables
from sparkforge.inspect.bench.benchy import Asked, Tool
from sparkforge.inspect.bench.result import Identity, Machine
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
print("asked", value("--base-url"), "key", os.environ["SPARKFORGE_BENCH_KEY"])
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
    return {{"mean": mean, "std": 1, "values": [mean + i for i in range(count)]}}
speed = float(os.environ.get("FAKE_SPEED", "60"))
run = {{
    "concurrency": int(value("--concurrency")), "context_size": int(value("--depth")),
    "prompt_size": int(value("--pp")), "response_size": int(value("--tg")),
    "is_context_prefill_phase": False, "tg_throughput": None if joined else metric(speed),
    "pp_throughput": metric(4000.0), "e2e_ttft": metric(100.0),
}}
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
                found: Any = {"/v1/models": outer.models, "/version": {"version": "0.31.0"}}
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
    monkeypatch.setattr(guard.Guard, "quiet", lambda self, when: None)
    monkeypatch.setattr(guard.Guard, "limit", property(lambda self: 1e9))
    return log


def tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def bench(tmp_path: Path, *words: str) -> int:
    """Measure a running server as a user does; the result is in ``out``."""
    place = ["--out", str(tmp_path / "out"), "--store", str(tmp_path / "store")]
    return main(["bench", "--target", "spark", "--quick", *place, *words])


def test_a_running_server_is_measured(
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
    assert document["results"][0]["session"] == found.session
    assert (found.complete, found.clean, found.rounds, found.table) == (True, True, 1, "quick")
    assert found.identity.origin == "url"
    assert (found.identity.model, found.identity.context) == ("a-model", 4096)
    assert found.identity.server == "vLLM 0.31.0"
    assert [one.test.concurrency for one in found.samples if one.metric == "decode"] == [1, 2]
    assert found.samples[0].values == (60.0, 61.0, 62.0)
    # the target's memory is known, so its ceilings are
    assert len(found.ceilings) == 2
    first, second = (json.loads(line) for line in calls.read_text().splitlines())
    assert first[first.index("--base-url") + 1] == f"{serving.url}/v1"
    assert first[first.index("--tokenizer") + 1] == str(model)
    # the model is asked once whether it makes sense
    assert "--skip-coherence" not in first
    assert "--skip-coherence" in second
    logs = tmp_path / "out" / "llama-benchy" / "round-1"
    assert "key secret" in (logs / "pp512-tg32-d0-c1.log").read_text()
    # the key is in no command line, which everybody on the machine can read
    assert "secret" not in calls.read_text()
    assert "secret" not in seen.err
    page = (tmp_path / "out" / "report.md").read_text()
    assert all(f"({name})" in page for name in result.PICTURES)


def test_neither_a_proxy_nor_netrc_counts(
    tmp_path: Path,
    serving: Serving,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    assert main(["bench", "compare", str(tmp_path / "first"), str(tmp_path / "out")]) == 9


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of a run that measures nothing."""
    assert bench(tmp_path, *words) == BenchError.exit_code == 10
    err = capsys.readouterr().err
    assert "hint: " in err
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "result.json").exists()
    return err


def test_what_is_no_server_or_another_one_is_named(
    tmp_path: Path, serving: Serving, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(tokenizer(tmp_path / "model"))]
    nobody = f"http://127.0.0.1:{free_port(0)}"
    err = refused(tmp_path, capsys, "--url", nobody, *model)
    assert f"{nobody}: no server answers (ConnectionError)" in err
    assert "http://a..b: no server answers" in refused(
        tmp_path, capsys, "--url", "http://a..b", *model
    )
    here = ["--url", serving.url, *model]
    err = refused(tmp_path, capsys, *here, "--served-model", "other")
    assert f"{serving.url} serves a-model, not other" in err
    serving.key = "secret"
    assert "it wants an API key" in refused(tmp_path, capsys, *here)
    serving.key = ""
    answers: tuple[Any, ...] = ("<html>", "[" * 100_000, [], {"data": [1]}, {"data": 1}, None)
    for answer in answers:
        serving.models = answer
        assert "not the list of an OpenAI server" in refused(tmp_path, capsys, *here)
    serving.models = {"data": []}
    assert "serves no model" in refused(tmp_path, capsys, *here)
    serving.models = {"data": [{"id": "m", "max_model_len": 512}]}
    err = refused(tmp_path, capsys, *here)
    assert "pp512 tg32 (c1) needs 544 tokens; the server takes 512" in err
    assert not calls.exists()


def test_a_missing_tokenizer_is_named(
    tmp_path: Path, serving: Serving, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(tmp_path, capsys, "--url", serving.url)
    assert "no tokenizer.json of the model a-model" in err
    assert "hf download openai/gpt-oss-120b tokenizer.json" in err
    err = refused(tmp_path, capsys, "--url", serving.url, "--model", str(tmp_path))
    assert "tokenizer.json: No such file or directory" in err


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("HTTP 500: the engine is dead", "llama-benchy failed: HTTP 500: the engine is dead"),
        ("Coherence test FAILED: Expected 'Paris'. Got: x", "Expected 'Paris'. Got: x"),
        ("Falling back to 'gpt2' tokenizer as approximation.", "cannot read"),
        ("what?", "pp512 tg32 (c2): llama-benchy failed: what?"),
    ],
)
def test_a_failed_test_keeps_those_before_it(
    tmp_path: Path,
    serving: Serving,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    says: str,
    words: str,
) -> None:
    monkeypatch.setenv("FAKE_SAYS", says)
    model = tokenizer(tmp_path / "model")
    assert bench(tmp_path, "--url", serving.url, "--model", str(model)) == 10
    assert words in capsys.readouterr().err
    found = result.load(tmp_path / "out")
    assert not found.complete
    assert not found.clean
    assert {one.test.concurrency for one in found.samples} == {1}
    log = tmp_path / "out" / "llama-benchy" / "round-1" / "pp512-tg32-d0-c2.log"
    assert says in log.read_text()


def test_an_answer_in_one_piece_is_measured_again(
    tmp_path: Path,
    serving: Serving,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = ("--url", serving.url, "--model", str(tokenizer(tmp_path / "model")))
    monkeypatch.setenv("FAKE_JOINED", "4")
    assert bench(tmp_path, *here) == 0
    assert len(calls.read_text().splitlines()) == 4 + 2
    assert [one.values for one in result.load(tmp_path / "out").samples if one.metric == "decode"]
    calls.unlink()
    monkeypatch.setenv("FAKE_JOINED", "5")
    capsys.readouterr()
    assert bench(tmp_path, *here, "--out", str(tmp_path / "other")) == 10
    assert "no decode speed after 5 attempts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--url", "127.0.0.1:8000"], "is not the URL of a server"),
        (["--url", "http://user:hunter2@h"], "is not the URL of a server"),
        (["--url", "http://h", "--api-key-file", __file__], "not an API key"),
        (["--url", "http://h", "--vs", "unpatched"], "--vs is for a server that bench starts"),
        (["--url", "http://h", "--profile", "fats"], "did you mean fast"),
        (["--url", "http://h", "--", "--max-num-seqs", "4"], "-- is for a server that bench"),
        (["--served-model", "m"], "--served-model needs --url"),
        (["--api-key-file", "f"], "--api-key-file needs --url"),
        (["--profile-table", "seeds"], "contradict each other"),
        (["--text", "/no/such/file"], "No such file"),
        (["--text", __file__ + "/../__init__.py"], "No such file|Not a directory|characters"),
        (["--url", "http://h", "--api-key-file", "/no/such/file"], "No such file"),
        (["--runs", "0"], "not a whole number"),
        (["--vs", "release"], "invalid choice"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    import re

    assert bench(tmp_path, *words) == UsageError.exit_code
    assert re.search(why, capsys.readouterr().err)
    assert not calls.exists()


def test_a_result_is_not_overwritten(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("precious")
    assert bench(tmp_path, "--url", "http://127.0.0.1:9") == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "out" / "result.json").read_text() == "precious"


# -- two servers ---------------------------------------------------------------------------------


class Sides:
    """Two servers that are started in turns; what was started and ended, in order."""

    def __init__(self, folder: Path, serving: Serving) -> None:
        self.folder, self.url, self.said = folder, serving.url, list[str]()
        self.dies = 0

    def side(self, name: str) -> session.Side:
        @contextmanager
        def start() -> Iterator[Asked]:
            self.said.append(f"+{name}")
            if len(self.said) == self.dies:
                raise SmokeError("it does not start")
            yield Asked(self.url, "")
            self.said.append(f"-{name}")

        identity = Identity("build", "cpu", options=("--hf-token", "hunter2", "--seed", "4"))
        return session.Side(name, start, identity, ours=False)

    def plan(self, *, together: bool) -> session.Plan:
        return session.Plan(
            table_name="quick",
            table=tables.Table((64,), (8,)),
            tool=benchy.install(Store(self.folder), ROOT, "linux/amd64", NOWHERE),
            runs=1,
            rounds=3,
            together=together,
            words="words " * 1000,
            tokenizer=lambda said: self.folder / "model",
            coherent=False,
            machine=Machine("x", "y", 1, (), ""),
            ceilings=lambda tests: (),
        )

    def run(self, *, together: bool) -> list[result.Result]:
        sides = [self.side("a"), self.side("b")]
        work = self.folder / "work"
        work.mkdir()
        return session.run(sides, self.plan(together=together), self.folder / "out", work)


NOWHERE = Access(Index(), {}, offline=True)


@pytest.fixture
def two(tmp_path: Path, serving: Serving, calls: Path) -> Sides:
    tokenizer(tmp_path / "model")
    return Sides(tmp_path, serving)


def test_rounds_take_turns_and_are_paired(two: Sides) -> None:
    first, second = two.run(together=False)
    assert two.said == ["+a", "-a", "+b", "-b", "+b", "-b", "+a", "-a", "+a", "-a", "+b", "-b"]
    assert first.session == second.session
    for one in (first, second):
        assert (one.rounds, one.complete) == (3, True)
        assert [len(samples.rounds) for samples in one.samples] == [3, 3, 3]
        assert one.identity.options == ("--hf-token", "***", "--seed", "4")
        name = "a" if one is first else "b"
        assert result.load(two.folder / "out" / name) == one
        kept = two.folder / "out" / name / "llama-benchy"
        assert sorted(path.name for path in kept.iterdir()) == ["round-1", "round-2", "round-3"]


def test_two_small_servers_run_at_the_same_time(two: Sides) -> None:
    two.run(together=True)
    assert two.said == ["+a", "+b", "-b", "-a"]


def test_a_server_that_does_not_start_again_leaves_the_rounds_before(two: Sides) -> None:
    two.dies = 7  # the third start is of b's second round: +a -a +b -b +b -b +a
    with pytest.raises(SmokeError):
        two.run(together=False)
    rounds = [result.load(two.folder / "out" / name).rounds for name in "ab"]
    assert rounds == [1, 2]
    assert not result.load(two.folder / "out" / "a").complete


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
