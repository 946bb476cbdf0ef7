"""Shapes of the models in pins.yaml, as data.

Source of all numbers: ``config.json`` of the model's repository, at the revision in
pins.yaml. A test compares the totals with OpenAI's (tests/unit/check/test_roofline.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkforge.check.perf.traffic import Shape

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
