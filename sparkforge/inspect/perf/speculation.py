"""The break-even point of speculation, computed from the bytes of a step.

A step that verifies *n* tokens of one sequence (a known one, and *n* - 1 drafts) reads dense
layers, keys and values once, but more experts, as if *n* sequences were decoded. It pays if it
gives more tokens than the same bytes in steps of one token. Drafts and computing count as free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkforge.inspect.perf.roofline import parse_layers
from sparkforge.inspect.perf.traffic import Bytes, Setup, Shape, distinct_experts, step_bytes

TOKENS = range(2, 9)
PROFILES: tuple[tuple[str, str], ...] = (
    ("exact: as published", ""),
    ("balanced: qkv, o, lm_head in 8 bits", "qkv=mxfp8,o=mxfp8,lm_head=mxfp8"),
    ("fast: qkv, o, lm_head in MXFP4", "qkv,o,lm_head"),
)
"""Name, --mxfp4-layers. The experts are in MXFP4, by Marlin with the series."""


@dataclass(frozen=True)
class BreakEven:
    """A step that verifies ``tokens``."""

    tokens: int
    experts: float
    """Mean number that it reads in a layer."""
    ratio: float
    """Its bytes relative to a step with one token: the number of tokens that it must give."""

    @property
    def accepted(self) -> float:
        """Mean number of drafts that a step must accept, of ``tokens`` - 1."""
        return self.ratio - 1

    @property
    def share(self) -> float:
        """The same as a share of all drafts."""
        return self.accepted / (self.tokens - 1)


def verify_bytes(shape: Shape, setup: Setup, *, context: int, tokens: int) -> Bytes:
    """Return the bytes of a step that verifies tokens of one sequence."""
    step = step_bytes(shape, setup, context=context, batch=tokens)
    return replace(step, kv=step_bytes(shape, setup, context=context).kv)


def break_even(shape: Shape, setup: Setup, *, context: int, tokens: int) -> BreakEven:
    """Return the break-even point of a step with ``tokens`` tokens; at least two."""
    single = step_bytes(shape, setup, context=context).total
    several = verify_bytes(shape, setup, context=context, tokens=tokens).total
    experts = distinct_experts(shape.experts, shape.top_k, tokens)
    return BreakEven(tokens, experts, several / single)


def table(shape: Shape, context: int) -> list[tuple[str, float, list[BreakEven]]]:
    """Return name, bytes of a step with one token, and the break-even points of each profile."""
    made = []
    for name, spec in PROFILES:
        setup = Setup("marlin", parse_layers(spec) if spec else {})
        points = [break_even(shape, setup, context=context, tokens=n) for n in TOKENS]
        made.append((name, step_bytes(shape, setup, context=context).total, points))
    return made
