"""llama-benchy in its own environment, with one call for each test.

So an interrupted run keeps its earlier tests. The text comes from llama-benchy's cache of books,
and the environment has no client of a hub, so nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import plain
from sparkforge.core.errors import BenchError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.run import call
from sparkforge.inspect.bench.tables import Test
from sparkforge.runtime import interpreter
from sparkforge.sources import wheelhouse
from sparkforge.sources.sources import Access
from sparkforge.store.codekey import code_of
from sparkforge.store.store import Store

LOCK = "requirements/bench.txt"
_BOOK = "sparkforge-text"
"""Name of the text in llama-benchy's cache, instead of a book's address."""
_KEY = "SPARKFORGE_BENCH_KEY"
# The key is not an argument, since all users of the machine can read those. llama-benchy keeps idle
# connections for 600 s. Servers close them sooner (vLLM after 5 s): a request at that moment would
# end the run.
_START = f"""
import os, sys, aiohttp
sys.argv += ['--api-key', os.environ.pop('{_KEY}')]
pool = aiohttp.TCPConnector
aiohttp.TCPConnector = lambda **options: pool(**{{**options, 'keepalive_timeout': 1}})
from llama_benchy.__main__ import main
main()
"""
_FELL_BACK = "Falling back to 'gpt2' tokenizer"
_NO_KEY = "EMPTY"


@dataclass(frozen=True)
class _Installed:
    """Result of the environment: llama-benchy's version."""

    version: str


@dataclass(frozen=True)
class Tool:
    """llama-benchy, installed.

    Attributes:
        lock: sha256 of its hash-locked requirements.
    """

    python: Path
    version: str
    lock: str


@dataclass(frozen=True)
class Asked:
    """The server to measure.

    Attributes:
        url: without ``/v1``.
        model: its id in requests.
        key: "" for none.
    """

    url: str
    model: str
    key: str = ""


@dataclass(frozen=True)
class Call:
    """The common arguments of a run's calls.

    Attributes:
        tokenizer: folder with a ``tokenizer.json``.
        home: folder with the text, see ``prepare``.
        runs: of each test, after one warm-up.
        coherent: first ask a question with a known answer.
    """

    tool: Tool
    tokenizer: Path
    home: Path
    runs: int
    prefix_caching: bool
    coherent: bool


def install(store: Store, root: Path, platform: str, access: Access) -> Tool:
    """Return llama-benchy, installed if the store lacks it.

    Raises:
        FetchError, IntegrityError: as ``wheelhouse.fill``.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lock = root / LOCK
    identity = sha256_file(lock)
    inputs = {
        "lock": identity,
        "platform": platform,
        "python": sys.version,
        "code": code_of(__name__),
    }
    version = next(
        line.version for line in wheelhouse.read_lock(lock) if line.name == "llama-benchy"
    )

    def make(folder: Path) -> _Installed:
        wanted = wheelhouse.Wanted(
            lock=lock, tools=(), python=python, platform=platform, torch_backend=None
        )
        wheels = folder / "wheels"
        wheels.mkdir()
        uv = interpreter.uv_program()
        wheelhouse.fill(store, wanted, access.index, uv, offline=access.offline, into=wheels)
        venv = folder / "venv"
        alone = {"UV_NO_CONFIG": "1", "VIRTUAL_ENV": "", "UV_LINK_MODE": "copy"}
        quietly = ("--quiet", "--no-cache")
        call(uv, "venv", *quietly, "--relocatable", "--python", sys.executable, venv, env=alone)
        words = ("--offline", "--no-index", "--no-deps", "--require-hashes")
        links = ("--find-links", wheels, "-r", lock)
        into = ("--python", venv / "bin" / "python")
        call(uv, "pip", "install", *quietly, *into, *words, *links, env=alone)
        return _Installed(version)

    made = store.build("bench-tool", inputs, _Installed, make)
    store.remember("bench", "llama-benchy", made)
    return Tool(made.path / "venv" / "bin" / "python", made.result.version, identity)


def prepare(home: Path, text: str) -> None:
    """Write the text into llama-benchy's cache of books."""
    # its name for a file: the MD5 of the address
    name = hashlib.md5(_BOOK.encode(), usedforsecurity=False).hexdigest()
    cache = home / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    (cache / f"{name}.txt").write_text(text, encoding="utf-8")


def check_tokenizer(folder: Path) -> None:
    """Check that a folder has a tokenizer that llama-benchy can read.

    Raises:
        BenchError: it has none.
    """
    path = folder / "tokenizer.json"
    try:
        found = plain.json_of(path.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not JSON"
        remedy = "give the model's folder, which has it, with --model DIR"
        raise BenchError(f"{path}: {why}", remedy) from None
    if not isinstance(found, dict) or "model" not in found:
        raise BenchError(f"{path}: not a tokenizer", "download the model's tokenizer.json again")


def measure(common: Call, asked: Asked, test: Test, folder: Path) -> Path:
    """Run one test; return llama-benchy's result file in ``folder``, with its log beside it.

    Raises:
        BenchError: a request failed, or the model's answer makes no sense.
    """
    result, log_path = folder / f"{test.slug}.json", folder / f"{test.slug}.log"
    variables: Mapping[str, str] = {
        "HOME": str(common.home),
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        # a proxy would be measured, too
        "NO_PROXY": "*",
        "no_proxy": "*",
        _KEY: asked.key or _NO_KEY,
    }
    words = _words(common, asked, test, result)
    lines: list[str] = []
    try:
        done = call(
            common.tool.python,
            "-P",
            "-c",
            _START,
            *words,
            env=variables,
            cwd=folder,
            stream=lines.append,
            check=False,
        )
    finally:
        log_path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    if any(_FELL_BACK in line for line in lines):
        msg = f"llama-benchy cannot read {common.tokenizer / 'tokenizer.json'}"
        raise BenchError(msg, f"download it again; its log: {log_path}")
    if done.returncode or not result.exists():
        raise _failure(test, lines, done.returncode, log_path)
    return result


def _words(common: Call, asked: Asked, test: Test, result: Path) -> Sequence[str]:
    words = ["--base-url", f"{asked.url}/v1", "--model", asked.model]
    words += ["--tokenizer", str(common.tokenizer), "--book-url", _BOOK]
    words += ["--pp", str(test.prompt), "--tg", str(test.generated), "--depth", str(test.depth)]
    words += ["--concurrency", str(test.concurrency), "--runs", str(common.runs)]
    words += ["--exit-on-first-fail", "--format", "json", "--save-result", str(result)]
    if common.prefix_caching:
        words.append("--enable-prefix-caching")
    if not common.coherent:
        words.append("--skip-coherence")
    return words


def _failure(test: Test, lines: Sequence[str], code: int, log_path: Path) -> BenchError:
    """Return the error of a failed call, with the reason from its output if there is one."""
    incoherent = next((line for line in lines if "Coherence test FAILED" in line), None)
    if incoherent is not None:
        what = incoherent.partition("FAILED")[2].lstrip(": ")
        remedy = "fix the model, or omit the question with --skip-coherence"
        return BenchError(f"the model does not answer a simple question: {what[:300]}", remedy)
    why = next(
        (line for line in lines if re.search(r"HTTP \d|[Ee]rror|failed", line)),
        next((line for line in reversed(lines) if line.strip()), "no output"),
    )
    if code < 0:
        why = f"ended by signal {-code}"
    msg = f"{test.name}: llama-benchy failed: {why.strip()[:300]}"
    return BenchError(msg, f"see its log, {log_path}, and the server's")
