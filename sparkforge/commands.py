"""What each command does: options → stages → output. Returns exit codes, raises our errors."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from sparkforge import (
    engine,
    environment,
    generated,
    git,
    pins,
    pipeline,
    publish,
    receipt,
    series,
    sources,
)
from sparkforge.context import STAGES, Context
from sparkforge.errors import QualityError, SeriesError, UsageError
from sparkforge.index import Index
from sparkforge.log import human_bytes, log
from sparkforge.pins import Pins, Platform, SourcePlan, Target
from sparkforge.sources import Access
from sparkforge.stages import items
from sparkforge.store import Store

ROOT = Path(__file__).resolve().parent.parent
_MACHINES: dict[str, Platform] = {
    "x86_64": "linux/amd64", "aarch64": "linux/arm64", "arm64": "linux/arm64",
}  # fmt: skip
_RELEASE_PLAN = SourcePlan(provider="release")


# -- shared by the commands ---------------------------------------------------


def _store(options: argparse.Namespace) -> Store:
    chosen = options.store or os.environ.get("SPARKFORGE_STORE")
    try:
        if chosen is None:
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            chosen = Path(cache) / "sparkforge"
        return Store(Path(chosen).expanduser().resolve())
    except RuntimeError as error:  # no HOME, and the user is in no list of users
        raise UsageError(f"no place for the store: {error}", "name one with --store DIR") from None


def _pins_path(options: argparse.Namespace) -> Path:
    return (options.pins or ROOT / "pins.yaml").resolve()


def _access(options: argparse.Namespace, all_pins: Pins) -> Access:
    mirrors = {}
    for text in options.mirror:
        name, separator, url = text.partition("=")
        if not separator or not url:
            msg = f"--mirror {text}: not UPSTREAM=URL-or-path"
            raise UsageError(msg, f"for example --mirror vllm=/src/vllm; upstreams:"
                                  f" {', '.join(sorted(all_pins.upstreams))}")  # fmt: skip
        all_pins.upstream(name)
        mirrors[name] = url
    return Access(Index(), mirrors, options.offline)


def _platform(target: Target) -> Platform:
    """The target's platform: this machine's where it is among them, else its first."""
    here = _MACHINES.get(platform.machine())
    return here if here in target.platforms else target.platforms[0]


def host_platform() -> Platform:
    """Return this machine's platform.

    Raises:
        UsageError: nothing is built on machines of this kind.
    """
    here = _MACHINES.get(platform.machine())
    if here is None:
        msg = f"nothing is built on {platform.machine()}"
        raise UsageError(msg, f"use a machine of {', '.join(sorted(set(_MACHINES.values())))}")
    return here


def _context(options: argparse.Namespace, until: str, force: Sequence[str] = ()) -> Context:
    path = _pins_path(options)
    all_pins = pins.load(path)
    target = all_pins.target(options.target)
    wanted = _platform(target)
    chosen, why, base = None, "", None
    if STAGES.index(until) >= STAGES.index("image"):
        pinned = all_pins.images[target.base] if target.base is not None else None
        reference = None
        if pinned is not None:
            digest = pinned.platforms.get(wanted, pinned.index)
            reference = f"{pinned.repository}@{digest}"
        if _MACHINES.get(platform.machine()) != wanted:
            msg = f"target {options.target} is for {wanted}, this machine is {platform.machine()}"
            raise UsageError(msg, "build its wheels here (--until wheelhouse), bake them there")
        chosen, why = engine.choose(options.engine, options.base, reference)
        base = options.base or reference
        log.info(f"bakes {why}")
    context = Context(
        root=path.parent, pins=all_pins, pins_path=path, store=_store(options),
        target_name=options.target, target=target, platform=wanted,
        access=_access(options, all_pins), engine=chosen, base=base, ca_bundle=options.ca_bundle,
        port=options.port, ready_timeout_s=options.ready_timeout, force=frozenset(force),
        arguments=options.serve_arguments,
    )  # fmt: skip
    context.store.sweep()
    return context


def _chosen_series(options: argparse.Namespace, root: Path, all_pins: Pins) -> list[series.Series]:
    names = [options.upstream] if options.upstream else list(all_pins.upstreams)
    unknown = {path.parent.name for path in (root / "patches").glob("*/series")}
    unknown -= set(all_pins.upstreams)
    if unknown:
        msg = f"patches/{sorted(unknown)[0]}: pins.yaml has no upstream of that name"
        raise SeriesError(msg, "rename the folder, or pin the upstream")
    for name in names:
        all_pins.upstream(name)
    return [series.read(root / "patches" / name) for name in names]


def _settle(options: argparse.Namespace, wanted: Mapping[Path, str], command: str) -> int:
    changed = generated.settle(wanted, command, check=options.check)
    for path in wanted:
        log.info(f"{path}: {'written' if path in changed else 'as it should be'}")
    if options.json:
        log.json({"written": [str(path) for path in changed]})
    return 0


# -- build and its kin -----------------------------------------------------------


def build(options: argparse.Namespace) -> int:
    """Make what the store lacks, publish it under dist/, print the receipt."""
    start = time.monotonic()
    context = _context(options, options.until, options.force)
    todo = items(context, options.until)
    steps = pipeline.plan(context, todo)
    if options.dry_run:
        if options.json:
            log.json({"plan": [asdict(step) for step in steps]})
        else:
            log.heading(f"plan for {context.target_name} on {context.platform}")
            pipeline.show(steps)
        return 0
    standing = sum(step.state == "in the store" for step in steps)
    log.heading(f"{context.target_name} on {context.platform}: {len(steps) - standing} of"
                f" {len(steps)} items to make")  # fmt: skip
    if any(step.state != "in the store" and step.label == "environment" for step in steps):
        environment.check_python(context.target.python)  # before anything is fetched
    lines = pipeline.run(context, todo)
    _mention_fallback(context, lines)
    seconds = time.monotonic() - start
    document = receipt.receipt(
        target=context.target_name, target_platform=context.platform, pins=context.pins_path,
        lines=lines, seconds=seconds,
    )  # fmt: skip
    folder = publish.publish(context, lines, document)
    if options.json:
        log.json(document)
    publish.summary(context, lines, folder, seconds)
    return 0


def _mention_fallback(context: Context, lines: Sequence[receipt.Line]) -> None:
    for line in lines:
        if line.artefact.stage != "sources" or line.made_now:
            continue
        used = line.artefact.outputs["provider"]
        if used != line.artefact.inputs["provider"]:
            log.info(f"{line.label}: the {used} file, since git was out of reach when it was"
                     " fetched; --force sources tries again")  # fmt: skip


def _follow_last_build(options: argparse.Namespace) -> None:
    """Mean the image that was built last, where neither engine nor base is named."""
    if options.engine == "auto" and options.base is None:
        options.base = publish.last_base(_pins_path(options).parent, options.target)


def explain(options: argparse.Namespace) -> int:
    """Say for each item whether it stands, and if not, which input changed."""
    _follow_last_build(options)
    target = pins.load(_pins_path(options)).target(options.target)
    here = _MACHINES.get(platform.machine()) == _platform(target)
    until = STAGES[-1] if here else "wheelhouse"
    context = _context(options, until)
    steps = pipeline.plan(context, items(context, until))
    if not here:
        log.info(f"up to the {until}: what follows is made on {context.platform}")
    if options.json:
        log.json({"explain": [asdict(step) for step in steps]})
    else:
        pipeline.show(steps)
    return 0


def smoke(options: argparse.Namespace) -> int:
    """Run the smoke test again; what it tests is built first where it is missing."""
    _follow_last_build(options)
    if options.serve_arguments:
        return _smoke_with_arguments(options)
    options.until, options.force, options.dry_run = STAGES[-1], ["smoke"], False
    return build(options)


def _smoke_with_arguments(options: argparse.Namespace) -> int:
    """Run the smoke test with the user's arguments of ``vllm serve``; dist/ stays as it is."""
    start = time.monotonic()
    context = _context(options, STAGES[-1], ["smoke"])
    if context.target.smoke is None:
        msg = f"target {context.target_name} has no smoke test"
        raise UsageError(msg, "serve with these arguments: build.py serve --target NAME -- …")
    lines = pipeline.run(context, items(context, STAGES[-1]))
    if options.json:
        log.json(receipt.receipt(
            target=context.target_name, target_platform=context.platform, pins=context.pins_path,
            lines=lines, seconds=time.monotonic() - start,
        ))  # fmt: skip
    return 0


