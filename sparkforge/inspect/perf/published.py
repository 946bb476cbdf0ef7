"""Published decoding speeds of gpt-oss-120b on one DGX Spark, as data.

All are by others, and not checked by us. Each was read on ``READ_ON``: single stream, with short
contexts (512 to 2,048 tokens) if the source states them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkforge.inspect.perf.traffic import Setup

READ_ON = "2026-11-20"

_FORK = "github christopherowen/spark-vllm-mxfp4-docker"


@dataclass(frozen=True)
class Figure:
    """One published figure."""

    engine: str
    tok_s: tuple[float, float]
    """Tokens per second, lowest and highest."""
    source: str
    published: str
    """Date with the source's precision, or ""."""
    setup: Setup | None = None
    """Its weights in our terms, if the source has enough facts."""
    note: str = ""


FIGURES: tuple[Figure, ...] = (
    Figure(
        "vLLM fork, CUTLASS MoE, dense BF16",
        (29.1, 29.1),
        _FORK,
        "early 2026",
        Setup("flashinfer_cutlass", {}, "fp8"),
    ),
    Figure(
        "vLLM fork, qkv and o in MXFP4",
        (38.5, 38.5),
        _FORK,
        "early 2026",
        Setup("flashinfer_cutlass", {"qkv": "mxfp4", "o": "mxfp4"}, "fp8"),
    ),
    Figure(
        "vLLM fork, lm_head in MXFP4, too",
        (48.9, 48.9),
        _FORK,
        "early 2026",
        Setup("flashinfer_cutlass", {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"}, "fp8"),
    ),
    Figure(
        "vLLM fork, smaller MoE tiles, too",
        (57.0, 60.7),
        f"{_FORK}; eugr/spark-vllm-docker #345",
        "2026-02 to 2026-04",
        Setup("flashinfer_cutlass", {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"}, "fp8"),
    ),
    Figure(
        "vLLM, Marlin, without CUDA graphs",
        (31.6, 31.6),
        f"{_FORK}, VLLM_BASELINE",
        "2026-01",
        Setup("marlin-release"),
    ),
    Figure(
        "vLLM 0.19 (NGC 26.04), Marlin, CUDA graphs",
        (57.0, 60.0),
        "conselara.dev",
        "2026-05-02",
        Setup("marlin-release"),
        "above what memory allows: one plain stream cannot have read these weights for each token"
        " (speculation, quantised layers or several streams would explain it)",
    ),
    Figure("vLLM, NVIDIA's playbook image", (40.0, 40.0), "kubis.ai", "", Setup("marlin-release")),
    Figure(
        "SGLang, qkv, o and lm_head in FP8", (52.37, 52.37), f"{_FORK}, SGLANG_ANALYSIS", "2026-01"
    ),
    Figure("llama.cpp", (57.81, 59.05), "NVIDIA developer forum, thread 355639", "2025-12-24"),
    Figure("Ollama", (42.1, 42.1), "github eugr/spark-vllm-docker #345", ""),
)
