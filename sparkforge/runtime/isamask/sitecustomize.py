"""Hide the CPU's better instruction sets from torch, and so from vLLM's selection.

Python imports this file at its start if its folder is on PYTHONPATH. The variable
SPARKFORGE_CPU_ISA names the best set that stays visible. It runs in the interpreter under test, so
it uses the standard library only. ``sparkforge/runtime/isa.py`` gives the variables.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType, ModuleType
from typing import Any

# prefixes of torch's names (torch.cpu.get_capabilities) that are better than a set
_BETTER = {
    "amx": (),
    "avx512_bf16": ("amx_", "avx512_fp16", "avx10_"),
    "avx512": ("amx_", "avx512_fp16", "avx10_", "avx512_bf16"),
    "avx2": ("amx_", "avx10_", "avx512_"),
}


class _Finder:
    """Finds torch.cpu as usual, and changes its answer once it is loaded."""

    def __init__(self, hidden: tuple[str, ...]) -> None:
        self.hidden = hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            seen = module.get_capabilities

            @lru_cache(None)
            def get_capabilities() -> Mapping[str, Any]:
                return MappingProxyType(
                    {k: False if k.startswith(self.hidden) else v for k, v in seen().items()}
                )

            module.get_capabilities = get_capabilities  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _wanted := os.environ.get("SPARKFORGE_CPU_ISA"):
    sys.meta_path.insert(0, _Finder(_BETTER[_wanted]))
