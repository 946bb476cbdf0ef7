"""The build that a command line names: target, store, sources and engine, checked together."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from sparkforge.build import lastbuild
from sparkforge.build.context import STAGES, Context
from sparkforge.build.options import access_of, pins_path, platform_of, source_plan, store_of
from sparkforge.core.errors import EngineError, UsageError
from sparkforge.core.log import log
from sparkforge.pins import pins
from sparkforge.pins.types import MACHINES, Platform
from sparkforge.runtime import buildx, engine
from sparkforge.runtime.engine import BaseImage


def context_of(
    options: argparse.Namespace, until: str, force: Sequence[str] = (), *, plan_only: bool = False
) -> Context:
    """Return the build that the words ask for.

    Args:
        plan_only: nothing will be made, so neither an engine nor the right machine is needed.

    Raises:
        UsageError: another machine is needed, or options contradict each other.
        EngineError: an engine was asked for, or is needed, and can't be had.
    """
    path = pins_path(options)
    all_pins = pins.load(path)
    target = all_pins.target(options.target)
    target = target.model_copy(update={"source": source_plan(options, target.source)})
    wanted = platform_of(target)
    if options.wheels != "compile" and (options.native is not None or options.jobs is not None):
        msg = "--native and --jobs need --wheels compile"
        raise UsageError(msg, "add --wheels compile, or omit them")
    baker = _baker(options, all_pins, until, plan_only=plan_only)
    context = Context(
        root=path.parent,
        pins=all_pins,
        pins_path=path,
        store=store_of(options),
        target_name=options.target,
        target=target,
        platform=wanted,
        access=access_of(options, all_pins),
        engine=baker.engine,
        base=baker.base,
        builder=baker.builder,
        ca_bundle=options.ca_bundle,
        port=options.port,
        force=frozenset(force),
        ready_timeout_s=options.ready_timeout or Context.ready_timeout_s,
        arguments=options.serve_arguments,
        wheels=options.wheels or "overlay",
        native=options.native or "patched",
        jobs=options.jobs,
    )
    if not plan_only:  # a plan changes nothing
        context.store.sweep()
    return context


@dataclass(frozen=True)
class _Baker:
    """What bakes images, and what they stand on; no engine where a plain environment is made."""

    engine: engine.Engine | None = None
    base: BaseImage | None = None
    builder: str = "default"


def _baker(
    options: argparse.Namespace, all_pins: pins.Pins, until: str, *, plan_only: bool
) -> _Baker:
    """Choose engine, base and builder for what the words ask for; raises what `context_of` does."""
    bakes = STAGES.index(until) >= STAGES.index("image")
    compiles = options.wheels == "compile"
    if not (bakes or compiles):
        return _Baker()
    target = all_pins.target(options.target)
    wanted = platform_of(target)
    elsewhere = MACHINES.get(platform.machine()) != wanted
    if elsewhere and compiles and (bakes or not plan_only):
        msg = f"target {options.target} is for {wanted}; this machine is {platform.machine()}"
        remedy = "compile there; here use --wheels overlay, or --dry-run --until wheelhouse"
        raise UsageError(msg, remedy)
    reference = _pinned_base(all_pins, target, wanted)
    base = options.base or reference
    chosen, builder = None, "default"
    if not (elsewhere and compiles):
        chosen, why = _engine_for(options, reference, compiles=compiles, plan_only=plan_only)
        log.info(f"builds {why}" if bakes else f"compiles with {why}")
    if chosen is None and not plan_only and (options.builder or options.ca_bundle):
        msg = "--builder and --ca-bundle need a container engine"
        raise UsageError(msg, "use --engine docker, or omit them")
    if options.ca_bundle is not None and not options.ca_bundle.is_file():
        msg = f"--ca-bundle {options.ca_bundle}: no such file"
        raise UsageError(msg, "give a PEM file of certificates")
    resolved = None
    if base is not None and (chosen is not None or compiles):
        resolved = engine.resolve(base, chosen)
    if chosen is not None and resolved is not None:
        chosen_builder = buildx.choose(chosen, options.builder)
        buildx.check(chosen_builder, chosen, resolved.reference, wanted)
        builder = chosen_builder.name
    if elsewhere and bakes:
        _check_foreign(target, wanted, until, chosen, options.command)
    return _Baker(chosen, resolved, builder)


def _pinned_base(all_pins: pins.Pins, target: pins.Target, wanted: Platform) -> str | None:
    """Return the target's base for a platform with its digest, or None where it pins none."""
    if target.base is None:
        return None
    pinned = all_pins.images[target.base]
    return f"{pinned.repository}@{pinned.digest(wanted)}"


def _check_foreign(
    target: pins.Target, wanted: str, until: str, chosen: engine.Engine | None, command: str
) -> None:
    """Refuse what can't be done with another platform's programs.

    Raises:
        UsageError: a plain environment is this machine's own, and a server under emulation is too
            slow for the smoke test, whose times are about a real machine.
    """
    here = platform.machine()
    if chosen is None:
        msg = f"this target is for {wanted}; this machine is {here}"
        remedy = "build an image (needs an engine: --base), or stop earlier: --until wheelhouse"
        if command != "build":
            remedy = f"run it on {wanted}; here use build.py --target NAME --until wheelhouse"
        raise UsageError(msg, remedy)
    if target.smoke is not None and until == STAGES[-1]:
        msg = f"this target's smoke test runs on {wanted}; this machine is {here}"
        raise UsageError(msg, "build the image here (--until image) and test it there")


def _engine_for(
    options: argparse.Namespace, reference: str | None, *, compiles: bool, plan_only: bool
) -> tuple[engine.Engine | None, str]:
    """Choose what bakes and compiles; a compile that is more than a plan needs an engine."""
    chosen, why = engine.choose(options.engine, options.base, reference)
    if compiles and chosen is None and not plan_only:
        msg = f"compiling wheels needs a container, but this would use {why}"
        remedy = (
            f"start Docker Engine {engine.OLDEST_ENGINE} or newer, and give a base (--base IMAGE)"
            " if none is pinned; or use --wheels overlay, which needs neither"
        )
        raise EngineError(msg, remedy)
    return chosen, why


def follow_last_build(options: argparse.Namespace) -> None:
    """Use engine, base, wheels and sources of the last build where no option names others."""
    last = lastbuild.read(pins_path(options).parent, options.target)
    if options.engine == "auto" and options.base is None:
        options.engine, options.base = last.engine or "auto", last.base
    if options.wheels is None:
        options.wheels, options.native = last.wheels, options.native or last.native
    if options.source is None and not options.mirror:
        options.source = last.source
