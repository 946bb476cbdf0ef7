"""What each command does: options → stages → output. Returns exit codes, raises our errors."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sparkforge.build import executor, publish, receipt
from sparkforge.build.context import STAGES
from sparkforge.build.graph import items
from sparkforge.build.options import pins_path, platform_of, settle, store_of
from sparkforge.build.setup import context_of, follow_last_build
from sparkforge.core import disk, generated
from sparkforge.core.errors import EngineError, QualityError, SmokeError, UsageError
from sparkforge.core.log import human_bytes, log
from sparkforge.pins import pins
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import interpreter


def build(options: argparse.Namespace) -> int:
    """Make what the store lacks, publish it under dist/, print the receipt."""
    start = time.monotonic()
    if options.dry_run:
        return _dry_run(options)
    context = context_of(options, options.until, options.force)
    todo = items(context, options.until)
    steps = executor.plan(context, todo)
    log.heading(f"{context.target_name} on {context.platform}: {sum(step.made for step in steps)}"
                f" of {len(steps)} items to make")  # fmt: skip
    if any(step.made and step.label == "environment" for step in steps):
        # before anything else is fetched
        interpreter.ensure(context.store, context.target.python, offline=options.offline)
    lines = executor.run(context, todo)
    mention_fallback(lines)
    seconds = time.monotonic() - start
    document = receipt.receipt(
        target=context.target_name, target_platform=context.platform, pins=context.pins_path,
        lines=lines, seconds=seconds,
    )  # fmt: skip
    folder, document = publish.publish(context, lines, document)
    if options.json:
        log.json(document)
    publish.summary(context, lines, folder, seconds)
    return 0


def _dry_run(options: argparse.Namespace) -> int:
    """Show the plan; where this machine can't make all of it, as far as it can, and why no more."""
    until, note = options.until, ""
    try:
        context = context_of(options, until, options.force, plan_only=True)
    except (UsageError, EngineError) as error:
        target = pins.load(pins_path(options)).target(options.target)
        here = MACHINES.get(platform.machine()) == platform_of(target)
        if here or STAGES.index(until) <= STAGES.index("wheelhouse"):
            raise
        until, note = "wheelhouse", f"not here, the stages after it: {error.what}; {error.remedy}"
        force = [stage for stage in options.force if STAGES.index(stage) <= STAGES.index(until)]
        context = context_of(options, until, force, plan_only=True)
    steps = executor.plan(context, items(context, until))
    if options.json:
        fetches = asdict(executor.total(steps))
        document = {"plan": [asdict(step) for step in steps], "fetches": fetches, "until": until,
                    "source": context.target.source.model_dump()}  # fmt: skip
        log.json({**document, "note": note} if note else document)
        return 0
    log.heading(f"plan for {context.target_name} on {context.platform}, up to {until}")
    executor.show(context, steps)
    free = disk.free(context.store.root)
    log.info(f"disk: {human_bytes(free)} free for the store in {context.store.root}")
    if note:
        log.info(note)
    return 0


def mention_fallback(lines: Sequence[receipt.Line]) -> None:
    """Say which sources, fetched by an earlier build, are release files in place of commits."""
    names = []
    for line in lines:
        asked = line.artefact.inputs.get("provider")  # an external has one place to come from
        if line.artefact.stage != "sources" or line.made_now or asked is None:
            continue
        used = line.artefact.outputs["provider"]
        if used != asked:
            names.append(line.label.removeprefix("source "))
    if names:
        log.info(f"sources of {', '.join(names)}: release files, since git was out of reach when"
                 " they were fetched; --force sources tries again")  # fmt: skip


def explain(options: argparse.Namespace) -> int:
    """Say for each item whether it stands, and if not, which input changed."""
    follow_last_build(options)
    target = pins.load(pins_path(options)).target(options.target)
    here = MACHINES.get(platform.machine()) == platform_of(target)
    until = STAGES[-1] if here else "wheelhouse"
    context = context_of(options, until, plan_only=True)
    steps = executor.plan(context, items(context, until))
    if not here:
        log.info(f"up to the {until}: what follows is made on {context.platform}")
    if options.json:
        log.json({"explain": [asdict(step) for step in steps],
                  "source": context.target.source.model_dump()})  # fmt: skip
    else:
        executor.show(context, steps)
    return 0


def smoke(options: argparse.Namespace) -> int:
    """Run the smoke test again; what it tests is built first where it is missing."""
    follow_last_build(options)
    if options.serve_arguments:
        return _smoke_with_arguments(options)
    options.until, options.force, options.dry_run = STAGES[-1], ["smoke"], False
    return build(options)


