"""Runs in the patched interpreter, with fastsafetensors on its path: vLLM's loader through it.

usage: python -m tests.patches.probes.probe_fastsafetensors STEP[,STEP...] REQUEST.json OUT_FOLDER

vLLM asks fastsafetensors for a CUDA device. Here the word "cuda:0" is exchanged for "cpu" on the
way; the rest is the real loader, with the file reader that fastsafetensors takes without GDS.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.patches.probes import probe_logits as base


@contextmanager
def on_the_cpu() -> Iterator[list[dict[str, Any]]]:
    """Exchange the device; gives what vLLM asked each loader for."""
    import fastsafetensors.parallel_loader as module
    from vllm.platforms import current_platform

    asked: list[dict[str, Any]] = []
    real = module.ParallelLoader

    class OnTheCpu(real):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            shown = {key: str(options[key]) for key in ("device", "nogds", "queue_size")}
            super().__init__(**{**options, "device": "cpu"})
            asked.append({**shown, "copier": self.loader.copier_class.__name__})

    kind: Any = type(current_platform)  # a CPU has no number
    first = classmethod(lambda cls: 0)
    with (
        mock.patch.object(module, "ParallelLoader", OnTheCpu),
        mock.patch.object(kind, "current_device", first, create=True),
    ):
        yield asked


def logits(request: dict[str, Any], out: Path) -> Any:
    """Whether a model with MXFP4 experts and quantised layers is the same through both loaders; and
    by a device's name, whether fastsafetensors takes its reader for unified memory."""
    sys.path.insert(0, request["packages"])
    import numpy as np
    from fastsafetensors.copier.unified import UnifiedMemCopier, is_unified_memory_system

    given = []
    for load_format in ("auto", "fastsafetensors"):
        with on_the_cpu() as asked:
            engine = base.make_engine(
                request["checkpoint"], mxfp4_layers=request["layers"], load_format=load_format
            )
        given.append(base.raw_logits(engine, request["prompt"], 3))
        del engine
        base.drop_engine()
    (first, words), (second, others) = given
    return {
        "asked": asked,
        "same": bool(np.array_equal(first, second)) and words == others,
        "spread": float(first.std()),
        "unified": {
            name: is_unified_memory_system(
                types.SimpleNamespace(get_device_name=lambda _, name=name: name)
            )
            for name in request["devices"]
        },
        "pinned": UnifiedMemCopier.fixed_device_overhead([request["checkpoint"]]),
    }


if __name__ == "__main__":
    base.main(globals())
