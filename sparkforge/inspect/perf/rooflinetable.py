"""The roofline as people and programs read it: rows, text, Markdown, JSON and one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core import pages
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.inspect.perf.published import FIGURES, READ_ON, Figure
from sparkforge.inspect.perf.roofline import ceiling, parse_layers
from sparkforge.inspect.perf.shapes import SHAPES
from sparkforge.pins.pins import Target
from sparkforge.serving.shapes import Shape
from sparkforge.serving.traffic import GB, Bytes, KvCache, Moe, Setup, step_bytes

NOTE = "ceilings are arithmetic (bandwidth / bytes), not measurements; nobody ran this on a Spark"
CONTEXT = 2048
"""Default number of tokens, about that of the published figures."""
PUBLISHED_MODEL = "gpt-oss-120b"


_STEPS: tuple[tuple[str, Moe, str], ...] = (
    ("release", "marlin-release", ""),
    ("Marlin pads less", "marlin", ""),
    ("qkv=mxfp8", "marlin", "qkv=mxfp8"),
    ("qkv=mxfp8,o=mxfp8", "marlin", "qkv=mxfp8,o=mxfp8"),
    ("qkv=mxfp8,o=mxfp8,lm_head=mxfp8", "marlin", "qkv=mxfp8,o=mxfp8,lm_head=mxfp8"),
    ("qkv", "marlin", "qkv"),
    ("qkv,o", "marlin", "qkv,o"),
    ("qkv,o,lm_head=mxfp8", "marlin", "qkv,o,lm_head=mxfp8"),
    ("qkv,o,lm_head", "marlin", "qkv,o,lm_head"),
    ("experts by CUTLASS: qkv,o,lm_head", "flashinfer_cutlass", "qkv,o,lm_head"),
    ("experts by Triton: qkv,o,lm_head", "triton", "qkv,o,lm_head"),
)
"""Name, MoE backend, --mxfp4-layers. Each row has the change of the second one, too."""


@dataclass(frozen=True)
class Case:
    """The setup that a table is computed for.

    Attributes:
        bandwidth: of the target's memory, GB/s.
        context: tokens that each sequence attends to.
        batch: sequences that are decoded together.
    """

    model: str
    shape: Shape
    bandwidth: float
    context: int
    batch: int
    kv_cache: KvCache


@dataclass(frozen=True)
class Row:
    """One configuration, its bytes and its ceiling (tokens a second over all sequences)."""

    name: str
    moe: Moe
    layers: str
    step: Bytes
    ceiling: float
    gain: float
    gb_per_token: float


def case(
    target: Target,
    name: str,
    *,
    model: str | None = None,
    bandwidth: float | None = None,
    context: int = CONTEXT,
    batch: int = 1,
    kv_cache: KvCache = "auto",
) -> Case:
    """Return the case of a target, by default with its own model and bandwidth.

    Raises:
        UsageError: model, shape or bandwidth is unknown.
    """
    wanted = model or target.model
    if wanted is None:
        msg = f"target {name} has no model"
        raise UsageError(msg, f"give one with --model: {', '.join(SHAPES)}")
    if wanted not in SHAPES:
        raise UsageError(f"{wanted!r}: unknown shape", f"use one of {', '.join(SHAPES)}")
    speed = bandwidth or target.memory_gb_s
    if speed is None:
        msg = f"target {name}: no memory_gb_s in pins.yaml"
        raise UsageError(msg, "give the memory bandwidth with --bandwidth GB/s")
    return Case(wanted, SHAPES[wanted], speed, context, batch, kv_cache)


def rows(case: Case, layers: str | None = None) -> list[Row]:
    """Return the table: the release, each patch, and ``layers`` if given.

    Raises:
        UsageError: ``layers`` is invalid.
    """
    steps = list(_STEPS)
    if layers is not None:
        parse_layers(layers)
        steps.append((f"--layers {layers}", "marlin", layers))
    made: list[Row] = []
    for name, moe, spec in steps:
        setup = Setup(moe, parse_layers(spec) if spec else {}, case.kv_cache)
        step = step_bytes(case.shape, setup, context=case.context, batch=case.batch)
        speed = ceiling(step, case.bandwidth, case.batch)
        gain = speed / made[0].ceiling if made else 1.0
        made.append(Row(name, moe, spec, step, speed, gain, step.total / case.batch / GB))
    return made


def compared(case: Case) -> list[tuple[Figure, float | None]]:
    """Return the published figures, each with our ceiling for its weights.

    Empty for another model. The ceilings are always for one sequence of ``CONTEXT`` tokens.
    """
    if case.model != PUBLISHED_MODEL:
        return []
    found = []
    for figure in FIGURES:
        limit = None
        if figure.setup is not None:
            step = step_bytes(case.shape, figure.setup, context=CONTEXT)
            limit = ceiling(step, case.bandwidth)
        found.append((figure, limit))
    return found


# -- cells -----------------------------------------------------------------------

HEAD = ("GB/token", "experts", "qkv+o", "head", "KV", "rest", "sum", "ceiling", "")
PUBLISHED_HEAD = ("theirs, not ours", "tok/s", "published", "our ceiling", "share", "source")


def cells(row: Row, batch: int) -> tuple[str, ...]:
    """Return a row's texts, GB a token of each part among them."""
    step = row.step
    parts = (step.experts, step.qkv + step.o, step.lm_head, step.kv, step.router + step.other)
    return (
        row.name,
        *(f"{part / batch / GB:.3f}" for part in parts),
        f"{row.gb_per_token:.3f}",
        f"{row.ceiling:.1f} tok/s",
        f"x{row.gain:.2f}",
    )


