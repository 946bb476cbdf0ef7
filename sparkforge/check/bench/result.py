"""The result of a run as JSON, and the comparison of two.

The interval of a ratio is by ranks (Mann and Whitney), which assumes no distribution: from the K-th
smallest to the K-th largest ratio of all pairs, with K by the normal approximation (Campbell and
Gardner, BMJ 1988;296:1454). Its confidence is 95 %; for three runs a side it has all ratios, 90 %.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge.core import pages, plain
from sparkforge.core.disk import write_file
from sparkforge.core.errors import ServerError

FILE, PAGE = "result.json", "report.md"
SCHEMA = 2
TOLERANCE = 0.03
"""Smaller changes do not count."""
_Z = statistics.NormalDist().inv_cdf(0.975)
LEAST_RUNS = 3
"""Fewer runs have no interval."""
Metric = Literal["decode", "prefill", "ttft"]
METRICS: Mapping[Metric, str] = {
    "decode": "decode, tok/s",
    "prefill": "prefill, tok/s",
    "ttft": "first token, ms",
}
"""The metrics with units; tokens a second are of all requests together."""
Verdict = Literal["faster", "slower", "same", "unclear"]


@dataclass(frozen=True)
class Identity:
    """What was measured.

    Attributes:
        origin: the ``build`` of this checkout, the unpatched ``release``, or a ``url``: a server of
            which only its own answers are known.
        release: of the build, e.g. ``0.31.0-spark.1``; ``pins``: sha256 of pins.yaml.
        wheels: sha256 by file name; of the build.
        image: its digest, or else its id; "" for a virtual environment.
        profile: the choice of dense layers, for example ``exact``; "" without one.
        options: of ``vllm serve``.
        model: its id in requests; ``checkpoint``: name of its folder.
        machine: architecture, CPU, cores, GPUs and driver.
        table: name of the tests' table; ``runs``: of each test.
        tool: llama-benchy's version; ``lock``: sha256 of its requirements.
        text: sha256 of the prompts' text.
    """

    origin: Literal["build", "release", "url"]
    target: str
    release: str = ""
    pins: str = ""
    wheels: Mapping[str, str] | None = None
    image: str = ""
    profile: str = ""
    options: tuple[str, ...] = ()
    model: str = ""
    checkpoint: str = ""
    machine: str = ""
    table: str = ""
    runs: int = 0
    tool: str = ""
    lock: str = ""
    text: str = ""


@dataclass(frozen=True)
class Samples:
    """Samples of one metric in one test, one for each run.

    Attributes:
        test: llama-benchy's name of it, such as ``pp2048 tg128 @ d4096 (c2)``.
    """

    test: str
    metric: Metric
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation of a sample; 0 for a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        started: UTC, ISO 8601.
        complete: all tests of the table ran.
        disturbed: disturbances, as sentences.
    """

    started: str
    complete: bool
    disturbed: tuple[str, ...]
    identity: Identity
    samples: tuple[Samples, ...]
    schema_version: int = SCHEMA

    @property
    def clean(self) -> bool:
        """Whether it is complete and undisturbed."""
        return self.complete and not self.disturbed


