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
    """One way to serve."""

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
    """The series at some time, beside the release of that day; ``short`` is for the picture."""

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
        by_batch = [one.tok_s for one in self.runs] + [one.gain for one in self.steps]
        if any(len(row) != len(self.batches) for row in by_batch):
            raise ValueError("a row has not one figure for each batch")
        by_prompt = [one.prefill_ms for one in self.runs] + [one.prefill_ms for one in self.steps]
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
        runs=[_cells(one, speeds.runs[0]) for one in speeds.runs],
        steps_head=["step", *batches, *prompts],
        steps=[_step(one, len(speeds.prompts)) for one in speeds.steps],
    )


def pictures(speeds: Speeds) -> tuple[str, str]:
    """Return speed by batch, and what each step gained."""
    speed = [Line(_name(one), _points(speeds, one.tok_s)) for one in speeds.runs]
    gains = [Line(one.short, _points(speeds, one.gain)) for one in speeds.steps]
    at = speeds.batches
    return (
        svg("Decode on an H200, random weights", "sequences", "tok/s", speed, at),
        svg("Profile fast beside the release, as the series grew", "sequences", "ratio", gains, at),
    )


def _points(speeds: Speeds, row: Sequence[float]) -> list[tuple[float, float]]:
    return [(batch, value) for batch, value in zip(speeds.batches, row, strict=True)]


def _name(one: Run) -> str:
    return f"{one.vllm}, {one.profile}" if one.profile else one.vllm


def _cells(one: Run, first: Run) -> list[str]:
    speeds = [
        f"{value:.0f}" if one is first else f"{value:.0f}, **{value / base:.2f}×**"
        for value, base in zip(one.tok_s, first.tok_s, strict=True)
    ]
    layers = one.layers if one.layers == "none" else f"`{one.layers}`"
    figures = [f"{one.gib:.2f}", *speeds, *(f"{ms:.1f}" for ms in one.prefill_ms)]
    return [_name(one), pages.Markdown(layers), *map(pages.Markdown, figures)]


def _step(one: Step, prompts: int) -> list[str]:
    prefill = [f"{ms:.1f}" for ms in one.prefill_ms] or [""] * prompts
    return [one.step, *(f"{gain:.2f}×" for gain in one.gain), *prefill]
