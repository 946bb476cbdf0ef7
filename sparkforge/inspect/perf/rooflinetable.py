"""The roofline as rows, text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkforge.core import pages
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.inspect.perf import speculation
from sparkforge.inspect.perf.launches import EMPTY_US, OWN, SMALL_US, USUAL, cost_ms
from sparkforge.inspect.perf.machines import GB10, SUSTAINED_GB_S
from sparkforge.inspect.perf.published import FIGURES, READ_ON, Figure
from sparkforge.inspect.perf.roofline import ceiling, parse_layers
from sparkforge.inspect.perf.shapes import SHAPES
from sparkforge.inspect.perf.traffic import GB, Bytes, KvCache, Moe, Setup, Shape, step_bytes
from sparkforge.pins.pins import Target

NOTE = "ceilings are arithmetic (bandwidth / bytes), not measurements; nobody ran this on a Spark"
CONTEXT = 2048
"""Default number of tokens, about that of the published figures."""
PUBLISHED_MODEL = "gpt-oss-120b"


_STEPS: tuple[tuple[str, Moe, str, int | None], ...] = (
    ("release", "marlin-release", "", USUAL),
    ("Marlin pads less", "marlin", "", USUAL),
    ("qkv=mxfp8", "marlin", "qkv=mxfp8", USUAL),
    ("qkv=mxfp8,o=mxfp8", "marlin", "qkv=mxfp8,o=mxfp8", USUAL),
    ("qkv=mxfp8,o=mxfp8,lm_head=mxfp8", "marlin", "qkv=mxfp8,o=mxfp8,lm_head=mxfp8", USUAL),
    ("qkv", "marlin", "qkv", USUAL),
    ("qkv,o", "marlin", "qkv,o", USUAL),
    ("qkv,o,lm_head=mxfp8", "marlin", "qkv,o,lm_head=mxfp8", USUAL),
    ("qkv,o,lm_head", "marlin", "qkv,o,lm_head", USUAL),
    ("decode kernels: qkv,o,lm_head", "marlin", "qkv,o,lm_head", OWN),
    ("experts by CUTLASS: qkv,o,lm_head", "flashinfer_cutlass", "qkv,o,lm_head", None),
    ("experts by Triton: qkv,o,lm_head", "triton", "qkv,o,lm_head", None),
)
"""Name, MoE backend, --mxfp4-layers, launches of a layer (None: not profiled).

Each later row also has the change of the second one.
"""


@dataclass(frozen=True)
class Case:
    """The setup of a table."""

    model: str
    shape: Shape
    bandwidth: float
    """Of the target's memory, GB/s."""
    context: int
    """Context of each sequence, in tokens."""
    batch: int
    """Number of sequences decoded together."""
    kv_cache: KvCache

    @property
    def sustained(self) -> float:
        """Sustained GB/s of memory, with the share that others measured on a GB10."""
        return self.bandwidth * SUSTAINED_GB_S / GB10.memory_gb_s


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
    sustained: float
    """The ceiling at memory's sustained bandwidth."""
    launches: int | None
    """Of a step; None: unknown."""
    with_launches: tuple[float, float] | None
    """``sustained`` with the highest and the lowest cost of the launches."""


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
        steps.append((f"--layers {layers}", "marlin", layers, USUAL))
    made: list[Row] = []
    for name, moe, spec, per_layer in steps:
        setup = Setup(moe, parse_layers(spec) if spec else {}, case.kv_cache)
        step = step_bytes(case.shape, setup, context=case.context, batch=case.batch)
        speed = ceiling(step, case.bandwidth, case.batch)
        gain = speed / made[0].ceiling if made else 1.0
        slower = ceiling(step, case.sustained, case.batch)
        launches = None if per_layer is None else per_layer * case.shape.layers
        made.append(
            Row(
                name,
                moe,
                spec,
                step,
                speed,
                gain,
                step.total / case.batch / GB,
                slower,
                launches,
                None if launches is None else _with_launches(slower, case.batch, launches),
            )
        )
    return made


def _with_launches(speed: float, batch: int, launches: int) -> tuple[float, float]:
    """Return tokens a second with the cost of a step's launches, the highest cost first."""
    least, most = (1 / (1 / speed + ms / 1e3 / batch) for ms in cost_ms(launches))
    return most, least


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

_HEAD = ("GB/token", "experts", "qkv+o", "head", "KV", "rest", "sum", "ceiling", "")
VERIFY_HEAD = ("tokens a step", *(str(n) for n in speculation.TOKENS))
PUBLISHED_HEAD = ("theirs, not ours", "tok/s", "published", "our ceiling", "share", "source")


def head(case: Case) -> tuple[str, ...]:
    """Return the head of the table."""
    return (*_HEAD, f"at {case.sustained:g} GB/s", "launches", "ms", "with launches")


def cells(row: Row, batch: int) -> tuple[str, ...]:
    """Return a row's texts, including GB a token of each part."""
    launches: tuple[str, ...] = ("-", "-", "-")
    if row.launches is not None and row.with_launches is not None:
        least, most = cost_ms(row.launches)
        slow, fast = row.with_launches
        launches = (str(row.launches), f"{least:.1f} to {most:.1f}", f"{slow:.1f} to {fast:.1f}")
    step = row.step
    parts = (step.experts, step.qkv + step.o, step.lm_head, step.kv, step.router + step.other)
    return (
        row.name,
        *(f"{part / batch / GB:.3f}" for part in parts),
        f"{row.gb_per_token:.3f}",
        f"{row.ceiling:.1f} tok/s",
        f"x{row.gain:.2f}",
        f"{row.sustained:.1f}",
        *launches,
    )


def verify_cells(case: Case) -> list[tuple[str, ...]]:
    """Return the texts of speculation's break-even points, a line for each profile."""
    made = speculation.table(case.shape, case.context)
    experts = [f"{point.experts:.1f}" for point in made[0][2]]
    return [
        ("experts of a layer", *experts),
        *(
            (
                f"{name}, {size / GB:.2f} GB",
                *(f"{point.accepted:.2f} ({point.share:.0%})" for point in points),
            )
            for name, size, points in made
        ),
    ]


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
    log.table([head(case), *(cells(row, case.batch) for row in table)])
    log.heading("drafts that a step has to accept on average to pay, of one sequence")
    log.table([VERIFY_HEAD, *verify_cells(case)])
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
        head=head(case),
        empty_us=EMPTY_US,
        small_us=SMALL_US,
        sustained=case.sustained,
        verify_head=VERIFY_HEAD,
        verify=verify_cells(case),
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
                "sustained_tok_s": row.sustained,
                "launches": row.launches,
                "sustained_with_launches_tok_s": row.with_launches,
            }
            for row in table
        ],
        "sustained_gb_s": case.sustained,
        "speculation": [
            {
                "profile": name,
                "bytes": size,
                "steps": [
                    asdict(point) | {"accepted": point.accepted, "share": point.share}
                    for point in points
                ],
            }
            for name, size, points in speculation.table(case.shape, case.context)
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
