"""Results of `bench quality`, compared with the noise of the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkforge.core import plain, typed
from sparkforge.core.disk import write_file
from sparkforge.core.errors import UsageError
from sparkforge.inspect import intervals
from sparkforge.inspect.perf.distance import Distance

FILE = "quality.json"
_CHANCE = 0.025  # of so many losses between equals; the worse side of Student's 95 % is the same


@dataclass(frozen=True)
class Limits:
    """Limits of the loss; None: the noise is the limit.

    Attributes:
        max_kl: mean divergence of the next token's distribution, in nats.
        min_agreement: share of positions with the same likeliest token.
        max_score_drop: share of all questions.
    """

    max_kl: float | None = None
    min_agreement: float | None = None
    max_score_drop: float | None = None


@dataclass(frozen=True)
class Measured:
    """One server beside the unchanged model.

    Attributes:
        right: number of right answers.
        lost, gained: right answers of the unchanged model that are wrong here, and the reverse.
        other_answers: number of answers with other words.
    """

    distance: Distance
    right: int
    lost: int
    gained: int
    questions: int
    other_answers: int

    def document(self) -> dict[str, Any]:
        """Return it as JSON values, in one level."""
        flat = asdict(self)
        return {**flat.pop("distance"), **flat}


@dataclass(frozen=True)
class Report:
    """Results of a measurement.

    Attributes:
        right: right answers of the unchanged model.
        noise: its second server.
        layers: by choice, of those that could be served.
        failed: reasons why others could not.
    """

    right: int
    noise: Measured
    layers: Mapping[str, Measured]
    failed: Mapping[str, str]
    limits: Limits

    @property
    def beyond(self) -> list[str]:
        """A sentence for each metric of a choice that is beyond the noise, or the user's limit."""
        return [
            f"{name}: {words}"
            for name, measured in self.layers.items()
            for words in beyond(measured, self.noise, self.limits).values()
        ]

    def document(self) -> dict[str, Any]:
        """Return it as JSON values; docs/kernels.md describes it."""
        return {
            "limits": asdict(self.limits),
            "as_it_is": {"right": self.right, "questions": self.noise.questions},
            "noise": self.noise.document(),
            "layers": {
                name: {
                    **measured.document(),
                    "beyond": list(beyond(measured, self.noise, self.limits)),
                }
                for name, measured in self.layers.items()
            },
            "failed": dict(self.failed),
            "beyond": self.beyond,
        }


@dataclass(frozen=True)
class Record:
    """A report, and its subject.

    Attributes:
        started: UTC, ISO 8601.
        release: of the build, e.g. ``0.31.0-spark.1``; ``pins``: sha256 of its pins.yaml.
        model: folder of the checkpoint.
        options: of ``vllm serve``, on each server.
    """

    started: str
    target: str
    release: str
    pins: str
    model: str
    options: tuple[str, ...]
    report: Report


def save(record: Record, folder: Path) -> None:
    """Write a record; it is replaced atomically."""
    text = json.dumps(typed.as_json(record), indent=1, sort_keys=True)
    write_file(folder / FILE, f"{text}\n".encode())


def load(file: Path) -> Record:
    """Read a record.

    Raises:
        UsageError: it is not readable, or has another shape.
    """
    remedy = "measure again: build.py bench quality"
    try:
        record = typed.load(Record, plain.json_of(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", remedy) from None
    except ValueError:
        record = None
    if record is None:
        raise UsageError(f"{file}: not a result of `build.py bench quality`", remedy)
    return record


def beyond(measured: Measured, noise: Measured, limits: Limits) -> dict[str, str]:
    """Return a sentence for each metric (kl, token or answers) beyond its limit.

    Without a user's limit a metric is beyond the noise if the 95 % interval of its addition, over
    texts, is all worse than nothing. For answers it is McNemar's test with the unchanged model's:
    noise changes some, but as many for the better.
    """
    far, near = measured.distance, noise.distance
    found = {}
    if limits.max_kl is not None:
        if far.mean_kl > limits.max_kl:
            found["kl"] = f"mean KL {far.mean_kl:.4f} is over {limits.max_kl:g}"
    elif (low := _added(near.kl_by_text, far.kl_by_text)) > 0:
        found["kl"] = (
            f"mean KL {far.mean_kl:.5f} is beyond noise ({near.mean_kl:.5f}), by {low:.5f} at least"
        )
    same = f"the top token is the same at {far.agreement:.3f} of positions"
    if limits.min_agreement is not None:
        if far.agreement < limits.min_agreement:
            found["token"] = f"{same}, below {limits.min_agreement:g}"
    elif (low := _added(far.agreement_by_text, near.agreement_by_text)) > 0:
        found["token"] = (
            f"{same}, beyond noise ({near.agreement:.3f}), by {low:.3f} of positions at least"
        )
    answers = f"{measured.lost} right answers lost and {measured.gained} gained"
    if limits.max_score_drop is not None:
        drop = (measured.lost - measured.gained) / max(measured.questions, 1)
        if drop > limits.max_score_drop:
            found["answers"] = (
                f"{answers}, a drop of {drop:.3f} of all, over {limits.max_score_drop:g}"
            )
    elif (chance := intervals.chance_to_lose(measured.lost, measured.gained)) < _CHANCE:
        found["answers"] = f"{answers}, beyond chance ({chance:.4f})"
    return found


def _added(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the lower end of the interval of the mean difference."""
    pairs = zip(before, after, strict=True)
    return intervals.of_pairs([b - a for a, b in pairs]).interval()[0]


def table(report: Report) -> list[tuple[str, ...]]:
    """Return the figures as rows of text, the head first."""
    rows: list[tuple[str, ...]] = [
        (
            "layers",
            "mean KL",
            "p99 KL",
            "same token",
            "NLL",
            "covered",
            "right",
            "changed",
            "beyond",
        )
    ]
    for name, measured in {"(noise)": report.noise, **report.layers}.items():
        far = measured.distance
        rows.append(
            (
                name,
                f"{far.mean_kl:.5f}",
                f"{far.p99_kl:.4f}",
                f"{far.agreement:.4f}",
                f"{far.nll_change:+.4f}",
                f"{far.covered:.4f}",
                f"{measured.right}/{measured.questions}",
                str(measured.other_answers),
                ", ".join(beyond(measured, report.noise, report.limits)) or "-",
            )
        )
    return rows
