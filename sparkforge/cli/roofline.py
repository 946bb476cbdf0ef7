"""roofline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge.build.options import OutputOptions
from sparkforge.cli.parser import Parents, Subparsers, count, here, positive
from sparkforge.core.log import log
from sparkforge.pins import pins
from sparkforge.pins.pins import Target
from sparkforge.sources.project import recover_checkout


@dataclass(frozen=True)
class Options:
    """Options of ``roofline``."""

    target: str
    model: str | None
    context: int
    batch: int
    layers: str | None
    bandwidth: float | None
    kv_cache_dtype: Literal["auto", "fp8"]
    kernels: bool
    pins: Path | None
    output: OutputOptions


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    roofline = subparsers.add_parser(
        "roofline",
        parents=[groups.pins, groups.output],
        help="compute the decode speed that memory bandwidth allows",
    )
    roofline.add_argument(
        "--target", required=True, metavar="NAME", help="target whose memory and model to use"
    )
    roofline.add_argument("--model", metavar="NAME", help="model (default: the target's)")
    roofline.add_argument(
        "--context",
        type=count,
        default=2048,
        metavar="N",
        help="context length in tokens (default: 2048)",
    )
    roofline.add_argument(
        "--batch", type=count, default=1, metavar="N", help="sequences decoded at once (default: 1)"
    )
    roofline.add_argument(
        "--layers",
        metavar="SPEC",
        help="add a row for this --mxfp4-layers value, such as qkv,o,lm_head=mxfp8",
    )
    roofline.add_argument(
        "--bandwidth",
        type=positive,
        metavar="GB/s",
        help="memory bandwidth (default: the target's)",
    )
    roofline.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="type of the KV cache; auto: BF16",
    )
    roofline.add_argument(
        "--kernels",
        action="store_true",
        help="show what limits each decode kernel instead, from its machine code",
    )
    roofline.set_defaults(entry=here(Options, _roofline))


def _roofline(options: Options) -> int:
    """Print the bytes that each configuration reads a token, and the ceiling that follows."""
    from sparkforge.inspect.perf import rooflinetable

    target = pins.load(recover_checkout(options.pins)).target(options.target)
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
    """Print what limits each decode kernel."""
    from sparkforge.inspect.perf import kerneltable, kernelwork

    machine, recorded = kerneltable.machine_of(target, options.target), kernelwork.load()
    if options.output.json:
        log.json(kerneltable.as_json(recorded, machine))
        return 0
    kerneltable.show(recorded, machine)
    return 0
