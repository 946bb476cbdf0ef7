"""`build.py bench` with stand-ins for llama-benchy and for the server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkforge.build.stages import thirdparty
from sparkforge.check.bench import benchy, command
from sparkforge.check.bench.benchy import Call
from sparkforge.check.bench.command import Side
from sparkforge.cli.main import main
from sparkforge.core.errors import CheckError, ServerError, UsageError
from sparkforge.runtime.client import Place
from sparkforge.runtime.servers import free_port
from tests import openai_server
from tests.openai_server import KEY
from tests.support import ROOT, linked_checkout

# stands for the interpreter of llama-benchy's environment: -u -P -c CODE and llama-benchy's options
_FAKE = """\
#!{python}
import json, os, sys
words = sys.argv[5:]
value = lambda name: words[words.index(name) + 1]
print("asked", value("--base-url"), "key", os.environ["LLAMA_BENCHY_KEY"])
book = os.path.join(os.environ["HOME"], ".cache", "llama-benchy")
assert [os.path.getsize(os.path.join(book, one)) > 1000 for one in os.listdir(book)] == [True]
assert os.environ["HF_HUB_OFFLINE"] == "1"
with open({calls!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
if said := os.environ.get("FAKE_SAYS"):
    print(said)
    sys.exit(int(os.environ.get("FAKE_EXIT", "1")))
def metric(mean):
    return {{"values": [mean + i for i in range(int(value("--runs")))]}}
run = {{
    "prompt_size": 512, "response_size": 32, "context_size": 0, "concurrency": 1,
    "is_context_prefill_phase": False, "tg_throughput": metric(float(os.environ["FAKE_SPEED"])),
    "pp_throughput": metric(4000.0), "e2e_ttft": metric(100.0),
    "requests_throughput_over_time": [[[[0.0, 1.0]] * 32]],
}}
with open(value("--save-result"), "w") as file:
    json.dump({{"version": "0.4.0", "benchmarks": [run]}}, file)
"""
ONE = "pp512 tg32 (c1): decode, tok/s"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server that needs a key, which bench knows."""
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv("SPARKFORGE_API_KEY_FILE", str(tmp_path / "key"))
    with openai_server.serving() as fake:
        yield fake.url


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in in place of llama-benchy; the file of its calls."""
    (linked_checkout(tmp_path / "checkout") / "LICENSE").symlink_to(ROOT / "LICENSE")
    python, log = tmp_path / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir()
    python.write_text(_FAKE.format(python=sys.executable, calls=str(log)))
    python.chmod(0o755)
    monkeypatch.setattr(thirdparty, "install", lambda *words: (tmp_path, "0.4.0"))
    monkeypatch.setenv("FAKE_SPEED", "60")
    return log


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def bench(tmp_path: Path, *words: str) -> int:
    """Measure a running server as a user does."""
    place = ["--pins", str(tmp_path / "checkout" / "pins.yaml"), "--store", str(tmp_path / "store")]
    return main(["bench", "--table", "quick", *place, *words])


def results(tmp_path: Path) -> list[Path]:
    """Return the folders of results, the oldest first."""
    return sorted((tmp_path / "checkout" / "dist" / "bench").glob("*-quick"))


def test_running_server_is_measured(
    tmp_path: Path,
    url: str,
    calls: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither a proxy nor netrc counts."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port(0)}")
    monkeypatch.delenv("no_proxy", raising=False)
    (tmp_path / "netrc").write_text("default login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    words = ["--url", f"{url}/v1/", "--model", str(model), "--json", "-v"]
    assert bench(tmp_path, *words) == 0
    seen = capsys.readouterr()
    document = json.loads(seen.out)
    (folder,) = results(tmp_path)
    assert document["folders"] == [str(folder)]
    found = benchy.load(folder)
    known = found.identity
    assert (known["origin"], known["model"], known["table"]) == ("url", "m", "quick")
    assert found.tests[ONE] == [60, 61, 62]
    (words,) = map(json.loads, calls.read_text().splitlines())
    assert words[words.index("--base-url") + 1] == f"{url}/v1"
    assert words[words.index("--tokenizer") + 1] == str(model)
    assert words[words.index("--concurrency") + 1 :][:2] == ["1", "2"]
    assert "--skip-coherence" not in words
    assert f"key {KEY}" in (folder / "llama-benchy-1.log").read_text()
    # the key is in no command line, which everybody on the machine can read
    assert KEY not in calls.read_text()
    assert KEY not in seen.err
    first = folder.rename(tmp_path / "first")
    monkeypatch.setenv("FAKE_SPEED", "30")
    assert bench(tmp_path, "--url", url, "--model", str(model)) == 0
    (second,) = results(tmp_path)
    assert main(["bench", "compare", str(first), str(second)]) == CheckError.exit_code


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Check a run that measures nothing; returns what it said."""
    assert bench(tmp_path, *words) == code
    err = capsys.readouterr().err
    assert "hint: " in err
    assert "Traceback" not in err
    assert not any((one / "result.json").exists() for one in results(tmp_path))
    return err


def test_server_that_cannot_be_measured_is_one_error(
    tmp_path: Path, url: str, calls: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--url"]
    absent = f"http://127.0.0.1:{free_port(0)}"
    refused(tmp_path, capsys, ServerError.exit_code, *words, absent)
    (tmp_path / "key").write_text("another\n")
    refused(tmp_path, capsys, ServerError.exit_code, *words, url)
    assert not calls.exists()


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ("HTTP 500: the engine is dead", 1),
        ("Coherence test FAILED: Expected 'Paris'. Got: x", 1),
        ("Falling back to 'gpt2' tokenizer as approximation.", 0),
        ("what?", 0),
    ],
)
def test_failure_of_llama_benchy_is_one_error(
    tmp_path: Path,
    url: str,
    calls: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    says: str,
    code: int,
) -> None:
    monkeypatch.setenv("FAKE_SAYS", says)
    monkeypatch.setenv("FAKE_EXIT", str(code))
    words = ("--url", url, "--model", str(model))
    assert says in refused(tmp_path, capsys, ServerError.exit_code, *words)
    (folder,) = results(tmp_path)
    assert says in (folder / "llama-benchy-1.log").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "127.0.0.1:8000"],
        ["--url", "http://user:hunter2@h"],
        ["--url", "http://h"],  # no tokenizer
        ["--url", "http://h", "--vs", "unpatched"],
        ["--url", "http://h", "--", "--max-num-seqs", "4"],
        ["--target", "spark"],  # it has no tiny model
        [],
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert bench(tmp_path, *words) == UsageError.exit_code
    assert "hunter2" not in capsys.readouterr().out
    assert not calls.exists()


def test_rounds_take_turns(tmp_path: Path, url: str, calls: Path, model: Path) -> None:
    events = []

    def side(name: str) -> Side:
        @contextmanager
        def start() -> Iterator[Place]:
            events.append(name)
            yield Place(f"{url}/v1", KEY)

        return Side(name, model, start, {"origin": "build"})

    call = Call(tmp_path / "bin" / "python", tmp_path / "home", ["--runs", "1"], "words " * 1000)
    out = tmp_path / "out"
    found = command.measure([side("a"), side("b")], {}, call, 3, out)
    assert events == ["a", "b", "b", "a", "a", "b"]
    for name in ("a", "b"):
        assert found[name].tests[ONE] == [60, 60, 60]
        assert benchy.load(out / name) == found[name]


# -- llama-benchy's own environment ----------------------------------------------------------------


def test_its_environment_has_no_client_of_a_hub() -> None:
    """So a tokenizer or a text can't come from one, whatever llama-benchy tries."""
    text = (ROOT / benchy.LOCK).read_text()
    assert "llama-benchy==" in text
    for name in ("huggingface-hub", "transformers", "openai"):
        assert f"\n{name}==" not in text


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