def serve(options: argparse.Namespace) -> int:
    """Become the server of what was built."""
    _follow_last_build(options)
    context = _context(options, "image")
    lines = pipeline.run(context, items(context, "image"))
    publish.serve(context, lines[-1].artefact, options.model)
    return 0


def bench(options: argparse.Namespace) -> int:
    """Measure what --mxfp4-layers changes in what the model says; 15 where it is too much."""
    from sparkforge import quality

    _follow_last_build(options)
    context = _context(options, "image")
    if options.model is None and context.target.smoke is None:
        msg = f"target {context.target_name} comes without a checkpoint"
        raise UsageError(msg, "name the folder of one with --model DIR")
    model = None if options.model is None else publish.checkpoint(options.model)
    baked = pipeline.run(context, items(context, "image"))[-1].artefact
    plan = quality.Plan(
        tuple(options.layers or quality.DEFAULT_LAYERS), options.prompts, options.questions,
        options.tokens, options.top,
    )  # fmt: skip
    limits = quality.Limits(options.max_kl, options.min_agreement, options.max_score_drop)
    with context.store.temporary("quality") as work:
        tiny = publish.tiny_model(context.root / "dist" / context.target_name)
        start = quality.starter(context, baked, model, tiny, work)
        document = quality.run(start, plan, limits, quality.Material.load(plan))
    document = {"model": str(model or tiny), **document}
    if options.json:
        log.json(document)
    else:
        log.table(quality.table(document))
    if document["beyond"]:
        remedy = "leave those layers out, or give them more precision: KIND=mxfp8"
        log.error(str(QualityError("\n".join(document["beyond"]), remedy)))
        return QualityError.exit_code
    return 0


