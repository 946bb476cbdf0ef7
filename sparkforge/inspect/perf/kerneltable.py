"""The model of the decode kernels as Markdown, text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparkforge.core import pages
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.inspect.perf import kernelmodel
from sparkforge.inspect.perf.kernelmodel import MEASURED, Estimate
from sparkforge.inspect.perf.kernelwork import Recorded
from sparkforge.inspect.perf.machines import GB10, H200, Machine
from sparkforge.inspect.perf.shapes import SHAPES
from sparkforge.pins.pins import Target

MODEL = "gpt-oss-120b"
NOTE = "arithmetic from machine code and data sheets, not a measurement; nobody ran this on a GB10"

HEAD = (
    "kernel",
    "rows",
    "layer",
    "instr/KiB",
    "memory, us",
    "all else, us",
    "busiest",
    "share",
    "40 % to spare",
    "from GHz",
    "KiB in flight an SM",
    "of the need",
)
RIGHT = (3, 4, 5, 7, 9, 10, 11)
CHECK_HEAD = (
    "layer",
    "format",
    "rows",
    "memory, us",
    "all else, us",
    "least, us",
    "measured, us",
    "least of measured",
    "difference, us",
)
CHECK_RIGHT = (2, 3, 4, 5, 6, 7, 8)


def machine_of(target: Target, name: str) -> Machine:
    """Return the GPU of a target; UsageError without figures of it."""
    arch = f"{(target.cuda_arch or '').replace('.', '')}a"
    for machine in (GB10, H200):
        if machine.arch == arch:
            return machine
    raise UsageError(f"target {name}: no figures of its GPU for --kernels", "use --target spark")


def rows_of(rows: int) -> str:
    """Return the rows of a step for a kernel of at most ``rows``."""
    first = {1: 1, 2: 2, 4: 3, 8: 5, 16: 9}[rows]
    return str(rows) if first == rows else f"{first} to {rows}"


def _served(estimate: Estimate) -> str:
    rows = estimate.product.rows
    if estimate.product.kernel.startswith("experts_rows") and rows == 8:
        return "2 to 8"
    return "1 to 8" if estimate.product.kernel.startswith("dense") and rows == 8 else rows_of(rows)


def verdict(estimate: Estimate, machine: Machine) -> str:
    """Return whether memory limits a kernel with 40 % to spare, and if not, the reason."""
    if estimate.bound_by_memory:
        return "yes"
    blocks = estimate.product.blocks
    if blocks is not None and blocks < machine.multiprocessors:
        return f"no: {blocks:g} blocks for {machine.multiprocessors} SMs"
    return f"no: {estimate.unit}"


def cells(estimate: Estimate, machine: Machine) -> tuple[str, ...]:
    """Return a kernel's texts."""
    needed = machine.needed
    return (
        f"`{estimate.product.kernel}`",
        _served(estimate),
        estimate.product.layer,
        f"{estimate.per_kib:.0f}",
        f"{estimate.memory_us:.1f}",
        f"{estimate.compute_us:.1f}",
        estimate.unit,
        f"{estimate.share:.0%}",
        verdict(estimate, machine),
        f"{machine.clock_ghz * estimate.share / kernelmodel.MOST_SHARE:.1f}",
        f"{estimate.in_flight / 1024:.0f}",
        "-" if needed is None else f"x{estimate.in_flight / needed:.1f}",
    )


def checked(recorded: Recorded) -> list[tuple[str, ...]]:
    """Return the texts of the model beside the times measured on an H200."""
    found = kernelmodel.estimates(recorded.kernels[H200.arch], SHAPES[MODEL], H200)
    rows: list[tuple[str, ...]] = []
    for (layer, form), times in MEASURED.items():
        for count, measured in times.items():
            if layer != "experts" and count not in (1, 8):
                continue  # one kernel serves all of them
            parts = [
                estimate
                for estimate in found
                if estimate.product.form == form
                and estimate.product.layer
                in (("gate_up", "down") if layer == "experts" else (layer,))
                and estimate.product.rows
                == (8 if estimate.product.kernel.startswith("dense") else count)
            ]
            least = sum(estimate.least_us for estimate in parts)
            rows.append(
                (
                    layer,
                    form,
                    str(count),
                    f"{sum(estimate.memory_us for estimate in parts):.1f}",
                    f"{sum(estimate.compute_us for estimate in parts):.1f}",
                    f"{least:.1f}",
                    f"{measured:g}",
                    f"{least / measured:.0%}",
                    f"{measured - least:.1f}",
                )
            )
    return rows


def markdown(recorded: Recorded) -> str:
    """Return the tables of docs/decode-kernels.md."""
    found = kernelmodel.estimates(recorded.kernels[GB10.arch], SHAPES[MODEL], GB10)
    return pages.render(
        Path(__file__).with_name("kernels.md.j2"),
        model=MODEL,
        machine=GB10,
        other=H200,
        needed=(GB10.needed or 0) / 1024,
        head=HEAD,
        right=RIGHT,
        rows=[cells(estimate, GB10) for estimate in found],
        missed=[
            f"`{estimate.product.kernel}`" for estimate in found if not estimate.bound_by_memory
        ],
        check_head=CHECK_HEAD,
        check_right=CHECK_RIGHT,
        checked=checked(recorded),
    )


def show(recorded: Recorded, machine: Machine) -> None:
    """Print the table of a machine."""
    log.heading(f"decode kernels, {MODEL}, {machine.name} at {machine.memory_gb_s:g} GB/s")
    log.info(NOTE)
    found = kernelmodel.estimates(recorded.kernels[machine.arch], SHAPES[MODEL], machine)
    log.table([HEAD, *(cells(estimate, machine) for estimate in found)])


def as_json(recorded: Recorded, machine: Machine) -> Mapping[str, Any]:
    """Return a machine and the estimates of all kernels as JSON values."""
    found = kernelmodel.estimates(recorded.kernels[machine.arch], SHAPES[MODEL], machine)
    return {
        "note": NOTE,
        "model": MODEL,
        "machine": asdict(machine),
        "most_share": kernelmodel.MOST_SHARE,
        "needed_in_flight": machine.needed,
        "kernels": [_value(estimate) for estimate in found],
    }


def _value(estimate: Estimate) -> Mapping[str, Any]:
    names: Sequence[str] = ("share", "bound_by_memory", "least_us")
    return asdict(estimate) | {name: getattr(estimate, name) for name in names}
