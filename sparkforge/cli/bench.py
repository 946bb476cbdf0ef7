"""bench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.build import executor, publish
from sparkforge.build.options import OutputOptions, ServerOptions, VariantOptions, as_last
from sparkforge.build.setup import last_context
from sparkforge.core.command import Entry, behind, count, needed, option, repeated, share
from sparkforge.core.errors import QualityError, SmokeError, UsageError
from sparkforge.core.log import log
from sparkforge.inspect.bench import command
from sparkforge.sources.project import Project, ProjectOptions


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """Options of ``bench quality``.

    Attributes:
        max_kl: nats.
        min_agreement: share of positions.
        max_score_drop: share of questions.
    """

    target: str = needed("target to measure", metavar="NAME")
    model: Path | None = option(
        "checkpoint to measure (default: a tiny test model)", type=Path, metavar="DIR"
    )
    layers: tuple[str, ...] = repeated(
        "--mxfp4-layers value to measure; may be repeated"
        " (default: qkv, o, lm_head, and all three)",
        metavar="KINDS",
    )
    max_kl: float = option(
        "limit of the mean KL divergence of the next token (default: 0.1)",
        default=0.1,
        type=share,
        metavar="NATS",
    )
    min_agreement: float = option(
        "least share of positions with the same top token (default: 0.9)",
        default=0.9,
        type=share,
        metavar="SHARE",
    )
    max_score_drop: float = option(
        "limit of the drop in right answers (default: 0.05)",
        default=0.05,
        type=share,
        metavar="SHARE",
    )
    prompts: int | None = option(
        "number of prompts to continue (default: all 24)", type=count, metavar="N"
    )
    questions: int | None = option(
        "number of questions to ask (default: all 65)", type=count, metavar="N"
    )
    tokens: int = option(
        "tokens per continuation (default: 64)", default=64, type=count, metavar="N"
    )
    top: int = option(
        "top logprobs to compare per position; the rest are pooled (default: 256)",
        default=256,
        type=count,
        metavar="N",
    )
    arguments: tuple[str, ...] = behind()
    project: ProjectOptions
    output: OutputOptions
    variant: VariantOptions = as_last()
    server: ServerOptions


def _quality(options: QualityOptions) -> int:
    """Measure what --mxfp4-layers changes in what the model says; 15 where it is too much."""
    from sparkforge.build import serve
    from sparkforge.inspect.perf import quality, roofline

    for layers in options.layers:
        roofline.parse_layers(layers)  # here, and not by a server after the first has run
    project = Project.open(options.project)
    context = last_context(
        project, options.target, options.variant, options.server, options.arguments
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


COMMANDS = (
    *command.COMMANDS,
    Entry(
        "bench quality",
        QualityOptions,
        _quality,
        "measure how --mxfp4-layers changes the model's answers",
    ),
)
