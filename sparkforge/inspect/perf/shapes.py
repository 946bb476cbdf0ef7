"""Shapes of models, as data.

Source of every number: ``config.json`` of the model's repository, at the revision in
pins.yaml. The totals are compared with OpenAI's (tests/unit/inspect/test_roofline.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A gpt-oss model: decoder layers with attention, a router and experts, and a head.

    Attributes:
        layers: decoder layers.
        sliding_layers: layers with attention to ``sliding_window`` tokens only.
        hidden: width of the residual stream.
        intermediate: width of one expert between gate/up and down.
        experts, top_k: experts of a layer, and of each token.
        heads, kv_heads, head_dim: attention; every query head has one sink.
        vocab: rows of the embedding and of the separate head.
    """

    layers: int
    sliding_layers: int
    sliding_window: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused q, k and v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def o_columns(self) -> int:
        """Inputs of the output projection."""
        return self.heads * self.head_dim


SHAPES: Mapping[str, Shape] = {
    "gpt-oss-120b": Shape(
        layers=36,
        sliding_layers=18,
        sliding_window=128,
        hidden=2880,
        intermediate=2880,
        experts=128,
        top_k=4,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
    ),
    "gpt-oss-20b": Shape(
        layers=24,
        sliding_layers=12,
        sliding_window=128,
        hidden=2880,
        intermediate=2880,
        experts=32,
        top_k=4,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
    ),
}
"""By the model's name in pins.yaml."""
