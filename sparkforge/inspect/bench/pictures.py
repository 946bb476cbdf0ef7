"""The plots of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sparkforge.core.disk import write_file
from sparkforge.inspect.bench.result import PICTURES, Result
from sparkforge.inspect.bench.samples import Metric, Samples
from sparkforge.inspect.plot import Line, svg


def plots(result: Result) -> Mapping[str, str]:
    """Return the pictures that a result has samples for, by file name."""
    decode = list(_of(result, "decode"))
    prefill = list(_of(result, "prefill"))
    many = sorted({one.test.concurrency for one in result.samples})
    deep = sorted({one.test.depth for one in result.samples})
    over_context = [line for count in many for line in _lines(count, decode, _context)]
    alone = [(one.context, one.tok_s) for one in result.ceilings if one.batch == 1]
    if alone:
        over_context.append(Line("ceiling of one request", sorted(set(alone)), dashed=True))
    found = {"decode.svg": svg("Decode", "context, tokens", "tok/s", over_context)}
    if prefill:
        lines = [
            line
            for count in many
            for line in _lines(count, prefill, lambda one: one.test.depth + one.test.prompt)
        ]
        found["prefill.svg"] = svg("Prefill", "depth and prompt, tokens", "tok/s", lines)
    if many[1:]:
        lines = [
            _line(
                f"depth {depth:,}",
                ((one.test.concurrency, one) for one in decode if one.test.depth == depth),
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
    return (one for one in result.samples if one.metric == metric and not one.context)


def _context(one: Samples) -> float:
    """Return the tokens that an average token of the answer attends to."""
    return one.test.depth + one.test.prompt + one.test.generated / 2


def _lines(
    count: int, samples: Iterable[Samples], across: Callable[[Samples], float]
) -> Iterable[Line]:
    """Yield the lines of a number of requests at once, one for each length of the answer."""
    found = [one for one in samples if one.test.concurrency == count]
    lengths = sorted({one.test.generated for one in found})
    for length in lengths:
        name = f"{count} at once" if count > 1 else "one request"
        more = f", tg{length}" if lengths[1:] else ""
        yield _line(
            name + more, ((across(one), one) for one in found if one.test.generated == length)
        )


def _line(name: str, samples: Iterable[tuple[float, Samples]]) -> Line:
    """Return a line; tests with equal x, such as answers of two lengths, are both on it."""
    found = sorted(samples, key=lambda pair: (pair[0], pair[1].test))
    return Line(name, [(x, one.mean) for x, one in found], [one.deviation for _, one in found])
