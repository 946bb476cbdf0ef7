"""Verdicts → a document and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparkforge.core import pages
from sparkforge.inspect.proofs.runner import Verdict

_HEAD = (
    "Proof",
    "For",
    "Kernels",
    "Matrix instructions",
    "Registers",
    "Stack, bytes",
    "Shared, bytes",
    "Compiled in",
    "Verdict",
)


def document(verdicts: Sequence[Verdict], nvcc: str) -> dict[str, Any]:
    """Return all facts as JSON values."""
    return {
        "nvcc": nvcc,
        "ran_on": "no GPU: compiled and disassembled only",
        "ok": all(verdict.ok for verdict in verdicts),
        "proofs": [
            {
                "unit": verdict.job.unit.name,
                "label": verdict.job.label,
                "arch": verdict.job.arch,
                "control": verdict.job.unit.control,
                "ok": verdict.ok,
                "problems": list(verdict.problems),
                "compile_seconds": verdict.seconds,
                "kernels": [asdict(kernel) for kernel in verdict.kernels],
            }
            for verdict in verdicts
        ],
    }


def markdown(verdicts: Sequence[Verdict], nvcc: str) -> str:
    """Return the Markdown table: one line for each unit and architecture."""
    alike, differ = _same_code(verdicts)
    return pages.render(
        Path(__file__).with_name("report.md.j2"),
        nvcc=nvcc,
        head=_HEAD,
        rows=[_row(verdict) for verdict in verdicts],
        alike=alike,
        differ=differ,
        failed=[verdict for verdict in verdicts if not verdict.ok],
    )


def _row(verdict: Verdict) -> tuple[str, ...]:
    kernels = verdict.kernels
    mma: dict[str, int] = {}
    for kernel in kernels:
        for word, count in kernel.mma.items():
            mma[word] = mma.get(word, 0) + count
    good = "fails, as it must" if verdict.job.unit.control else "holds"
    return (
        verdict.job.label.rpartition(" ")[0],
        verdict.job.arch,
        str(len(kernels)),
        ", ".join(f"{count} `{word}`" for word, count in mma.items()) or "none",
        _span([kernel.registers for kernel in kernels]),
        _span([kernel.stack for kernel in kernels]),
        _span([kernel.shared + (kernel.shared_dynamic or 0) for kernel in kernels]),
        f"{verdict.seconds:.0f} s",
        good if verdict.ok else pages.Markdown("**does not hold**"),
    )


def _same_code(verdicts: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    """Return the units with equal machine code on all targets, and the others."""
    codes: dict[str, list[list[str]]] = {}
    for verdict in verdicts:
        if not verdict.job.unit.control:
            label = verdict.job.label.rpartition(" ")[0]
            codes.setdefault(label, []).append(sorted(kernel.code for kernel in verdict.kernels))
    several = {label: found for label, found in codes.items() if len(found) > 1}
    alike = [label for label, found in several.items() if all(code == found[0] for code in found)]
    return alike, [label for label in several if label not in alike]


def _span(values: Sequence[int]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
