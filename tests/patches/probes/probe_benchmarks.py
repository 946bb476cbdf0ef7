"""Runs inside the interpreter under test: the kernel benchmarks' way into vLLM, without a GPU.

usage: python -m tests.patches.probes.probe_benchmarks OUT.json

The benchmarks' own code calls vLLM's real weight preparation and its real functions; the device
(fake_cuda.py) and the CUDA operators (marlin_layout.py) are stand-ins. MXFP8's operators only look
at shapes. OUT holds the distances from the benchmarks' references.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

from tests.patches.probes import fake_cuda


def _moe() -> dict[str, float]:
    import h200_marlin_moe as bench
    import torch
    import vllm._custom_ops as ops
    from gpu_common import distance
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe

    from tests.patches.probes import marlin_layout

    def activate(_: Any, output: torch.Tensor, both: torch.Tensor, **__: Any) -> None:
        output.copy_(bench.swigluoai(both.float()))

    ops.gptq_marlin_repack = marlin_layout.repack
    ops.moe_wna16_marlin_gemm = marlin_layout.MoeGemm()
    ops.moe_sum = lambda parts, output: output.copy_(parts.float().sum(1))
    marlin_moe.moe_align_block_size = marlin_layout.align
    marlin_moe.apply_moe_activation = activate

    shape = bench.Shape(hidden=96, inner=64, experts=8)
    experts = bench.Experts.random(shape, "cpu")
    ids = bench.routes(shape, 5, "cpu")[0]
    x = torch.randn(5, shape.hidden).to(torch.bfloat16)
    shares = torch.softmax(torch.randn(5, shape.top_k), -1)
    exact = bench.reference(experts, x, ids, shares)
    distances = {}
    for hidden, inner in ((256, 128), (128, 64)):
        layer = bench.marlin(experts.padded(hidden, inner))
        padded = torch.nn.functional.pad(x, (0, hidden - shape.hidden))
        distances[f"moe {hidden}x{inner}"] = distance(
            layer(padded, ids, shares)[:, : shape.hidden], exact
        )
    return distances


def _dense() -> dict[str, float]:
    import h200_dense as bench
    import torch
    import vllm._custom_ops as ops
    from gpu_common import distance, expand, quantise
    from vllm.model_executor.layers.quantization.utils import marlin_utils  # registers its operator

    from tests.patches.probes import marlin_layout

    def repack(
        b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
    ) -> torch.Tensor:
        if num_bits == 4:
            return marlin_layout.repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit)
        assert b_q_weight.shape == (size_k // 4, size_n)
        return torch.zeros(size_k // 16, size_n * 4, dtype=torch.int32)

    def gemm(a: torch.Tensor, b_q_weight: torch.Tensor, b_scales: torch.Tensor, **rest: Any) -> Any:
        size = (rest["size_m"], rest["size_n"], rest["size_k"])
        assert a.shape == (size[0], size[2])
        assert b_scales.shape == (size[2] // 32, size[1])
        assert b_scales.dtype == torch.float8_e8m0fnu
        assert rest["workspace"].dtype == torch.int32
        if b_q_weight.shape[1] == size[1] * 4:
            return torch.full(size[:2], 1.0, dtype=a.dtype)
        out = a.double() @ marlin_layout.weight(b_q_weight, b_scales)
        if rest["b_bias"] is not None:
            out = out + marlin_layout.bias(rest["b_bias"])
        return out.to(a.dtype)

    assert marlin_utils
    ops.gptq_marlin_repack = repack
    torch.ops.vllm.marlin_gemm = gemm
    torch.set_default_dtype(torch.bfloat16)
    x = torch.randn(3, 192)
    weight, bias = bench.heavy_tailed(256, 192, "cpu"), torch.randn(256)
    distances = {}
    for fmt in bench.FORMATS:
        codes, scales = quantise(fmt, weight)
        exact = x.float() @ expand(fmt, codes, scales).T + bias.float()
        layers, size = bench.marlin(fmt, codes, scales, bias)
        assert size == codes.numel() + scales.numel() + 2 * bias.numel()
        out = layers[0](x)
        assert out.shape == (3, 256)
        distances[f"dense {fmt}"] = distance(out, exact)
    return distances


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
    """Run all, write the distances."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
    fake_cuda.add_packages()
    fake_cuda.install(fake_cuda.Capability(9, 0))
    import torch

    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=132)
    torch.manual_seed(3)
    with torch.inference_mode():
        distances = {**_moe(), **_dense(), "routing": _routing()}
    Path(sys.argv[1]).write_text(json.dumps(distances), encoding="utf-8")


if __name__ == "__main__":
    main()
