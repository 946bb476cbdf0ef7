"""The roofline as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import pages
from sparkforge.inspect.perf.rooflinetable import Case, Row, rows
from sparkforge.serving.traffic import GB

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
    """One configuration: its pieces, and the text behind them."""

    name: str
    y: int
    parts: Sequence[_Part]
    end: float
    text: str


def svg(case: Case) -> str:
    """Return the picture: GB a token by part, one bar a configuration, its ceiling behind it."""
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


def _bar(row: Row, batch: int, y: int) -> _Bar:
    step = row.step
    sizes = (step.experts, step.qkv + step.o, step.lm_head, step.kv + step.router + step.other)
    parts, x = [], float(_LEFT)
    for size, (_, colour) in zip(sizes, _PARTS, strict=True):
        parts.append(_Part(x, colour, size / batch / GB * _SCALE))
        x += parts[-1].width
    text = f"{row.gb_per_token:.2f} GB, {row.ceiling:.0f} tok/s"
    return _Bar(row.name, y, parts, x + 6, text)