# -- pins --------------------------------------------------------------------------


def pins_check(options: argparse.Namespace) -> int:
    """Check pins.yaml and all that it names."""
    from sparkforge import wheelhouse

    path = _pins_path(options)
    loaded = pins.load(path)
    for target in loaded.targets.values():
        for lock in target.requirements.values():
            wheelhouse.read_lock(path.parent / lock)
    counts = {"upstreams": len(loaded.upstreams), "targets": len(loaded.targets),
              "files": sum(len(u.files) for u in loaded.upstreams.values())}  # fmt: skip
    if options.json:
        log.json({"pins": str(path), "ok": True, **counts})
    else:
        log.info(f"{path.name}: {counts['upstreams']} upstreams, {counts['files']} release files,"
                 f" {counts['targets']} targets: all well formed")  # fmt: skip
    return 0


def pins_record(options: argparse.Namespace) -> int:
    """Write the commit and tree that each series gives into pins.yaml."""
    path = _pins_path(options)
    loaded = pins.load(path)
    store = _store(options)
    access = _access(options, loaded)
    for name, upstream in loaded.upstreams.items():
        patches = series.read(path.parent / "patches" / name)
        if not patches.patches:
            continue
        source = sources.ensure(store, name, upstream, _RELEASE_PLAN, access)
        patched = series.apply(store, patches, source)
        recorded = pins.Recorded(commit=patched.commit, tree=patched.tree)
        pins.record(path, name, source.provider, recorded)
        log.info(f"{name}: patched.{source.provider}: tree {patched.tree}")
    if options.json:
        log.json({"pins": str(path)})
    return 0


# -- patches -------------------------------------------------------------------------


def patches_list(options: argparse.Namespace) -> int:
    """Print every patch in order."""
    path = _pins_path(options)
    chosen = _chosen_series(options, path.parent, pins.load(path))
    if options.json:
        log.json({
            one.upstream: [
                {"file": patch.name, "subject": patch.subject, "author": patch.author,
                 "sha256": patch.sha256, "trailers": dict(patch.trailers),
                 "files": [entry.path for entry in patch.entries]}
                for patch in one.patches
            ]
            for one in chosen
        })  # fmt: skip
        return 0
    for one in chosen:
        log.heading(f"{one.upstream}: {len(one.patches)} patch(es)")
        for patch in one.patches:
            risk = patch.trailers.get("Risk", "?")
            status = patch.trailers.get("Upstream-Status", "?")
            log.info(f"{patch.name}  [{risk}, {status}]")
            log.info(f"    {patch.subject}")
    return 0


def patches_check(options: argparse.Namespace) -> int:
    """Lint every series; apply it in memory where the store has (or can get) its source."""
    path = _pins_path(options)
    loaded = pins.load(path)
    store = _store(options)
    access = _access(options, loaded)
    report: dict[str, Any] = {}
    problems: list[str] = []
    for one in _chosen_series(options, path.parent, loaded):
        problems += series.lint(one, path.parent)
        series.check_emptied(one, loaded.upstreams[one.upstream])
        if not one.patches:
            report[one.upstream] = {"patches": 0}
            continue
        upstream = loaded.upstreams[one.upstream]
        source = sources.ensure(store, one.upstream, upstream, _RELEASE_PLAN, access)
        tree = series.patched_tree(store, one, source)
        recorded = upstream.patched.get(cast("Any", source.provider))
        series.check_record(one.upstream, source, None, tree, recorded)
        report[one.upstream] = {"patches": len(one.patches), "tree": tree,
                                "recorded": recorded is not None}  # fmt: skip
        note = "as recorded" if recorded else "not recorded: build.py pins record"
        log.info(f"{one.upstream}: {len(one.patches)} patch(es) apply exactly, tree {tree[:12]},"
                 f" {note}")  # fmt: skip
    if problems:
        raise SeriesError("\n".join(problems))
    if options.json:
        log.json(report)
    return 0


