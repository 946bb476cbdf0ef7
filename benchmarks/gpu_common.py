"""What the kernel benchmarks share: MX formats from their definition, clocks, copy bandwidth.

Needs torch alone. Everything runs on a CPU too (`--dry-run` of the scripts), where the clock is the
machine's and the figures mean nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

BLOCK = 32
"""Elements that share a scale in the MX formats (OCP MX 1.0)."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4, by the low three bits."""

Step = Callable[[], object]
"""Work to be timed: submits, need not wait."""


# -- formats -------------------------------------------------------------------


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent in float32, exactly: int32, -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def expand(fmt: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Expand an MX tensor to float32.

    Args:
        fmt: "mxfp4" or "mxfp8".
        codes: uint8 [..., K / 2] with the even element in the low nibble, or float8_e4m3fn
            [..., K].
        scales: E8M0 as uint8 [..., K / 32].

    """
    if fmt == "mxfp4":
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32, device=codes.device)
        values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
    else:
        values = codes.float()
    factors = _power(scales.int() - 127).unsqueeze(-1)
    return (values.unflatten(-1, (-1, BLOCK)) * factors).flatten(-2)


def quantise(fmt: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [rows, K] to an MX format; gives codes and scales as `expand` takes them.

    The scale is the OCP text's: the exponent of the largest magnitude, less the format's largest
    (2 for E2M1, 8 for E4M3); values beyond the largest saturate, the others round to the nearest,
    ties to the even code. Made to feed kernels; no claim about accuracy.
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    # frexp's mantissa lies in [0.5, 1), so its exponent is one more than the format's.
    exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=2.0**-100)).exponent - 1
    exponent = exponent - (2 if fmt == "mxfp4" else 8)
    scales = (exponent + 127).to(torch.uint8)
    scaled = (blocks * _power(-exponent).unsqueeze(-1)).flatten(-2)
    if fmt == "mxfp8":
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scales
    size = scaled.abs()
    levels = torch.tensor(E2M1, dtype=torch.float32, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(size, middles)  # a tie goes down ...
    for odd in (1, 3, 5):  # ... and from an odd code up
        codes = codes + (size == middles[odd]).int()
    codes = (codes + 8 * (scaled < 0).int()).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4), scales


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected| in float64; NaN or infinity gives infinity."""
    wanted = expected.double()
    relative = (actual.double() - wanted).norm() / wanted.norm()
    value = float(relative)
    return value if math.isfinite(value) else math.inf


# -- clocks --------------------------------------------------------------------


def _submit(step: Step, device: str) -> Step:
    """Return what submits the step (on a GPU: replays a graph of it), warmed up."""
    if device != "cuda":
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    replay: Step = graph.replay
    return replay


def seconds(steps: Mapping[str, Step], device: str, rounds: int) -> dict[str, list[float]]:
    """Time steps against each other: every round goes through all of them in turn.

    On a GPU each step is captured in a CUDA graph first, so that launches from Python are no part
    of the time, and timed by events.

    Returns:
        The time of each round, by step.

    """
    ready = {name: _submit(step, device) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, submit in ready.items():
            if device == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                submit()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) / 1000)
            else:
                before = time.perf_counter()
                submit()
                times[name].append(time.perf_counter() - before)
    return times


def copy_bandwidth(device: str, rounds: int) -> float:
    """Bytes a second that a copy of 2 GiB reads and writes (of 16 MiB on a CPU)."""
    source = torch.empty(2 << 30 if device == "cuda" else 16 << 20, dtype=torch.uint8)
    source = source.to(device).random_(0, 256)
    target = torch.empty_like(source)
    taken = seconds({"copy": lambda: target.copy_(source)}, device, rounds)["copy"]
    rate: float = 2 * source.numel() / statistics.median(taken)
    return rate


def kernels(step: Step) -> list[dict[str, Any]]:
    """Run a step once under torch's profiler: microseconds and calls of each GPU kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key, "calls": event.count, "us": event.device_time_total}
        for event in profile.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["us"])


# -- output --------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Say what the figures were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU: dry run, no figures"
    return {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


class Report:
    """Lines of JSON, written as they come, so that a run that is cut short leaves what it has."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path else None
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Write one line, and keep it."""
        self.rows.append(row)
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def conditions(about: Mapping[str, Any]) -> str:
    """Return the line above a table: what `machine` and `copy_bandwidth` found."""
    return (
        f"{about['device']}, torch {about['torch']}, {about['date']}; copy bandwidth "
        f"{about['copy_bandwidth'] / 1e12:.3f} TB/s (read and written)"
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
