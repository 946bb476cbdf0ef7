"""Launches of a decoding step, and their cost on an H200. Ours, measured there on 2026-11-21.

A launch costs time on every GPU, regardless of its memory: until it begins, until its first bytes
arrive, and until the next kernel may read its results.
"""

from __future__ import annotations

EMPTY_US = 0.86
"""An empty kernel in a CUDA graph: the minimum cost of a launch."""
SMALL_US = 1300 / (36 * 12)
"""One of the small kernels of a step, mostly latency.

Source: the profile of one step of gpt-oss-120b, batch 1, vLLM's default compile mode. All but the
four products of a layer and the head took 1.3 ms, in 12 launches a layer.
"""
USUAL, OWN = 17, 9
"""Launches of a layer: with Marlin, by that profile; with the decode kernels, by docs/h200.md."""


def cost_ms(launches: int) -> tuple[float, float]:
    """Return the minimum cost of launches, and their cost if each is like a small kernel, in ms."""
    return launches * EMPTY_US / 1e3, launches * SMALL_US / 1e3
