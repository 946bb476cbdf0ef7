"""roofline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge.build.options import OutputOptions
from sparkforge.core.command import Entry, count, needed, option, positive
from sparkforge.core.log import log
from sparkforge.sources.project import checkout, pins_option


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``roofline``."""

    target: str = needed("target whose memory and model to use", metavar="NAME")
    model: str | None = option("model (default: the target's)", metavar="NAME")
    context: int = option(
        "context length in tokens (default: 2048)", default=2048, type=count, metavar="N"
    )
    batch: int = option(
        "sequences decoded at once (default: 1)", default=1, type=count, metavar="N"
    )
    layers: str | None = option(
        "add a row for this --mxfp4-layers value, such as qkv,o,lm_head=mxfp8", metavar="SPEC"
    )
    bandwidth: float | None = option(
        "memory bandwidth (default: the target's)", type=positive, metavar="GB/s"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "type of the KV cache; auto: BF16", default="auto", choices=("auto", "fp8")
    )
    pins: Path | None = pins_option()
    output: OutputOptions


def _roofline(options: Options) -> int:
    """Print the bytes that each configuration reads a token, and the ceiling that follows."""
    from sparkforge.check.perf import roofline

    case = roofline.case(
        checkout(options.pins).pins.target(options.target),
        options.target,
        model=options.model,
        bandwidth=options.bandwidth,
        context=options.context,
        batch=options.batch,
        kv_cache=options.kv_cache_dtype,
    )
    table = roofline.rows(case, options.layers)
    if options.output.json:
        log.json(roofline.as_json(case, table))
        return 0
    log.heading(
        f"{case.model}, {case.context} tokens of context, batch {case.batch}, at"
        f" {case.bandwidth:g} GB/s"
    )
    log.info(roofline.NOTE)
    log.table([roofline.HEAD, *(roofline.cells(row, case.batch) for row in table)])
    return 0


COMMANDS = (Entry("roofline", Options, _roofline),)
