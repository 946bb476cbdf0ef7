"""bench, roofline, proofs."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.cli import commands
from sparkforge.cli.parser import Parents, Parser, Subparsers, count, generated, positive, share


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands that measure, compute or disassemble."""
    shared, sources, target = groups
    _bench_options(subparsers.add_parser(
        "bench", parents=[shared, sources, target], help="measure the answers of the last build"
    ))  # fmt: skip

    roofline = subparsers.add_parser(
        "roofline",
        parents=[shared],
        help="compute the decode speed that memory bandwidth allows",
    )
    roofline.add_argument(
        "--target", required=True, metavar="NAME", help="target whose memory and model to use"
    )
    roofline.add_argument("--model", metavar="NAME", help="model (default: the target's)")
    roofline.add_argument("--context", type=count, default=2048, metavar="N",
                          help="context length in tokens (default: 2048)")  # fmt: skip
    roofline.add_argument("--batch", type=count, default=1, metavar="N",
                          help="sequences decoded at once (default: 1)")  # fmt: skip
    roofline.add_argument(
        "--layers",
        metavar="SPEC",
        help="add a row for this --mxfp4-layers value, such as qkv,o,lm_head=mxfp8",
    )
    roofline.add_argument("--bandwidth", type=positive, metavar="GB/s",
                          help="memory bandwidth (default: the target's)")  # fmt: skip
    roofline.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto",
                          help="type of the KV cache; auto: BF16")  # fmt: skip
    generated(roofline, "docs/roofline.md and its picture")
    roofline.set_defaults(run=commands.roofline)

    proofs = subparsers.add_parser(
        "proofs",
        parents=[shared, sources],
        help="compile, disassemble and check the GPU kernels",
    )
    proofs.add_argument("names", nargs="*", metavar="NAME", help="proofs to run (default: all)")
    proofs.add_argument("--ci", action="store_true", help="run the smallest sufficient set")
    proofs.add_argument("--list", action="store_true", help="list the proofs and exit")
    proofs.add_argument(
        "--jobs",
        type=count,
        default=None,
        metavar="N",
        help="parallel compilers (default: as many as fit in memory)",
    )
    proofs.set_defaults(run=_proofs)


def _bench_options(bench: Parser) -> None:
    bench.add_argument("--quality", action="store_true", required=True,
                       help="measure how --mxfp4-layers changes the model's answers")  # fmt: skip
    bench.add_argument("--model", type=Path, metavar="DIR",
                       help="checkpoint to measure (default: a tiny test model)")  # fmt: skip
    bench.add_argument("--layers", action="append", metavar="KINDS",
                       help="--mxfp4-layers value to measure; may be repeated"
                       " (default: qkv, o, lm_head, and all three)")  # fmt: skip
    bench.add_argument(
        "--max-kl",
        type=share,
        default=0.1,
        metavar="NATS",
        help="limit of the mean KL divergence of the next token (default: 0.1)",
    )
    bench.add_argument(
        "--min-agreement",
        type=share,
        default=0.9,
        metavar="SHARE",
        help="least share of positions with the same top token (default: 0.9)",
    )
    bench.add_argument("--max-score-drop", type=share, default=0.05, metavar="SHARE",
                       help="limit of the drop in right answers (default: 0.05)")  # fmt: skip
    for name, default, what in (
        ("prompts", None, "number of prompts to continue (default: all 24)"),
        ("questions", None, "number of questions to ask (default: all 65)"),
        ("tokens", 64, "tokens per continuation (default: 64)"),
        ("top", 256, "top logprobs to compare per position; the rest are pooled (default: 256)"),
    ):
        bench.add_argument(f"--{name}", type=count, default=default, metavar="N", help=what)
    bench.set_defaults(run=commands.bench)


def _proofs(options: argparse.Namespace) -> int:
    from sparkforge.inspect.proofs import command  # no other command needs it

    return command.run(options)
