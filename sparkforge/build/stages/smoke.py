"""What the smoke test found out about an image or an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkforge.build.context import Context, Item, Results
from sparkforge.runtime import isa
from sparkforge.store.codekey import code_of


def smoke_item(context: Context, baked: Item, extra: Sequence[Item]) -> Item:
    """Return the smoke test of what was baked.

    Args:
        extra: the release without our series, for the proof about it; empty: no proof.
    """
    cpu = isa.here()
    inputs = {
        "baked": baked.key,
        "cpu": cpu,  # decides what the release is compared with, or that it refuses
        "kind": "image" if context.engine is not None else "environment",
        "unpatched": {item.label: item.key for item in extra},
        "serve": list(context.serve),
        "arguments": list(context.arguments),
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        from sparkforge.build import smoke  # not needed by a build in which nothing changed
        from sparkforge.build.launcher import Launcher

        launcher = Launcher(context, results, baked.label, folder)
        report = smoke.exercise(launcher.patched, context.ready_timeout_s)
        if context.arguments:
            return report.as_json()
        proof = smoke.check_release(
            launcher.unpatched,
            launcher.unpatched_without_amx if cpu == "amx" else None,
            report.answers,
            context.ready_timeout_s,
        )
        return replace(report, release=proof).as_json()

    label = "smoke with arguments" if context.arguments else "smoke"
    return Item("smoke", label, inputs, make)
