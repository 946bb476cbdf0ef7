"""Ceilings of decoding speed: a memory's bandwidth divided by the bytes of a step.

A ceiling is neither a measurement nor a promise: no engine can be faster, and its distance from it
is unknown. ``inspect/perf/traffic.py`` counts the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkforge.core.errors import UsageError
from sparkforge.inspect.perf import traffic
from sparkforge.inspect.perf.traffic import BF16_BYTES, GB, Bytes, Format, Kind, Shape, weight_bytes


def parse_layers(text: str) -> Mapping[Kind, Format]:
    """Call ``traffic.parse_layers`` for the command line; UsageError if the value is invalid."""
    try:
        return traffic.parse_layers(text)
    except traffic.LayersError as error:
        raise UsageError(f"--layers {error}", error.hint) from None


def ceiling(step: Bytes, bandwidth_gb_s: float, batch: int = 1) -> float:
    """Return memory's limit for tokens per second, over all sequences."""
    return batch * bandwidth_gb_s * GB / step.total


def checkpoint(shape: Shape) -> tuple[int, int]:
    """Return parameters and bytes of the published checkpoint: all experts, no padding."""
    hidden, layers = shape.hidden, shape.layers
    expert = 3 * hidden * shape.intermediate
    expert_bias = 2 * shape.intermediate + hidden
    dense = (
        layers * (shape.qkv_rows * (hidden + 1) + hidden * (shape.o_columns + 1) + shape.heads)
        + layers * (hidden + 1) * shape.experts
        + (2 * layers + 1) * hidden
        + 2 * shape.vocab * hidden
    )
    biases = layers * shape.experts * expert_bias
    packed = layers * shape.experts * expert
    return packed + biases + dense, int(weight_bytes(packed, 1, "mxfp4")) + BF16_BYTES * (
        biases + dense
    )
