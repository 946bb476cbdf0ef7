"""Runs inside the interpreter under test: routing of benchmarks/decode.py, without a GPU.

usage: python -m tests.patches.probes.probe_benchmarks OUT.json
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

from tests.patches.probes import fake_cuda


def _routing() -> dict[str, Any]:
    """Ids that reach Marlin's experts and the decode kernels', with each kind of router."""
    import torch
    from routing import Routing
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.v1.worker import gpu_worker
    from vllm_sparkforge.decode import experts

    seen: list[Any] = []
    kind, worker = marlin_moe.MarlinExperts, gpu_worker.Worker
    real = kind.apply, experts.products, worker.determine_available_memory
    layers = [torch.zeros(1) for _ in range(3)]
    router = torch.tensor([[0, 1, 2, 3]] * 8, dtype=torch.int32)
    router[7] = -1  # a row that only pads
    result: dict[str, Any] = {}
    for name in ("model", "uniform"):
        # what the real ones are called with, and no more
        kind.apply = lambda self, output, w1, topk_ids: seen.append(topk_ids)
        experts.products = lambda x, weights, ids, shares: seen.append(ids)
        worker.determine_available_memory = lambda self: 5
        routing = Routing(128, uniform=name == "uniform")
        routing.install()
        early = router.clone()
        experts.products(None, types.SimpleNamespace(w13=layers[0]), early, None)
        assert seen.pop() is early
        assert routing.distinct(8) is None
        assert worker.determine_available_memory(None) == 5
        found = []
        for layer in layers:
            experts.products(None, types.SimpleNamespace(w13=layer), router, None)
            kind.apply(None, output=None, w1=layer, topk_ids=router[:5])
            found.append([ids.tolist() for ids in seen])
            seen.clear()
        result[name] = {
            "ids": found,
            "distinct": [routing.distinct(rows) for rows in (8, 5, 4)],
        }
    kind.apply, experts.products, worker.determine_available_memory = real
    # the names that it asks for
    Routing(128, uniform=True).install()
    kind.apply, experts.products, worker.determine_available_memory = real
    names = [list(inspect.signature(one).parameters) for one in real]
    result["names"] = [
        "w1" in names[0],
        "topk_ids" in names[0],
        "weights" in names[1] and "w13" in experts.Weights._fields,
        "ids" in names[1],
    ]
    return result


def main() -> None:
    """Write the ids."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
    fake_cuda.add_packages()
    fake_cuda.install(fake_cuda.Capability(9, 0))
    import torch

    torch.manual_seed(3)
    with torch.inference_mode():
        Path(sys.argv[1]).write_text(json.dumps(_routing()), encoding="utf-8")


if __name__ == "__main__":
    main()
