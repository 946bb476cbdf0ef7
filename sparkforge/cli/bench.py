"""bench."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import publish
from sparkforge.build.options import Behind, OutputOptions, ServerOptions, VariantOptions
from sparkforge.build.setup import last_build
from sparkforge.check.bench import command
from sparkforge.core.disk import sha256_file, write_file
from sparkforge.core.errors import CheckError, ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.serving.options import redacted
from sparkforge.sources.project import Project, ProjectOptions

if TYPE_CHECKING:
    from sparkforge.check.perf import losses


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """Options of ``bench quality``."""

    target: str
    """target to measure"""
    model: Path | None = None
    """checkpoint to measure (default: a tiny test model)"""
    layers: tuple[str, ...] = ()
    """--mxfp4-layers value to measure; may be repeated (default: qkv, o, lm_head, and all three)"""
    max_kl: NonNegativeFloat | None = None
    """limit of the mean KL divergence of the next token, instead of the measured noise"""
    min_agreement: NonNegativeFloat | None = None
    """least share of positions with the same top token, instead of the noise"""
    max_score_drop: NonNegativeFloat | None = None
    """limit of the drop in right answers, instead of the test for chance"""
    prompts: PositiveInt | None = None
    """number of prompts to continue (default: all 24)"""
    questions: PositiveInt | None = None
    """number of questions to ask (default: all 65)"""
    tokens: PositiveInt = 64
    """tokens per continuation (default: 64)"""
    top: PositiveInt = 256
    """top logprobs to compare per position; the rest are pooled (default: 256)"""
    arguments: Behind = ()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    server: ServerOptions = ServerOptions()


def measure_quality(options: QualityOptions) -> int:
    """Measure the effect of --mxfp4-layers on the model's answers; 15 if it is too large."""
    from sparkforge.build import serve
    from sparkforge.check.perf import losses, quality, roofline

    for layers in options.layers:
        roofline.parse_layers(layers)  # checked here, not by a server after the first has run
    project = Project.open(options.project)
    build = last_build(project, options.target, options.variant, options.server, options.arguments)
    context = build.context
    if options.model is None and context.target.smoke is None:
        msg = f"target {context.target_name} has no checkpoint"
        raise UsageError(msg, "give one with --model DIR")
    model = None if options.model is None else serve.checkpoint(options.model)
    build.run("image")
    plan = quality.Plan(
        options.layers or quality.DEFAULT_LAYERS,
        options.prompts,
        options.questions,
        options.tokens,
        options.top,
    )
    started = datetime.now(UTC)
    limits = losses.Limits(options.max_kl, options.min_agreement, options.max_score_drop)
    with context.store.temporary("quality") as work:
        tiny = publish.tiny_model(context.dist)
        start = quality.starter(build, model, tiny, work)
        report = quality.run(start, plan, limits, quality.Material.load(plan))
    document = {
        "started": started.isoformat(timespec="seconds"),
        "target": context.target_name,
        "release": context.release,
        "pins": sha256_file(context.pins_path),
        "model": str(model or tiny),
        "options": redacted((*context.serve, *build.serving.arguments)),
        **report.document(),
    }
    folder = command.new_folder(context.dist / "bench", "quality")
    file = folder / "quality.json"
    write_file(file, f"{json.dumps(document, indent=1, sort_keys=True)}\n".encode())
    if options.output.json:
        log.json(document)
    else:
        log.table(losses.table(report))
    log.info(f"result   {file}")
    return judge_quality(report)


def judge_quality(report: losses.Report) -> int:
    """Print the problems of the measurements; returns the exit code."""
    code = 0
    if report.beyond:
        remedy = (
            "use more precision (KIND=mxfp8) or omit those layers; to accept a loss, set a limit:"
            " --max-kl, --min-agreement, --max-score-drop"
        )
        code = log.failure(CheckError("\n".join(report.beyond), remedy))
    if report.failed:
        words = "\n".join(f"{name}: {what}" for name, what in report.failed.items())
        remedy = "the other results are above; see the servers' output"
        code = log.failure(ServerError(words, remedy))
    return code
