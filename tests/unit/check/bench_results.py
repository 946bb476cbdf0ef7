"""Made-up results of `build.py bench`."""

from __future__ import annotations

from typing import Any

from sparkforge.check.bench.result import Identity, Metric, Result, Samples

ONE, FOUR = "pp512 tg32 (c1)", "pp512 tg32 (c4)"


def samples(test: str, *values: float, metric: Metric = "decode") -> Samples:
    """Return samples of a test."""
    return Samples(test, metric, values)


def result(*found: Samples, disturbed: tuple[str, ...] = (), **fields: Any) -> Result:
    """Return a complete result with these samples."""
    known = {"release": "0.31.0-spark.1", "wheels": {"a_b.whl": "4" * 64}, "machine": "a CPU"}
    identity = Identity(**{"origin": "build", "target": "cpu", **known, **fields})
    return Result("2026-11-23T16:00:00+00:00", True, disturbed, identity, found)
