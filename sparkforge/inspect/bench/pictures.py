"""The plots of a result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import pages
from sparkforge.core.disk import write_file
from sparkforge.inspect.bench.result import PICTURES, Result
from sparkforge.inspect.bench.samples import Metric, Samples

_COLOURS = ("#3b6ea5", "#d98032", "#8a5aa8", "#4f8f4f", "#b0413e", "#707070", "#2f8f9d")
_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 70, 40, 420, 240, 200
_STEPS = (1, 2, 2.5, 5, 10)
_TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        points: x and y, by x.
        deviations: of y, one a point; none: it has no error bars.
        dashed: it is arithmetic, not measured.
    """

    name: str
    points: Sequence[Point]
    deviations: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class _Mark:
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class _Drawn:
    name: str
    colour: str
    path: str
    marks: Sequence[_Mark]
    dashed: bool
    y: float


@dataclass(frozen=True)
class _Tick:
    at: float
    text: str


def ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at least ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in _STEPS if one * power >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def svg(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """Return a plot; both axes begin at 0."""
    xs = ticks(max(x for line in lines for x, _ in line.points))
    ys = ticks(max(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> Point:
        return _LEFT + x / xs[-1] * _WIDTH, _TOP + _HEIGHT - y / ys[-1] * _HEIGHT

    measured = iter(range(len(lines)))
    drawn = []
    for number, line in enumerate(lines):
        spots = [place(*point) for point in line.points]
        bars = list(line.deviations) or [0.0] * len(spots)
        marks = [
            _Mark(*spot, place(x, max(y - bar, 0))[1], place(x, y + bar)[1])
            for spot, (x, y), bar in zip(spots, line.points, bars, strict=True)
        ]
        colour = "#404040" if line.dashed else _COLOURS[next(measured) % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        drawn.append(_Drawn(line.name, colour, path, marks, line.dashed, _TOP + 18 * number))
    return pages.render(
        Path(__file__).with_name("plot.svg.j2"),
        title=title,
        across=across,
        up=up,
        left=_LEFT,
        top=_TOP,
        right=_LEFT + _WIDTH,
        bottom=_TOP + _HEIGHT,
        width=_LEFT + _WIDTH + _LEGEND,
        height=_TOP + _HEIGHT + 50,
        xs=[_Tick(place(x, 0)[0], f"{x:,.6g}") for x in xs],
        ys=[_Tick(place(0, y)[1], f"{y:,.6g}") for y in ys],
        lines=drawn,
    )


def plots(result: Result) -> Mapping[str, str]:
    """Return the pictures that a result has samples for, by file name."""
    decode = list(_of(result, "decode"))
    prefill = list(_of(result, "prefill"))
    many = sorted({one.test.concurrency for one in result.samples})
    deep = sorted({one.test.depth for one in result.samples})
    over_context = [
        _line(
            f"{count} at once" if count > 1 else "one request",
            ((_context(one), one) for one in decode if one.test.concurrency == count),
        )
        for count in many
    ]
    alone = [(one.context, one.tok_s) for one in result.ceilings if one.batch == 1]
    if alone:
        over_context.append(Line("ceiling of one request", sorted(set(alone)), dashed=True))
    found = {
        "decode.svg": svg("Decode", "context, tokens", "tok/s", over_context),
        "prefill.svg": svg(
            "Prefill",
            "depth and prompt, tokens",
            "tok/s",
            [
                _line(
                    f"{count} at once" if count > 1 else "one request",
                    (
                        (one.test.depth + one.test.prompt, one)
                        for one in prefill
                        if one.test.concurrency == count
                    ),
                )
                for count in many
            ],
        )
        if prefill
        else "",
        "concurrency.svg": svg(
            "Decode, all requests together",
            "requests at once",
            "tok/s",
            [
                _line(
                    f"depth {depth:,}",
                    ((one.test.concurrency, one) for one in decode if one.test.depth == depth),
                )
                for depth in deep
            ],
        )
        if many[1:]
        else "",
    }
    return {name: picture for name, picture in found.items() if picture}


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


def _line(name: str, samples: Iterable[tuple[float, Samples]]) -> Line:
    """Return a line; tests with equal x, such as answers of two lengths, are both on it."""
    found = sorted(samples, key=lambda pair: (pair[0], pair[1].test))
    return Line(name, [(x, one.mean) for x, one in found], [one.deviation for _, one in found])
