# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs take of a memory that GPU and host share, counted as vLLM counts the rest.

There ``MemorySnapshot``, which sizes the KV cache, takes what the OS calls available. What graphs
take is the difference of two readings of cudaMemGetInfo, whose free memory leaves out what can be
reclaimed: with a full page cache an allocation is met by reclaiming, free memory stays the same,
and graphs seem to cost next to nothing. The KV cache gets their memory, and it is missing once they
are captured. Files that are read meanwhile count as graphs.

So while vLLM measures graphs, it reads the figure of its own snapshots. Its other readings, such
as those of sleep mode, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import psutil
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_sparkforge import contract, options

PART = "memory"


def measure(config: VllmConfig) -> bool:
    """Have this process measure so, if it is a GPU's; returns whether it does."""
    used = current_platform.is_cuda() and PART not in options.of(config).off
    if used and (used := contract.works(PART)):
        _wrap()
    return used


@cache
def _wrap() -> None:
    """Wrap what measures graphs in both model runners of vLLM."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    for runner in (First, Second):
        for name in ("profile_cudagraph_memory", "capture_model"):
            setattr(runner, name, _measured(getattr(runner, name)))


def _measured(method: Any) -> Any:
    @wraps(method)
    def measured(self: Any, *arguments: Any, **named: Any) -> Any:
        with _as_snapshots(self.device):
            return method(self, *arguments, **named)

    return measured


@contextmanager
def _as_snapshots(device: torch.device) -> Iterator[None]:
    """Let torch's reading of the memory be that of vLLM's snapshots."""
    if not current_platform.is_integrated_gpu(device.index):
        yield
        return
    usual = torch.accelerator.get_memory_info

    def available(*arguments: Any) -> tuple[int, int]:
        return psutil.virtual_memory().available, usual(*arguments)[1]

    torch.accelerator.get_memory_info = available
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = usual
