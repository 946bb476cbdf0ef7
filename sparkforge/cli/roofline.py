"""roofline."""

from __future__ import annotations

import argparse

from sparkforge.build.options import pins_path, settle
from sparkforge.cli.parser import Parents, Subparsers, count, generated, positive
from sparkforge.core import generated as pages
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.pins import pins


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    roofline = subparsers.add_parser(
        "roofline",
        parents=[groups.shared],
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
    generated(roofline, "docs/roofline.md and its picture")
    roofline.set_defaults(run=_roofline)


def _roofline(options: argparse.Namespace) -> int:
    """Print the bytes that each configuration reads a token, and the ceiling that follows."""
    from sparkforge.inspect.perf import rooflinetable

    target = pins.load(pins_path(options)).target(options.target)
    case = rooflinetable.case(
        target,
        options.target,
        model=options.model,
        bandwidth=options.bandwidth,
        context=options.context,
        batch=options.batch,
        kv_cache=options.kv_cache_dtype,
    )
    if options.docs or options.check:
        if options.layers or case != rooflinetable.case(target, options.target):
            msg = "docs/roofline.md covers the target's own model and the defaults only"
            raise UsageError(msg, "with --docs or --check, give --target only")
        command = f"roofline --target {options.target} --docs"
        page = pins_path(options).parent / "docs" / "roofline.md"
        wanted = {
            page: pages.between(page, command, rooflinetable.markdown(case)),
            page.with_suffix(".svg"): rooflinetable.svg(case),
        }
        return settle(options, wanted, command)
    table = rooflinetable.rows(case, options.layers)
    if options.json:
        log.json(rooflinetable.as_json(case, table))
        return 0
    rooflinetable.show(case, table)
    return 0
