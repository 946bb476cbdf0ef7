"""llama-benchy in an environment of its own, one call for each test.

So an interrupted run keeps its earlier tests. The text comes from llama-benchy's cache of books,
and the environment has no client of a hub, so nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sparkforge.check.bench.result import Metric, Samples
from sparkforge.core import plain
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import ServerError
from sparkforge.core.run import call
from sparkforge.runtime import interpreter
from sparkforge.runtime.client import Place
from sparkforge.sources import wheelhouse
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store, code_of

LOCK = "requirements/bench.txt"
_BOOK = "sparkforge-text"
"""Name of the text in llama-benchy's cache, instead of a book's address."""
_KEY = "LLAMA_BENCHY_KEY"
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
_FIELDS: Mapping[str, Metric] = {
    "tg_throughput": "decode",
    "pp_throughput": "prefill",
    "e2e_ttft": "ttft",
}
_WORDS = """
the a an old young smith baker guard ferryman teacher captain opened carried forgot measured
repaired sold counted painted iron gate box letters seven copper coins clock map table basket
apples key lantern book bottle bridge rope curtain behind station in market hall at edge of
forest beside river under stairs near mill before sunrise on Tuesday after storm at noon late
evening while it rained and but because although with great care as usual
"""


@dataclass(frozen=True)
class Test:
    """One test, in tokens: context before the prompt, prompt, limit of the answer; and requests."""

    depth: int
    prompt: int
    generated: int
    concurrency: int

    @property
    def name(self) -> str:
        """The name in llama-benchy's tables: ``pp2048 tg128 @ d4096 (c2)``."""
        at = f" @ d{self.depth}" if self.depth else ""
        return f"pp{self.prompt} tg{self.generated}{at} (c{self.concurrency})"

    @property
    def tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.depth + self.prompt + self.generated


def _tests(*numbers: tuple[int, ...]) -> tuple[Test, ...]:
    return tuple(itertools.starmap(Test, itertools.product(*numbers)))


TABLES: Mapping[str, tuple[Test, ...]] = {
    "quick": _tests((0,), (512,), (32,), (1, 2)),
    "seeds": _tests((0,), (512, 2048, 8192), (32, 128), (1,)),
    "community": _tests(
        (0, 4096, 8192, 16384, 32768, 65536, 100_000), (2048,), (128,), (1, 2, 5, 10)
    ),
}
"""By the name for ``--profile-table``.

``seeds``: the shape of the first published figures of gpt-oss-120b on one Spark. ``community``: the
shape of spark-arena's profiles v1 and v2 (read on 2026-11-20), with prefix caching; the depths
between its ends are ours.
"""


@dataclass(frozen=True)
class _Installed:
    """Result of the environment: llama-benchy's version."""

    version: str


@dataclass(frozen=True)
class Tool:
    """llama-benchy, installed; ``lock``: sha256 of its hash-locked requirements."""

    python: Path
    version: str
    lock: str


@dataclass(frozen=True)
class Call:
    """The common arguments of a run's calls.

    Attributes:
        tokenizer: folder with a ``tokenizer.json``.
        home: folder with the text, see ``prepare``.
        runs: of each test, after one warm-up.
        prefix_caching: a request of its own loads the context, and is measured, too.
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


def text_for(tests: Sequence[Test]) -> str:
    """Return text for prompts: plain words without a meaning, the same on every machine.

    Speed depends on the number of tokens. A router's choice of experts depends on the words, too,
    so a comparison uses one text.
    """
    # a token has some 5 bytes; room for several places to begin at
    count = max(50_000, 4 * max(test.tokens for test in tests))
    random = Random(4)  # random() is the same in every Python; choice() need not be
    known = _WORDS.split()
    words = [known[int(random.random() * len(known))] for _ in range(count)]
    return "\n".join(" ".join(words[at : at + 12]) + "." for at in range(0, count, 12))


def measure(common: Call, place: Place, model: str, test: Test, file: Path) -> None:
    """Run one test; write llama-benchy's result to ``file``, its log and its events beside it.

    Raises:
        ServerError: a request failed, or the model's answer makes no sense.
    """
    log_path, part = file.with_suffix(".log"), file.with_suffix(".part")
    variables = {
        "HOME": str(common.home),
        "PYTHONPATH": "",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "*"),  # a proxy would be measured, too
        _KEY: place.key or "EMPTY",
    }
    words = ["--base-url", place.url, "--model", model]
    words += ["--tokenizer", str(common.tokenizer), "--book-url", _BOOK]
    words += ["--pp", str(test.prompt), "--tg", str(test.generated), "--depth", str(test.depth)]
    words += ["--concurrency", str(test.concurrency), "--runs", str(common.runs)]
    words += ["--exit-on-first-fail", "--format", "json", "--save-result", str(part)]
    words += ["--emit-progress", str(file.with_suffix(".jsonl"))]
    words += ["--enable-prefix-caching"] if common.prefix_caching else []
    words += [] if common.coherent else ["--skip-coherence"]
    lines: list[str] = []
    command: list[str | Path] = [common.tool.python, "-P", "-c", _START, *words]
    try:
        done = call(*command, env=variables, cwd=file.parent, stream=lines.append, check=False)
    finally:
        log_path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    fell_back = any("Falling back" in line for line in lines)  # to another model's tokenizer
    if done.returncode or fell_back or not part.exists():
        told = (line for line in lines if re.search(r"FAILED|back|HTTP \d|[Ee]rror|failed", line))
        last = (line for line in reversed(lines) if line.strip())
        why = next(told, next(last, f"exit code {done.returncode}")).strip()[:300]
        hint = f"see its log, {log_path}, and the server's"
        if "Coherence test" in why:
            hint = "fix the model, or omit the question with --skip-coherence"
        raise ServerError(f"{test.name}: llama-benchy failed: {why}", hint)
    part.rename(file)


def read(file: Path, test: Test) -> list[Samples]:
    """Return the samples of one test.

    Raises:
        ServerError: the file is not llama-benchy's of that test.
    """
    try:
        return [
            Samples(f"{test.name}{', loading the context' * loads}", metric, values)
            for run in plain.json_of(file.read_bytes())["benchmarks"]
            for loads in [bool(run["is_context_prefill_phase"])]
            for field, metric in _FIELDS.items()
            if (values := _values(run[field], metric, test))
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        msg = f"{file}: not a result of llama-benchy: {error!r}"
        raise ServerError(msg, "see its log beside it") from None


def _values(found: Any, metric: Metric, test: Test) -> tuple[float, ...]:
    """Return one value for each run; none for a metric that llama-benchy did not see.

    For the first token it has a value for each request. Requests of one run wait for each other,
    so they are not independent: their mean is one sample.
    """
    values = [float(value) for value in (found or {"values": []})["values"]]
    step = test.concurrency if metric == "ttft" and len(values) % test.concurrency == 0 else 1
    means = [statistics.fmean(values[at : at + step]) for at in range(0, len(values), step)]
    return tuple(means) if all(value > 0 for value in means) else ()


def received(file: Path, test: Test, *, prefix_caching: bool) -> float:
    """Return the mean tokens of a test's answers, by llama-benchy's events beside its result."""
    lines = file.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    ends = [event for event in map(json.loads, lines) if event["type"] == "request_end"]
    counts = [end["total_tokens"] for end in sorted(ends, key=lambda end: int(end["request_id"]))]
    if prefix_caching and test.depth:  # each run's first requests load the context
        counts = [n for at, n in enumerate(counts) if at // test.concurrency % 2]
    return statistics.fmean(counts) if counts else 0.0
