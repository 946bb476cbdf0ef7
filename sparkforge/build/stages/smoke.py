"""The result of the smoke test of an image or an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sparkforge.build.context import Context
from sparkforge.build.item import Item, Results, source_of
from sparkforge.build.results import (
    EnvironmentResult,
    Product,
    SmokeResult,
    SourceResult,
    WheelResult,
)
from sparkforge.runtime import isa
from sparkforge.store.codekey import code_of


def smoke_item(
    context: Context,
    product: Item[Product],
    unpatched: Item[EnvironmentResult] | None,
    wheels: Mapping[str, Item[WheelResult]],
    sources: Mapping[str, Item[SourceResult]],
) -> Item[SmokeResult]:
    """Return the smoke test of an image or an environment.

    Args:
        unpatched: the release without our series, to compare with; None for an image, whose
            original files are put back, and where nothing is compared.
        wheels, sources: of an image, by upstream.
    """
    cpu = isa.here()
    amx = cpu == "amx"
    inputs = {
        "product": product.key,
        "cpu": cpu,  # determines what the release is compared with, or that it refuses
        "kind": "image" if context.engine is not None else "environment",
        "unpatched": {} if unpatched is None else {unpatched.label: unpatched.key},
        "serve": list(context.serve),
        "arguments": list(context.arguments),
        "code": code_of(__name__),
    }
    # a wheel has files to be put back where its series has patches, and then it needs their source
    needed = {item for wheel in wheels.values() for item in wheel.needs}
    sources = {name: item for name, item in sources.items() if item in needed}

    def make(folder: Path, results: Results) -> SmokeResult:
        from sparkforge.build import smoke  # not needed by a build in which nothing changed
        from sparkforge.build.launcher import Launcher

        launcher = Launcher(
            context,
            results.artefact(product),
            None if unpatched is None else results.artefact(unpatched).path,
            {name: results.of(item) for name, item in wheels.items()},
            {
                name: source_of(context.store, name, results.of(item))
                for name, item in sources.items()
            },
            folder,
        )
        report = smoke.exercise(launcher.patched, context.ready_timeout_s)
        if context.arguments:
            return report
        # the release's own backend calls operators of its own native files
        hides = amx and context.older_natives
        proof = smoke.check_release(
            launcher.unpatched_without_amx if hides else launcher.unpatched,
            launcher.unpatched_without_amx if amx and not hides else None,
            report.answers,
            context.ready_timeout_s,
        )
        if hides:
            proof = replace(proof, hidden="amx")
        return replace(report, release=proof)

    return Item(
        "smoke",
        "smoke with arguments" if context.arguments else "smoke",
        inputs,
        SmokeResult,
        make,
        needs=(
            product,
            *(() if unpatched is None else (unpatched,)),
            *wheels.values(),
            *sources.values(),
        ),
    )