def _smoke_with_arguments(options: argparse.Namespace) -> int:
    """Run the smoke test with the user's arguments of ``vllm serve``; dist/ stays as it is."""
    start = time.monotonic()
    context = context_of(options, STAGES[-1], ["smoke"])
    if context.target.smoke is None:
        msg = f"target {context.target_name} has no smoke test"
        raise UsageError(msg, "serve with these arguments: build.py serve --target NAME -- …")
    lines = executor.run(context, items(context, STAGES[-1]))
    if options.json:
        log.json(receipt.receipt(
            target=context.target_name, target_platform=context.platform, pins=context.pins_path,
            lines=lines, seconds=time.monotonic() - start,
        ))  # fmt: skip
    return 0


def serve(options: argparse.Namespace) -> int:
    """Serve what was built until Ctrl-C."""
    follow_last_build(options)
    from sparkforge.build import serve as serving  # not needed by a build in which nothing changed

    context = context_of(options, "image")
    if options.chat and context.target.smoke is None:
        msg = f"--chat: target {context.target_name} serves a real model, and has no tiny one"
        raise UsageError(msg, "--target cpu, or serve without --chat")
    lines = executor.run(context, items(context, "image"))
    limit = options.ready_timeout or float("inf")
    return serving.serve(
        context,
        lines[-1].artefact,
        options.model,
        chat=options.chat,
        limit_s=limit,
        as_json=options.json,
    )


def bench(options: argparse.Namespace) -> int:
    """Measure what --mxfp4-layers changes in what the model says; 15 where it is too much."""
    from sparkforge.build import serve as serving
    from sparkforge.inspect.perf import quality, roofline

    for layers in options.layers or ():
        roofline.parse_layers(layers)  # here, and not by a server after the first has run
    follow_last_build(options)
    context = context_of(options, "image")
    if options.model is None and context.target.smoke is None:
        msg = f"target {context.target_name} comes without a checkpoint"
        raise UsageError(msg, "name the folder of one with --model DIR")
    model = None if options.model is None else serving.checkpoint(options.model)
    baked = executor.run(context, items(context, "image"))[-1].artefact
    plan = quality.Plan(
        tuple(options.layers or quality.DEFAULT_LAYERS), options.prompts, options.questions,
        options.tokens, options.top,
    )  # fmt: skip
    limits = quality.Limits(options.max_kl, options.min_agreement, options.max_score_drop)
    with context.store.temporary("quality") as work:
        tiny = publish.tiny_model(context.root / "dist" / context.target_name)
        start = quality.starter(context, baked, model, tiny, work)
        document = quality.run(start, plan, limits, quality.Material.load(plan))
    return report_quality({"model": str(model or tiny), **document}, as_json=options.json)


def report_quality(document: Mapping[str, Any], *, as_json: bool) -> int:
    """Print what ``quality.run`` measured, then what is wrong with it; returns the exit code."""
    from sparkforge.inspect.perf import quality

    if as_json:
        log.json(document)
    else:
        log.table(quality.table(document))
    if document["beyond"]:
        remedy = "leave those layers out, or give them more precision: KIND=mxfp8"
        log.error(str(QualityError("\n".join(document["beyond"]), remedy)))
    if document["failed"]:
        words = "\n".join(f"{name}: {what}" for name, what in document["failed"].items())
        remedy = "the figures of the others are above; the servers' own words say why"
        log.error(str(SmokeError(words, remedy)))
        return SmokeError.exit_code
    return QualityError.exit_code if document["beyond"] else 0


def roofline(options: argparse.Namespace) -> int:
    """Print the bytes that each configuration reads a token, and the ceiling that follows."""
    from sparkforge.inspect.perf import rooflinetable

    target = pins.load(pins_path(options)).target(options.target)
    case = rooflinetable.case(
        target, options.target, model=options.model, bandwidth=options.bandwidth,
        context=options.context, batch=options.batch, kv_cache=options.kv_cache_dtype,
    )  # fmt: skip
    if options.docs or options.check:
        if options.layers or case != rooflinetable.case(target, options.target):
            msg = "docs/roofline.md is about the target's own model and the defaults"
            raise UsageError(msg, "with --docs or --check give --target alone")
        command = f"roofline --target {options.target} --docs"
        page = pins_path(options).parent / "docs" / "roofline.md"
        wanted = {
            page: generated.between(page, command, rooflinetable.markdown(case)),
            page.with_suffix(".svg"): rooflinetable.svg(case),
        }
        return settle(options, wanted, command)
    table = rooflinetable.rows(case, options.layers)
    if options.json:
        log.json(rooflinetable.as_json(case, table))
        return 0
    rooflinetable.show(case, table)
    return 0


def clean(options: argparse.Namespace) -> int:
    """Empty the store."""
    store = store_of(options)
    superseded, everything = options.superseded, options.all
    log.info(f"emptying {store.root}: large stores take minutes")
    freed = store.clean_superseded() if superseded else store.clean(everything=everything)
    log.info(f"freed {human_bytes(freed)}")
    if options.json:
        log.json({"freed_bytes": freed})
    return 0