def published_title(case: Case) -> str:
    """Return the heading over the published figures."""
    return (
        f"published by others for {case.model} on one Spark, read {READ_ON}; ceilings at"
        f" {CONTEXT} tokens, batch 1"
    )


def published_cells(figure: Figure, limit: float | None) -> tuple[str, ...]:
    """Return a published figure's texts."""
    low, high = figure.tok_s
    share = "-"
    if limit is not None:
        ends = sorted({round(100 * value / limit) for value in figure.tok_s})
        share = " to ".join(str(end) for end in ends) + " %"
    return (
        figure.engine + (" (1)" if figure.note else ""),
        f"{low:g}" if low == high else f"{low:g} to {high:g}",
        figure.published or "no date",
        "-" if limit is None else f"{limit:.1f}",
        share,
        figure.source,
    )


def show(case: Case, table: Sequence[Row]) -> None:
    """Print the table and the published figures."""
    log.heading(
        f"{case.model}, {case.context} tokens of context, batch {case.batch}, at"
        f" {case.bandwidth:g} GB/s"
    )
    log.info(NOTE)
    log.table([HEAD, *(cells(row, case.batch) for row in table)])
    theirs = compared(case)
    if theirs:
        log.heading(published_title(case))
        log.table([PUBLISHED_HEAD, *(published_cells(*pair) for pair in theirs)])
        for figure, _ in theirs:
            if figure.note:
                log.info(f"(1) {figure.note}")


def markdown(case: Case) -> str:
    """Return the tables of docs/roofline.md."""
    theirs = compared(case)
    return pages.render(
        Path(__file__).with_name("roofline.md.j2"),
        head=HEAD,
        ours=[cells(row, case.batch) for row in rows(case)],
        read_on=READ_ON,
        published_head=PUBLISHED_HEAD,
        theirs=[published_cells(*pair) for pair in theirs],
        notes=[figure.note for figure, _ in theirs if figure.note],
    )


def as_json(case: Case, table: Sequence[Row]) -> Mapping[str, Any]:
    """Return everything as JSON values; bytes are per step."""
    return {
        "note": NOTE,
        "model": case.model,
        "bandwidth_gb_s": case.bandwidth,
        "context": case.context,
        "batch": case.batch,
        "kv_cache_dtype": case.kv_cache,
        "rows": [
            {
                "name": row.name,
                "moe": row.moe,
                "layers": row.layers,
                "bytes": row.step.parts(),
                "gb_per_token": row.gb_per_token,
                "ceiling_tok_s": row.ceiling,
                "gain": row.gain,
            }
            for row in table
        ],
        "published_by_others": [
            {
                "engine": figure.engine,
                "tok_s": list(figure.tok_s),
                "source": figure.source,
                "published": figure.published,
                "read": READ_ON,
                "our_ceiling_tok_s": limit,
                "note": figure.note,
            }
            for figure, limit in compared(case)
        ],
    }


# -- the picture -------------------------------------------------------------------

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
