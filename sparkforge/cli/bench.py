"""bench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.build import executor, publish
from sparkforge.build.options import OutputOptions, ServerOptions, VariantOptions
from sparkforge.build.setup import context_of, last_variant
from sparkforge.cli.parser import Parents, Parser, Subparsers, count, here, share
from sparkforge.core.errors import QualityError, SmokeError, UsageError
from sparkforge.core.log import log
from sparkforge.sources.project import Project, ProjectOptions


@dataclass(frozen=True)
class QualityOptions:
    """Options of ``bench quality``.

    Attributes:
        max_kl: nats.
        min_agreement: share of positions.
        max_score_drop: share of questions.
    """

    target: str
    model: Path | None
    layers: tuple[str, ...]
    max_kl: float
    min_agreement: float
    max_score_drop: float
    prompts: int | None
    questions: int | None
    tokens: int
    top: int
    arguments: tuple[str, ...]
    project: ProjectOptions
    output: OutputOptions
    variant: VariantOptions
    server: ServerOptions


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands that measure."""
    parser = subparsers.add_parser("bench", help="measure the answers of the last build")
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser
    )
    bench = actions.add_parser(
        "quality",
        parents=[*groups.project, groups.last_variant, groups.server],
        help="measure how --mxfp4-layers changes the model's answers",
    )
    bench.add_argument("--target", required=True, metavar="NAME", help="target to measure")
    bench.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint to measure (default: a tiny test model)",
    )
    bench.add_argument(
        "--layers",
        action="append",
        default=[],
        metavar="KINDS",
        help="--mxfp4-layers value to measure; may be repeated"
        " (default: qkv, o, lm_head, and all three)",
    )
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
    bench.add_argument(
        "--max-score-drop",
        type=share,
        default=0.05,
        metavar="SHARE",
        help="limit of the drop in right answers (default: 0.05)",
    )
    for name, default, what in (
        ("prompts", None, "number of prompts to continue (default: all 24)"),
        ("questions", None, "number of questions to ask (default: all 65)"),
        ("tokens", 64, "tokens per continuation (default: 64)"),
        ("top", 256, "top logprobs to compare per position; the rest are pooled (default: 256)"),
    ):
        bench.add_argument(f"--{name}", type=count, default=default, metavar="N", help=what)
    bench.set_defaults(entry=here(QualityOptions, _quality), arguments=())


def _quality(options: QualityOptions) -> int:
    """Measure what --mxfp4-layers changes in what the model says; 15 where it is too much."""
    from sparkforge.build import serve
    from sparkforge.inspect.perf import quality, roofline

    for layers in options.layers:
        roofline.parse_layers(layers)  # here, and not by a server after the first has run
    project = Project.open(options.project)
    context = context_of(
        project,
        options.target,
        last_variant(project, options.target, options.variant),
        "image",
        server=options.server,
        arguments=options.arguments,
    )
    if options.model is None and context.target.smoke is None:
        msg = f"target {context.target_name} has no checkpoint"
        raise UsageError(msg, "give one with --model DIR")
    model = None if options.model is None else serve.checkpoint(options.model)
    build = executor.build(context, "image")
    product = build.results.artefact(build.graph.product)
    plan = quality.Plan(
        options.layers or quality.DEFAULT_LAYERS,
        options.prompts,
        options.questions,
        options.tokens,
        options.top,
    )
    limits = quality.Limits(options.max_kl, options.min_agreement, options.max_score_drop)
    with context.store.temporary("quality") as work:
        tiny = publish.tiny_model(context.root / "dist" / context.target_name)
        start = quality.starter(context, product, model, tiny, work)
        document = quality.run(start, plan, limits, quality.Material.load(plan))
    return report_quality({"model": str(model or tiny), **document}, as_json=options.output.json)


def report_quality(document: Mapping[str, Any], *, as_json: bool) -> int:
    """Print what ``quality.run`` measured, then what is wrong with it; returns the exit code."""
    from sparkforge.inspect.perf import quality

    if as_json:
        log.json(document)
    else:
        log.table(quality.table(document))
    code = 0
    if document["beyond"]:
        remedy = "omit those layers, or use more precision: KIND=mxfp8"
        code = log.failure(QualityError("\n".join(document["beyond"]), remedy))
    if document["failed"]:
        words = "\n".join(f"{name}: {what}" for name, what in document["failed"].items())
        remedy = "the other results are above; see the servers' output"
        code = log.failure(SmokeError(words, remedy))
    return code
