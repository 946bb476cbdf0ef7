"""llama-benchy's result file → samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from sparkforge.core import plain
from sparkforge.core.errors import BenchError
from sparkforge.inspect.bench.tables import Test

Metric = Literal["decode", "prefill", "ttft"]
METRICS: Mapping[Metric, str] = {
    "decode": "decode, tok/s",
    "prefill": "prefill, tok/s",
    "ttft": "first token, ms",
}
"""The metrics with units; tokens a second are of all requests together."""
HIGHER_IS_BETTER: Mapping[Metric, bool] = {"decode": True, "prefill": True, "ttft": False}

_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Values(BaseModel):
    values: list[_Number]


class _Run(BaseModel):
    concurrency: int
    context_size: int
    prompt_size: int
    response_size: int
    is_context_prefill_phase: bool
    pp_throughput: _Values | None = None
    tg_throughput: _Values | None = None
    e2e_ttft: _Values | None = None


class _File(BaseModel):
    version: str
    benchmarks: list[_Run]


@dataclass(frozen=True)
class Samples:
    """Samples of one metric in one test.

    Attributes:
        context: of the request that loads the context of a test with prefix caching.
        rounds: the samples of each round, in order, one for each run. A round without a sample is
            empty, so that the rounds of two sides correspond.
    """

    test: Test
    metric: Metric
    context: bool
    rounds: tuple[tuple[float, ...], ...]

    @property
    def key(self) -> tuple[Test, Metric, bool]:
        return self.test, self.metric, self.context

    @property
    def name(self) -> str:
        return f"{self.test.name}{', loading the context' if self.context else ''}"

    @property
    def values(self) -> tuple[float, ...]:
        """All samples."""
        return tuple(value for values in self.rounds for value in values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation of a sample; 0 for a single one."""
        count, mean = len(self.values), self.mean
        if count < 2:
            return 0.0
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (count - 1))


def read(path: Path, test: Test) -> list[Samples]:
    """Return the samples of one test's file, as one round.

    Raises:
        BenchError: the file is not llama-benchy's of that test, or has no samples.
    """
    try:
        found = _File.model_validate(plain.json_of(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        where = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        msg = f"{path}: not a result of llama-benchy: {where}"
        raise BenchError(msg, "see its log beside it") from None
    samples = [
        Samples(test, metric, run.is_context_prefill_phase, (_by_run(values.values, metric, test),))
        for run in found.benchmarks
        if (run.context_size, run.prompt_size, run.response_size, run.concurrency)
        == (test.depth, test.prompt, test.generated, test.concurrency)
        for metric, values in _metrics(run).items()
        # a test's fake server may answer within a clock's tick
        if values is not None and values.values and min(values.values) > 0
    ]
    if not samples:
        msg = f"{path}: no figure of {test.name}"
        raise BenchError(msg, "see llama-benchy's log beside it, and the server's")
    return samples


def decoded(samples: Sequence[Samples]) -> bool:
    """Return whether there is a speed of decode: an answer came in two pieces or more."""
    return any(sampled.metric == "decode" and not sampled.context for sampled in samples)


def _metrics(run: _Run) -> Mapping[Metric, _Values | None]:
    return {"decode": run.tg_throughput, "prefill": run.pp_throughput, "ttft": run.e2e_ttft}


def _by_run(values: Sequence[float], metric: Metric, test: Test) -> tuple[float, ...]:
    """Return one value for each run.

    For the first token llama-benchy has a value for each request. Requests of one run wait for each
    other, so they are not independent: their mean is one sample.
    """
    together = test.concurrency if metric == "ttft" else 1
    if len(values) % together:
        return tuple(values)
    return tuple(
        math.fsum(values[i : i + together]) / together for i in range(0, len(values), together)
    )


def joined(rounds: Sequence[Sequence[Samples]]) -> tuple[Samples, ...]:
    """Return the samples of several rounds together, in the order of the first."""
    found = [{samples.key: samples.values for samples in group} for group in rounds]
    keys = dict.fromkeys(key for values in found for key in values)
    return tuple(Samples(*key, tuple(values.get(key, ()) for values in found)) for key in keys)
