"""llama-benchy, and the results that ``bench`` keeps and compares.

The text comes from llama-benchy's cache of books, and the environment has no client of a hub, so
nothing is downloaded.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from sparkforge.core import plain
from sparkforge.core.disk import read_json, read_yaml, write_file
from sparkforge.core.errors import ServerError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.runtime.client import Place

LOCK, FILE = "requirements/bench.txt", "result.json"
_BOOK = "sparkforge-text"
"""Name of the text in llama-benchy's cache, instead of a book's address."""
_KEY = "LLAMA_BENCHY_KEY"
_SPREAD = 0.1  # between the runs of a test, of their median
_FULL = 0.75  # of the tokens asked for: those of Harmony's frame are no text, and not counted
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
METRICS: Mapping[str, str] = {
    "decode, tok/s": "tg_throughput",
    "prefill, tok/s": "pp_throughput",
    "first token, ms": "e2e_ttft",
}
"""llama-benchy's fields, by our names; tokens a second are of all requests together."""
TABLES: Mapping[str, str] = read_yaml(Path(__file__).with_name("tables.yaml"))
"""llama-benchy's options by the name for ``--table``."""


@dataclass(frozen=True)
class Call:
    """llama-benchy's interpreter and home, and the options and the text of all runs."""

    python: Path
    home: Path
    options: Sequence[str]
    text: str
    coherent: bool = False
    """Ask a simple question first, which a model with random weights cannot answer."""

    def run(self, place: Place, model: str, tokenizer: Path, file: Path) -> None:
        """Measure a server; write llama-benchy's result to ``file``, its log beside it."""
        cache = self.home / ".cache" / "llama-benchy"
        cache.mkdir(parents=True, exist_ok=True)
        # a book's file is named after its address
        name = hashlib.md5(_BOOK.encode(), usedforsecurity=False).hexdigest()
        (cache / f"{name}.txt").write_text(self.text, encoding="utf-8")
        variables = {
            "HOME": str(self.home),
            "PYTHONPATH": "",
            "HF_HUB_OFFLINE": "1",
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "*"),  # a proxy would be measured, too
            _KEY: place.key or "EMPTY",
        }
        words = ["--base-url", place.url, "--model", model, "--tokenizer", str(tokenizer)]
        words += ["--book-url", _BOOK, "--exit-on-first-fail", "--format", "json", *self.options]
        words += ["--save-result", str(file), *([] if self.coherent else ["--skip-coherence"])]
        words += ["--save-all-throughput-timeseries"]  # a point for each token that came
        lines: list[str] = []
        command: list[str | Path] = [self.python, "-u", "-P", "-c", _START, *words]
        log_path = file.with_suffix(".log")
        try:
            done = call(*command, env=variables, cwd=file.parent, stream=lines.append, check=False)
        finally:
            log_path.write_text("\n".join([*lines, ""]), encoding="utf-8")
        fell_back = any("Falling back" in line for line in lines)  # to another model's tokenizer
        if done.returncode or fell_back or not file.exists():
            why = (lines or ["no output"])[-1].strip()[:300]
            hint = f"see {log_path}, and the server's log"
            raise ServerError(f"llama-benchy failed: {why}", hint)


@dataclass
class Result:
    """What was measured: values of each run, by test and metric."""

    identity: dict[str, Any]
    """Server, model, machine and tool, as ``command.py`` names them."""
    tests: dict[str, list[float]] = field(default_factory=dict)
    short: dict[str, float] = field(default_factory=dict)
    """Mean tokens of an answer, by test, where the model ended long before ``--tg``."""

    def add(self, file: Path) -> None:
        """Add what llama-benchy wrote."""
        for run in json.loads(file.read_bytes())["benchmarks"]:
            # as in llama-benchy's tables: pp2048 tg128 @ d4096 (c2)
            name = f"pp{run['prompt_size']} tg{run['response_size']}"
            name += f" @ d{run['context_size']}" if run["context_size"] else ""
            name += f" (c{run['concurrency']})"
            name += ", loading the context" * run["is_context_prefill_phase"]
            series = run["requests_throughput_over_time"]
            answers = [len(each) for batch in series for each in batch]
            came, asked = fmean(answers or [0]), run["response_size"]
            if came < _FULL * asked:
                self.short[name] = came
                log.warning(f"{name}: answers ended after {came:.0f} of {asked} tokens (mean)")
            for metric, source in METRICS.items():
                values = (run[source] or {"values": []})["values"]
                if source == "e2e_ttft" and len(values) % run["concurrency"] == 0:
                    # requests of a run wait for each other: their mean is one sample
                    steps = range(0, len(values), run["concurrency"])
                    values = [fmean(values[at : at + steps.step]) for at in steps]
                # none if the answer came in one piece
                if values := [float(value) for value in values if value > 0]:
                    self.tests.setdefault(f"{name}: {metric}", []).extend(values)

    def save(self, folder: Path) -> None:
        """Write the result."""
        document = json.dumps(plain.as_json(self), indent=1)  # tests in the order of the table
        write_file(folder / FILE, f"{document}\n".encode())


def load(path: Path) -> Result:
    """Read a result, a file or its folder; ServerError if it is missing or of another shape."""
    file = path / FILE if path.is_dir() else path
    result = plain.load(Result, read_json(file))
    if result is None or any(min(each, default=0) <= 0 for each in result.tests.values()):
        msg = f"{file}: not a result of `build.py bench`"
        raise ServerError(msg, "give the folder or result.json of a run of this version")
    return result


def doubt(result: Result) -> str:
    """Return why the figures may mislead, or ""."""
    runs = [values for test, values in result.tests.items() if "tok/s" in test]
    if min(map(len, runs), default=0) < 3:
        return "less than three runs"
    spread = max((max(values) - min(values)) / median(values) for values in runs)
    if result.short:
        return "answers ended early"
    return f"runs differ by {spread:.0%}" if spread > _SPREAD else ""


def table(result: Result) -> list[tuple[str, ...]]:
    """Return medians and extremes as rows of text, the head first."""
    rows: list[tuple[str, ...]] = [("test", "median", "least", "most", "runs")]
    for test, values in result.tests.items():
        texts = (f"{number:.2f}" for number in (median(values), min(values), max(values)))
        rows.append((test, *texts, str(len(values))))
    return rows


@dataclass(frozen=True)
class Change:
    """A metric of two results: medians, and the ratio B / A."""

    name: str
    a: float
    b: float
    ratio: float
    low: float
    """5 % of the ratios of all pairs of runs; 0: less than 3 runs."""
    high: float
    """95 % of them."""
    verdict: str


def compare(a: Result, b: Result, tolerance: float) -> list[Change]:
    """Compare B with A; returns a row for each metric, ServerError without a common one."""
    rows = []
    for test, old in a.tests.items():
        new = b.tests.get(test, [])
        if not new:
            continue
        low = high = 0.0
        verdict = "unclear"
        if min(len(old), len(new)) >= 3:
            ratios = [y / x for x, y in itertools.product(old, new)]
            low, *_, high = quantiles(ratios, n=20, method="inclusive")
            # the first token is better sooner
            worst, best = (1 / high, 1 / low) if "first token" in test else (low, high)
            if best < 1 - tolerance:
                verdict = "slower"
            elif worst > 1 + tolerance:
                verdict = "faster"
            elif worst >= 1 - tolerance and best <= 1 + tolerance:
                verdict = "same"
        was, now = median(old), median(new)
        rows.append(Change(test, was, now, now / was, low, high, verdict))
    if not rows:
        msg = "the two results have no test in common"
        raise ServerError(msg, "measure both with the same --table")
    return rows
