"""Loads two of FlashInfer's modules, and writes what comes of it.

usage: python -m tests.patches.probes.probe_pack_loads OUT.json

The FlashInfer and the pack are those first on the path; made up are pynvml and CUDA's version.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path


def main(out: Path) -> None:
    """Write ``loaded``, or the name of the error, by module."""
    sys.modules["pynvml"] = types.ModuleType("pynvml")
    import torch

    vars(torch.version)["cuda"] = "13.0"
    import flashinfer.jit.cpp_ext as flags
    from packaging.version import Version

    vars(flags)["get_cuda_version"] = lambda: Version("13.0")
    from flashinfer.jit.sampling import gen_sampling_module
    from flashinfer.jit.xqa import gen_xqa_module

    bf16, found = torch.bfloat16, {}
    for spec, function in (
        (gen_xqa_module(bf16, bf16, 16, 64, 8, True, bf16), "xqa_wrapper"),
        (gen_sampling_module(), "softmax"),
    ):
        try:
            module = spec.build_and_load()
            assert callable(getattr(module, function)), module
            found[spec.name] = "loaded"
        except RuntimeError as error:
            found[spec.name] = type(error).__name__
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