def patches_apply(options: argparse.Namespace) -> int:
    """Give a folder with the patched tree, as a git worktree with one commit a patch."""
    path = _pins_path(options)
    loaded = pins.load(path)
    upstream = loaded.upstream(options.upstream)
    if options.folder.exists():
        msg = f"{options.folder}: is there already"
        raise UsageError(msg, "name a folder that does not exist yet")
    store = _store(options)
    source = sources.ensure(store, options.upstream, upstream, _RELEASE_PLAN,
                            _access(options, loaded))  # fmt: skip
    one = series.read(path.parent / "patches" / options.upstream)
    patched = series.apply(store, one, source)
    recorded = upstream.patched.get(cast("Any", source.provider))
    series.check_record(options.upstream, source, patched.commit, patched.tree, recorded)
    git.clone_at(source.repo, options.folder, patched.commit)
    log.info(f"{options.folder}: {options.upstream} with {len(one.patches)} patch(es),"
             f" commit {patched.commit}")  # fmt: skip
    if options.json:
        log.json({"folder": str(options.folder.resolve()), "commit": patched.commit,
                  "tree": patched.tree})  # fmt: skip
    return 0


def patches_stats(options: argparse.Namespace) -> int:
    """Print how many files and lines each patch changes."""
    from sparkforge import patchdocs

    path = _pins_path(options)
    chosen = _chosen_series(options, path.parent, pins.load(path))
    if options.json:
        log.json(patchdocs.stats_json(chosen))
    else:
        log.table([patchdocs.STATS_HEAD, *patchdocs.stats_rows(chosen)])
    return 0


def ablate(options: argparse.Namespace) -> int:
    """Leave patches out one by one; every patch's own test must notice."""
    from sparkforge import ablation

    path = _pins_path(options)
    loaded = pins.load(path)
    job = ablation.Job(
        root=path.parent, store=_store(options), python=options.python,
        series=_chosen_series(options, path.parent, loaded), names=tuple(options.patch),
        source_of=lambda name: sources.ensure(
            _store(options), name, loaded.upstream(name), _RELEASE_PLAN, _access(options, loaded)
        ),
    )  # fmt: skip
    return ablation.run(job, as_json=options.json)


def patches_docs(options: argparse.Namespace) -> int:
    """Write docs/patches.md from the patches' messages, or say whether it is what they say."""
    from sparkforge import patchdocs

    root = _pins_path(options).parent
    loaded = pins.load(_pins_path(options))
    text = patchdocs.page(_chosen_series(options, root, loaded), loaded.upstreams)
    return _settle(options, {root / "docs" / "patches.md": text}, patchdocs.COMMAND)


def roofline(options: argparse.Namespace) -> int:
    """Print the bytes that each configuration reads a token, and the ceiling that follows."""
    from sparkforge import rooflinetable

    target = pins.load(_pins_path(options)).target(options.target)
    if options.docs or options.check:
        case = rooflinetable.case(target, options.target)  # the page is about the defaults
        command = f"roofline --target {options.target} --docs"
        page = _pins_path(options).parent / "docs" / "roofline.md"
        wanted = {
            page: generated.between(page, command, rooflinetable.markdown(case)),
            page.with_suffix(".svg"): rooflinetable.svg(case),
        }
        return _settle(options, wanted, command)
    case = rooflinetable.case(
        target, options.target, model=options.model, bandwidth=options.bandwidth,
        context=options.context, batch=options.batch, kv_cache=options.kv_cache_dtype,
    )  # fmt: skip
    table = rooflinetable.rows(case, options.layers)
    if options.json:
        log.json(rooflinetable.as_json(case, table))
        return 0
    rooflinetable.show(case, table)
    return 0


def clean(options: argparse.Namespace) -> int:
    """Empty the store."""
    store = _store(options)
    superseded, everything = options.superseded, options.all
    freed = store.clean_superseded() if superseded else store.clean(everything=everything)
    log.info(f"freed {human_bytes(freed)}")
    if options.json:
        log.json({"freed_bytes": freed})
    return 0
