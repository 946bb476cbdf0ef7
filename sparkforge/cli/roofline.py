"""roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from cyclopts.validators import Number

from sparkforge.build.options import OutputOptions
from sparkforge.core.log import log
from sparkforge.sources.project import PinsFile, checkout


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``roofline``."""

    target: str
    """target whose memory and model to use"""
    model: str | None = None
    """model (default: the target's)"""
    context: PositiveInt = 2048
    """context length in tokens (default: 2048)"""
    batch: PositiveInt = 1
    """sequences decoded at once (default: 1)"""
    layers: str | None = None
    """add a row for this --mxfp4-layers value, such as qkv,o,lm_head=mxfp8"""
    bandwidth: Annotated[float | None, Parameter(validator=Number(gte=1e-6, lte=1e9))] = None
    """memory bandwidth in GB/s (default: the target's)"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """type of the KV cache; auto: BF16"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
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
