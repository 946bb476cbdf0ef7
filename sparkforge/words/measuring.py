"""bench, roofline, proofs."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge import commands
from sparkforge.words.parents import Parents, Parser, Subparsers, count, generated, positive, share


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands that measure, compute or disassemble."""
    shared, sources, target = groups
    _bench_options(subparsers.add_parser(
        "bench", parents=[shared, sources, target], help="measure what was built"
    ))  # fmt: skip

    roofline = subparsers.add_parser(
        "roofline",
        parents=[shared],
        help="bytes read a token, and the speed that memory allows",
    )
    roofline.add_argument("--target", required=True, metavar="NAME", help="whose memory and model")
    roofline.add_argument("--model", metavar="NAME", help="another model than the target's")
    roofline.add_argument("--context", type=count, default=2048, metavar="N",
                          help="tokens that a sequence attends to (default: 2048)")  # fmt: skip
    roofline.add_argument("--batch", type=count, default=1, metavar="N",
                          help="sequences decoded together (default: 1)")  # fmt: skip
    roofline.add_argument("--layers", metavar="SPEC",
                          help="one more row, as --mxfp4-layers: qkv,o,lm_head=mxfp8")  # fmt: skip
    roofline.add_argument("--bandwidth", type=positive, metavar="GB/s",
                          help="in place of the target's")  # fmt: skip
    roofline.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto",
                          help="of keys and values; auto: BF16")  # fmt: skip
    generated(roofline, "docs/roofline.md and its picture")
    roofline.set_defaults(run=commands.roofline)

    proofs = subparsers.add_parser(
        "proofs",
        parents=[shared, sources],
        help="compile, disassemble and check the kernels",
    )
    proofs.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    proofs.add_argument("--ci", action="store_true", help="the smallest set that proves it")
    proofs.add_argument("--list", action="store_true", help="say what there is to prove")
    proofs.add_argument(
        "--jobs",
        type=count,
        default=None,
        metavar="N",
        help="compilers at once (default: as many as memory holds)",
    )
    proofs.set_defaults(run=_proofs)


def _bench_options(bench: Parser) -> None:
    bench.add_argument("--quality", action="store_true", required=True,
                       help="what --mxfp4-layers changes in the model's answers")  # fmt: skip
    bench.add_argument("--model", type=Path, metavar="DIR",
                       help="checkpoint to measure (default: the tiny one)")  # fmt: skip
    bench.add_argument("--layers", action="append", metavar="KINDS",
                       help="a value of --mxfp4-layers; again for one more"
                       " (default: qkv, o, lm_head, and all three)")  # fmt: skip
    bench.add_argument("--max-kl", type=share, default=0.1, metavar="NATS",
                       help="mean divergence of the next token (default: 0.1)")  # fmt: skip
    bench.add_argument("--min-agreement", type=share, default=0.9, metavar="SHARE",
                       help="positions with the same likeliest token (default: 0.9)")  # fmt: skip
    bench.add_argument("--max-score-drop", type=share, default=0.05, metavar="SHARE",
                       help="questions no longer answered right (default: 0.05)")  # fmt: skip
    for name, default, what in (("prompts", None, "prompts to continue (default: all 24)"),
                                ("questions", None, "questions to ask (default: all 65)"),
                                ("tokens", 64, "length of a continuation (default: 64)"),
                                ("top", 256, "likeliest tokens that count each for itself"
                                 " (default: 256)")):  # fmt: skip
        bench.add_argument(f"--{name}", type=count, default=default, metavar="N", help=what)
    bench.set_defaults(run=commands.bench)


def _proofs(options: argparse.Namespace) -> int:
    from sparkforge.proofs import command  # no other command needs it

    return command.run(options)
