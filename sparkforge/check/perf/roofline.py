"""Ceilings of decoding speed: a memory's bandwidth divided by the bytes of a step.

A ceiling is neither a measurement nor a promise: no engine can be faster, and its distance from it
is unknown. ``serving/traffic.py`` counts the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkforge.check.perf import traffic
from sparkforge.check.perf.shapes import SHAPES
from sparkforge.check.perf.traffic import (
    GB,
    Bytes,
    Format,
    Kind,
    KvCache,
    Moe,
    Setup,
    Shape,
    step_bytes,
)
from sparkforge.core import pages
from sparkforge.core.errors import UsageError
from sparkforge.pins.pins import Target

NOTE = "ceilings are arithmetic (bandwidth / bytes), not measurements; nobody ran this on a Spark"
CONTEXT = 2048
"""Default number of tokens."""
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
"""Name, MoE backend and --mxfp4-layers of each row."""
HEAD = ("GB/token", "experts", "qkv+o", "head", "KV", "rest", "sum", "ceiling", "")
_PARTS = (
    ("experts", "#3b6ea5"),
    ("qkv + o", "#d98032"),
    ("lm_head", "#8a5aa8"),
    ("KV and rest", "#8c8c8c"),
)
_LEFT, _SCALE, _LINE, _TOP, _WIDTH = 250, 72, 26, 62, 760  # of the picture, in pixels


def parse_layers(text: str) -> Mapping[Kind, Format]:
    """Call ``traffic.parse_layers`` for the command line; UsageError if the value is invalid."""
    try:
        return traffic.parse_layers(text)
    except traffic.LayersError as error:
        raise UsageError(f"--layers {error}", error.hint) from None


def ceiling(step: Bytes, bandwidth_gb_s: float, batch: int = 1) -> float:
    """Return memory's limit for tokens per second, over all sequences."""
    return batch * bandwidth_gb_s * GB / step.total


@dataclass(frozen=True)
class Case:
    """The setup of a table.

    Attributes:
        bandwidth: of the target's memory, GB/s.
        context: of each sequence, in tokens.
        batch: number of sequences decoded together.
    """

    model: str
    shape: Shape
    bandwidth: float
    context: int
    batch: int
    kv_cache: KvCache


@dataclass(frozen=True)
class Row:
    """One configuration, the bytes of a step, and the ceiling over all sequences.

    Attributes:
        gain: the ceiling relative to the release's.
    """

    name: str
    moe: Moe
    layers: str
    bytes: Bytes
    ceiling_tok_s: float
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
    """Return the table: the release, the series with each format, and ``layers`` if given.

    Raises:
        UsageError: ``layers`` is invalid.
    """
    more: Sequence[tuple[str, Moe, str]] = ()
    if layers is not None:
        more = ((f"--layers {layers}", "marlin", layers),)
        parse_layers(layers)  # also refuses an empty value
    made: list[Row] = []
    for name, moe, spec in (*_STEPS, *more):
        setup = Setup(moe, parse_layers(spec) if spec else {}, case.kv_cache)
        step = step_bytes(case.shape, setup, context=case.context, batch=case.batch)
        speed = ceiling(step, case.bandwidth, case.batch)
        gain = speed / made[0].ceiling_tok_s if made else 1.0
        made.append(Row(name, moe, spec, step, speed, gain, step.total / case.batch / GB))
    return made


def cells(row: Row, batch: int) -> tuple[str, ...]:
    """Return the texts of a row, below ``HEAD``: GB a token of each part, and the ceiling."""
    step = row.bytes
    parts = (step.experts, step.qkv + step.o, step.lm_head, step.kv, step.router + step.other)
    return (
        row.name,
        *(f"{part / batch / GB:.3f}" for part in parts),
        f"{row.gb_per_token:.3f}",
        f"{row.ceiling_tok_s:.1f} tok/s",
        f"x{row.gain:.2f}",
    )


def markdown(case: Case) -> str:
    """Return the table of docs/kernels.md."""
    lines = [cells(row, case.batch) for row in rows(case)]
    return pages.table(HEAD, lines, right=range(1, len(HEAD)))


def svg(case: Case) -> str:
    """Return the picture: GB a token by part, a bar for each configuration, then its ceiling."""
    table = rows(case)
    bars = []
    for i, row in enumerate(table):
        step, x, parts = row.bytes, float(_LEFT), []
        sizes = (step.experts, step.qkv + step.o, step.lm_head, step.kv + step.router + step.other)
        for size, (_, colour) in zip(sizes, _PARTS, strict=True):
            parts.append({"x": x, "width": size / case.batch / GB * _SCALE, "colour": colour})
            x += size / case.batch / GB * _SCALE
        text = f"{row.gb_per_token:.2f} GB, {row.ceiling_tok_s:.0f} tok/s"
        bars.append(
            {"name": row.name, "y": _TOP + i * _LINE, "parts": parts, "end": x + 6, "text": text}
        )
    return pages.render(
        Path(__file__).with_name("roofline.svg.j2"),
        case=case,
        width=_WIDTH,
        height=_TOP + len(table) * _LINE + 12,
        left=_LEFT,
        legend=[
            {"x": _LEFT + 100 * i, "colour": colour, "text": name}
            for i, (name, colour) in enumerate(_PARTS)
        ],
        bars=bars,
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
        "rows": [asdict(row) for row in table],
    }