def load(path: Path) -> Result:
    """Read a result: a file, or its folder.

    Raises:
        ServerError: it is missing, or has another shape.
    """
    file = path / FILE if path.is_dir() else path
    hint = "give the folder or result.json of a `build.py bench` run of this version"
    try:
        result = plain.load(Result, plain.json_of(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ServerError(f"{file}: {error.strerror}", hint) from None
    except ValueError:
        result = None
    if result is None or result.schema_version != SCHEMA:
        raise ServerError(f"{file}: not a result of `build.py bench`", hint)
    if not all(
        one.values and 1e-9 < min(one.values) <= max(one.values) < 1e9 for one in result.samples
    ):
        raise ServerError(f"{file}: a sample is out of range", hint)
    return result


def save(result: Result, folder: Path) -> None:
    """Write the result, and a page with its means; each is replaced atomically."""
    document = json.dumps(plain.as_json(result), indent=1, sort_keys=True)
    write_file(folder / FILE, f"{document}\n".encode())
    head, *rows = summary(result)
    notes = "".join(f"* {pages.escape(text)}\n" for text in result.disturbed)
    state = "clean" if result.clean else "not clean: do not quote"
    title = f"# Speed of {pages.escape(result.identity.model)}, {result.started}, {state}"
    write_file(folder / PAGE, f"{title}\n\n{notes}\n{pages.table(head, rows)}\n".encode())


def summary(result: Result) -> list[tuple[str, ...]]:
    """Return the means as rows of text, the head first."""
    rows: list[tuple[str, ...]] = [("test", "metric", "mean", "±", "samples")]
    for one in result.samples:
        values = (f"{one.mean:.2f}", f"{one.deviation:.2f}", str(len(one.values)))
        rows.append((one.test, METRICS[one.metric], *values))
    return rows


@dataclass(frozen=True)
class Change:
    """The change of one metric of a test.

    Attributes:
        before, after: means.
        ratio: median of B to A; ``low`` and ``high``: its interval, 0 with too few runs.
    """

    name: str
    metric: Metric
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All changes, and differences other than the build, as sentences."""

    changes: tuple[Change, ...]
    differs: tuple[str, ...]

    @property
    def slower(self) -> tuple[Change, ...]:
        """The regressions."""
        return tuple(change for change in self.changes if change.verdict == "slower")


def compare(before: Result, after: Result, tolerance: float = TOLERANCE) -> Comparison:
    """Compare B with A, test by test.

    Args:
        tolerance: smallest change that counts, as a share.

    Raises:
        ServerError: they have no test in common.
    """
    ours = {(one.test, one.metric): one for one in before.samples}
    theirs = {(one.test, one.metric): one for one in after.samples}
    changes = tuple(_change(ours[key], theirs[key], tolerance) for key in ours if key in theirs)
    if not changes:
        msg = "the two results have no test in common"
        raise ServerError(msg, "measure both with the same --profile-table")
    alone = dict.fromkeys(
        f"{test} is in one result only" for test, _ in ours.keys() ^ theirs.keys()
    )
    a, b = before.identity, after.identity
    names = ["machine", "lock", "text", "target", "model", "checkpoint", "profile", "options"]
    if {a.origin, b.origin} == {"build", "release"}:
        names = names[:-1]  # those of the build are ours
    if "url" in (a.origin, b.origin):  # little is known of such a server
        names = names[:3]
    differs = [f"{name} differs" for name in names if getattr(a, name) != getattr(b, name)]
    return Comparison(changes, (*differs, *alone))


def interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios of all pairs, and the ends of its interval."""
    n, m = len(before), len(after)
    ratios = sorted(b / a for a in before for b in after)
    rank = n * m / 2 - _Z * math.sqrt(n * m * (n + m + 1) / 12)
    left_out = max(0, round(rank) - 1)
    return statistics.median(ratios), ratios[left_out], ratios[-1 - left_out]


def _change(a: Samples, b: Samples, tolerance: float) -> Change:
    ratio, low, high = interval(a.values, b.values)
    verdict: Verdict = "unclear"
    if min(len(a.values), len(b.values)) < LEAST_RUNS:
        low = high = 0.0
    else:
        # the first token is better sooner
        worst, best = (low, high) if a.metric != "ttft" else (1 / high, 1 / low)
        if best < 1 - tolerance:
            verdict = "slower"
        elif worst > 1 + tolerance:
            verdict = "faster"
        elif worst >= 1 - tolerance and best <= 1 + tolerance:
            verdict = "same"
    return Change(a.test, a.metric, a.mean, b.mean, ratio, low, high, verdict)


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the changes as rows of text, the head first."""
    rows: list[tuple[str, ...]] = [("test", "metric", "A", "B", "B / A", "interval", "verdict")]
    for one in comparison.changes:
        interval = f"{one.low:.3f} to {one.high:.3f}" if one.high else "too few runs"
        values = (f"{one.before:.2f}", f"{one.after:.2f}", f"{one.ratio:.3f}", interval)
        rows.append((one.name, METRICS[one.metric], *values, one.verdict))
    return rows
