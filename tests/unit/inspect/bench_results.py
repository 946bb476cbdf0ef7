"""Made-up results of `build.py bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkforge.inspect.bench.result import Ceiling, Identity, Machine, Result
from sparkforge.inspect.bench.samples import Metric, Samples
from sparkforge.inspect.bench.tables import Test

ONE = Test(0, 512, 32, 1)
FOUR = Test(0, 512, 32, 4)
DEEP = Test(4096, 512, 32, 1)
WHERE = Machine("x86_64", "a CPU", 2, (), "")


def samples(
    test: Test, *rounds: Sequence[float], metric: Metric = "decode", context: bool = False
) -> Samples:
    """Return samples of a test, by round."""
    return Samples(test, metric, context, tuple(tuple(one) for one in rounds))


def result(*found: Samples, **fields: Any) -> Result:
    """Return a result with these samples: clean, of one round, in a session of its own."""
    values: Mapping[str, Any] = {
        "session": f"session {id(found)}",
        "started": "2026-11-23T16:00:00+00:00",
        "table": "quick",
        "rounds": 1,
        "complete": True,
        "disturbed": (),
        "tool": "0.4.0",
        "lock": "1" * 64,
        "text": "2" * 64,
        "identity": Identity("build", "cpu", "0.31.0-spark.1", "3" * 64, {"a_b.whl": "4" * 64}),
        "machine": WHERE,
        "ceilings": (Ceiling(528, 1, 100.0),),
        "samples": found,
    }
    return Result(**{**values, **fields})
