"""docs/h200.yaml: speed on an H200, as the tables and pictures of docs/h200.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, model_validator

from sparkforge.core import pages
from sparkforge.inspect import datafile
from sparkforge.inspect.plot import Line, svg
from sparkforge.pins.types import Model

_Figures = tuple[Annotated[float, Field(gt=0)], ...]


class Run(Model):
    """Figures of one way to serve."""

    vllm: str
    profile: str = ""
    layers: str
    """Value of --mxfp4-layers."""
    gib: float
    """Memory of the loaded model."""
    tok_s: _Figures
    """By batch."""
    prefill_ms: _Figures
    """By prompt."""


class Step(Model):
    """The series at some time against the release of that day; ``short`` is for the picture."""

    step: str
    short: str
    gain: _Figures
    prefill_ms: _Figures = ()


class Speeds(Model):
    """The file; batches are numbers of sequences, prompts are tokens."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    runs: Annotated[tuple[Run, ...], Field(min_length=2)]
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _whole(self) -> Speeds:
        by_batch = [run.tok_s for run in self.runs] + [step.gain for step in self.steps]
        if any(len(row) != len(self.batches) for row in by_batch):
            raise ValueError("a row has not one figure for each batch")
        by_prompt = [run.prefill_ms for run in self.runs] + [step.prefill_ms for step in self.steps]
        if any(len(row) not in (0, len(self.prompts)) for row in by_prompt):
            raise ValueError("prefill_ms has not one figure for each prompt")
        return self


_SPEEDS = TypeAdapter(Speeds)


def load(path: Path) -> Speeds:
    """Read the file.

    Raises:
        UsageError: it is missing or malformed.
    """
    return datafile.load(path, _SPEEDS)


def markdown(speeds: Speeds) -> str:
    """Return the generated part of docs/h200.md."""
    batches = [f"batch {speeds.batches[0]}", *map(str, speeds.batches[1:])]
    prompts = [f"prefill of {speeds.prompts[0]}, ms", *map(str, speeds.prompts[1:])]
    return pages.render(
        Path(__file__).with_name("h200.md.j2"),
        runs_head=["vLLM", "`--mxfp4-layers`", "GiB", *batches, *prompts],
        runs=[_cells(run, speeds.runs[0]) for run in speeds.runs],
        steps_head=["step", *batches, *prompts],
        steps=[_step(step, len(speeds.prompts)) for step in speeds.steps],
    )


def pictures(speeds: Speeds) -> tuple[str, str]:
    """Return the pictures of speed by batch, and of each step's gain."""
    speed = [Line(_name(run), _points(speeds, run.tok_s)) for run in speeds.runs]
    gains = [Line(step.short, _points(speeds, step.gain)) for step in speeds.steps]
    at = speeds.batches
    return (
        svg("Decode on an H200, random weights", "sequences", "tok/s", speed, at),
        svg("Profile fast beside the release, as the series grew", "sequences", "ratio", gains, at),
    )


def _points(speeds: Speeds, row: Sequence[float]) -> list[tuple[float, float]]:
    return [(batch, value) for batch, value in zip(speeds.batches, row, strict=True)]


def _name(run: Run) -> str:
    return f"{run.vllm}, {run.profile}" if run.profile else run.vllm


def _cells(run: Run, first: Run) -> list[str]:
    speeds = [
        f"{value:.0f}" if run is first else f"{value:.0f}, **{value / base:.2f}×**"
        for value, base in zip(run.tok_s, first.tok_s, strict=True)
    ]
    layers = run.layers if run.layers == "none" else f"`{run.layers}`"
    figures = [f"{run.gib:.2f}", *speeds, *(f"{ms:.1f}" for ms in run.prefill_ms)]
    return [_name(run), pages.Markdown(layers), *map(pages.Markdown, figures)]


def _step(step: Step, prompts: int) -> list[str]:
    prefill = [f"{ms:.1f}" for ms in step.prefill_ms] or [""] * prompts
    return [step.step, *(f"{gain:.2f}×" for gain in step.gain), *prefill]
