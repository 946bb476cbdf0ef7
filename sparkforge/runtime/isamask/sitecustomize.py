"""Hide the CPU's better instruction sets from torch, and so from vLLM's selection.

Python imports this file at its start if its folder is on PYTHONPATH. The variable
SPARKFORGE_CPU_ISA names the best set that stays visible (``sparkforge/runtime/isa.py``). It runs in
the interpreter under test, so it uses the standard library only.
"""

import importlib.machinery
import os
import sys
from functools import cache
from types import ModuleType
from typing import Any

# prefixes of torch's names (torch.cpu.get_capabilities) that are better than a set
_BETTER = {
    "amx": (),
    "avx512_bf16": ("amx_", "avx512_fp16", "avx10_"),
    "avx512": ("amx_", "avx512_fp16", "avx10_", "avx512_bf16"),
    "avx2": ("amx_", "avx10_", "avx512_"),
}


class _Finder(importlib.machinery.PathFinder):
    """Finds torch.cpu as usual, and changes its answer once it is loaded."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec: Any = super().find_spec(fullname, path, target) if fullname == "torch.cpu" else None
        if spec is not None:
            load, hidden = spec.loader.exec_module, _BETTER[os.environ["SPARKFORGE_CPU_ISA"]]

            def exec_module(module: ModuleType) -> None:
                load(module)
                seen = module.get_capabilities

                @cache
                def get_capabilities() -> dict[str, Any]:
                    return {k: False if k.startswith(hidden) else v for k, v in seen().items()}

                vars(module)["get_capabilities"] = get_capabilities

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SPARKFORGE_CPU_ISA"):
    sys.meta_path.insert(0, _Finder)
