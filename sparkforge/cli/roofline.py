"""roofline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge.build.options import OutputOptions
from sparkforge.core.command import Entry, count, needed, option, positive, switch
from sparkforge.core.log import log
from sparkforge.pins.pins import Target
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
    kernels: bool = switch("show what limits each decode kernel instead, from its machine code")
    pins: Path | None = pins_option()
    output: OutputOptions


def _roofline(options: Options) -> int:
    """Print the bytes that each configuration reads a token, and the ceiling that follows."""
    from sparkforge.inspect.perf import rooflinetable

    target = checkout(options.pins).pins.target(options.target)
    if options.kernels:
        return _kernels(options, target)
    case = rooflinetable.case(
        target,
        options.target,
        model=options.model,
        bandwidth=options.bandwidth,
        context=options.context,
        batch=options.batch,
        kv_cache=options.kv_cache_dtype,
    )
    table = rooflinetable.rows(case, options.layers)
    if options.output.json:
        log.json(rooflinetable.as_json(case, table))
        return 0
    rooflinetable.show(case, table)
    return 0


def _kernels(options: Options, target: Target) -> int:
    """Print the limit of each decode kernel."""
    from sparkforge.inspect.perf import kerneltable, kernelwork

    machine, recorded = kerneltable.machine_of(target, options.target), kernelwork.load()
    if options.output.json:
        log.json(kerneltable.as_json(recorded, machine))
        return 0
    kerneltable.show(recorded, machine)
    return 0


COMMANDS = (Entry("roofline", Options, _roofline),)
