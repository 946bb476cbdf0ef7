"""The roofline as a picture, and published figures beside it as another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import pages
from sparkforge.inspect.perf.rooflinetable import Case, Row, compared, rows
from sparkforge.inspect.perf.traffic import GB
from sparkforge.inspect.plot import ticks

_PARTS = (
    ("experts", "#3b6ea5"),
    ("qkv + o", "#d98032"),
    ("lm_head", "#8a5aa8"),
    ("KV and rest", "#8c8c8c"),
)
_LEFT, _SCALE, _LINE, _TOP, _WIDTH = 250, 72, 26, 62, 760


@dataclass(frozen=True)
class _Part:
    """A coloured piece of a bar, or of the legend; in pixels."""

    x: float
    colour: str
    width: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class _Bar:
    """One configuration: its pieces, and the text after them."""

    name: str
    y: int
    parts: Sequence[_Part]
    end: float
    text: str


def svg(case: Case) -> str:
    """Return the picture: GB a token by part, a bar for each configuration, then its ceiling."""
    table = rows(case)
    return pages.render(
        Path(__file__).with_name("roofline.svg.j2"),
        case=case,
        width=_WIDTH,
        height=_TOP + len(table) * _LINE + 12,
        left=_LEFT,
        legend=[
            _Part(_LEFT + 100 * i, colour, text=name) for i, (name, colour) in enumerate(_PARTS)
        ],
        bars=[_bar(row, case.batch, _TOP + i * _LINE) for i, row in enumerate(table)],
    )


@dataclass(frozen=True)
class _Tick:
    x: float
    text: str


@dataclass(frozen=True)
class _Figure:
    """A published figure, in pixels; ``ceiling``: width of ours, 0: unknown."""

    name: str
    y: int
    low: float
    high: float
    ceiling: float


def published(case: Case) -> str:
    """Return the picture: published figures as points, each in the bar of our ceiling."""
    table = compared(case)
    marks = ticks(max(max(figure.tok_s[1], limit or 0) for figure, limit in table))
    left = _LEFT + 40  # names of engines are longer
    scale = (_WIDTH - left - 40) / marks[-1]
    bottom = _TOP + len(table) * _LINE

    def place(value: float) -> float:
        return left + value * scale

    return pages.render(
        Path(__file__).with_name("published.svg.j2"),
        case=case,
        theirs=_PARTS[1][1],
        width=_WIDTH,
        height=bottom + 28,
        left=left,
        top=_TOP - 6,
        bottom=bottom,
        ticks=[_Tick(place(mark), f"{mark:g}") for mark in marks],
        rows=[
            _Figure(
                figure.engine,
                _TOP + i * _LINE,
                place(figure.tok_s[0]),
                place(figure.tok_s[1]),
                (limit or 0) * scale,
            )
            for i, (figure, limit) in enumerate(table)
        ],
    )


def _bar(row: Row, batch: int, y: int) -> _Bar:
    step = row.step
    sizes = (step.experts, step.qkv + step.o, step.lm_head, step.kv + step.router + step.other)
    parts, x = [], float(_LEFT)
    for size, (_, colour) in zip(sizes, _PARTS, strict=True):
        parts.append(_Part(x, colour, size / batch / GB * _SCALE))
        x += parts[-1].width
    return _Bar(row.name, y, parts, x + 6, f"{row.gb_per_token:.2f} GB, {row.ceiling:.0f} tok/s")
