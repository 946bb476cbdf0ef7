"""Lines over two axes, as SVG in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import pages

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
        dashed: computed, not measured.
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
    step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def svg(title: str, across: str, up: str, lines: Sequence[Line], at: Sequence[float] = ()) -> str:
    """Return a plot; both axes begin at 0.

    Args:
        across, up: labels of the axes.
        at: ticks of the horizontal axis; none: round numbers.
    """
    most = max(x for line in lines for x, _ in line.points)
    xs = [*at] if at else ticks(most)
    ys = ticks(max(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> Point:
        return _LEFT + x / max(xs[-1], most) * _WIDTH, _TOP + _HEIGHT - y / ys[-1] * _HEIGHT

    measured = iter(range(len(lines)))
    drawn = []
    for number, line in enumerate(lines):
        spots = [place(*point) for point in line.points]
        bars = list(line.deviations) or [0.0] * len(spots)
        marks = [
            _Mark(*spot, place(x, max(y - bar, 0))[1], place(x, y + bar)[1])
            for spot, (x, y), bar in zip(spots, line.points, bars, strict=True)
        ]
        colour = "" if line.dashed else _COLOURS[next(measured) % len(_COLOURS)]
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
