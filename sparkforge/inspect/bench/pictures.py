"""The plots of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sparkforge.core.disk import write_file
from sparkforge.inspect.bench.result import PICTURES, Result
from sparkforge.inspect.bench.samples import Metric, Samples
from sparkforge.inspect.plot import Line, svg


def plots(result: Result) -> Mapping[str, str]:
    """Return the pictures of a result's samples, by file name."""
    decode = list(_of(result, "decode"))
    prefill = list(_of(result, "prefill"))
    many = sorted({samples.test.concurrency for samples in result.samples})
    deep = sorted({samples.test.depth for samples in result.samples})
    over_context = [line for count in many for line in _lines(count, decode, _context)]
    alone = [(ceiling.context, ceiling.tok_s) for ceiling in result.ceilings if ceiling.batch == 1]
    if alone:
        over_context.append(Line("ceiling of one request", sorted(set(alone)), dashed=True))
    found = {"decode.svg": svg("Decode", "context, tokens", "tok/s", over_context)}
    if prefill:
        lines = [
            line
            for count in many
            for line in _lines(
                count, prefill, lambda samples: samples.test.depth + samples.test.prompt
            )
        ]
        found["prefill.svg"] = svg("Prefill", "depth and prompt, tokens", "tok/s", lines)
    if many[1:]:
        lines = [
            _line(
                f"depth {depth:,}",
                (
                    (samples.test.concurrency, samples)
                    for samples in decode
                    if samples.test.depth == depth
                ),
            )
            for depth in deep
        ]
        found["concurrency.svg"] = svg(
            "Decode, all requests together", "requests at once", "tok/s", lines, at=many
        )
    return found


def draw(result: Result, folder: Path) -> None:
    """Write the pictures of a result that has samples."""
    for name, picture in plots(result).items() if result.samples else ():
        assert name in PICTURES
        write_file(folder / name, picture.encode())


def _of(result: Result, metric: Metric) -> Iterable[Samples]:
    return (
        samples for samples in result.samples if samples.metric == metric and not samples.context
    )


def _context(samples: Samples) -> float:
    """Return the mean context of the answer's tokens."""
    return samples.test.depth + samples.test.prompt + samples.test.generated / 2


def _lines(
    count: int, samples: Iterable[Samples], across: Callable[[Samples], float]
) -> Iterable[Line]:
    """Yield the lines for a number of requests at once, one for each length of the answer."""
    found = [sampled for sampled in samples if sampled.test.concurrency == count]
    lengths = sorted({sampled.test.generated for sampled in found})
    for length in lengths:
        name = f"{count} at once" if count > 1 else "one request"
        more = f", tg{length}" if lengths[1:] else ""
        yield _line(
            name + more,
            ((across(sampled), sampled) for sampled in found if sampled.test.generated == length),
        )


def _line(name: str, samples: Iterable[tuple[float, Samples]]) -> Line:
    """Return a line; it has all tests with equal x, such as answers of two lengths."""
    found = sorted(samples, key=lambda pair: (pair[0], pair[1].test))
    return Line(
        name,
        [(x, sampled.mean) for x, sampled in found],
        [sampled.deviation for _, sampled in found],
    )
