"""Runs inside the interpreter under test: gpt-oss experts made ready for Marlin, and computed.

usage: python -m tests.patches.probes.probe_marlin_padding IN.json OUT.json

IN holds "sizes", a list of [hidden, intermediate] to round up, and "layers", a list of
{hidden, intermediate, experts, top_k, tokens, ranks, seed}; "experts", a list of [backend, hidden,
intermediate], to round up, too. OUT holds, in the same order, the
rounded sizes, and of each layer the rounded sizes, the relative error of its output against the
unpadded checkpoint in float64, and the GEMMs that were asked for.

Real are vLLM's selection, rounding, parameters, loading, weight preparation and fused_marlin_moe;
the device (fake_cuda.py), the CUDA operators (marlin_layout.py) and the cutting into ranks are not.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from tests.patches.probes import fake_cuda
from tests.patches.probes.moe_layers import moe_config

Layer = dict[str, Any]


def _checkpoint(size: Layer) -> dict[str, Any]:
    """Return random experts in the checkpoint's layout, gate and up interleaved."""
    import torch

    generator = torch.Generator().manual_seed(size["seed"])
    hidden, inner, experts = size["hidden"], size["intermediate"], size["experts"]

    def numbers(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "w13_weight": numbers(experts, 2 * inner, hidden // 2),
        "w13_weight_scale": numbers(experts, 2 * inner, hidden // 32, low=118, high=124),
        "w13_bias": real(experts, 2 * inner),
        "w2_weight": numbers(experts, hidden, inner // 2),
        "w2_weight_scale": numbers(experts, hidden, inner // 32, low=118, high=124),
        "w2_bias": real(experts, hidden),
        "x": real(size["tokens"], hidden),
        "topk_ids": torch.stack(
            [
                torch.randperm(experts, generator=generator)[: size["top_k"]]
                for _ in range(size["tokens"])
            ]
        ).to(torch.int32),
        "topk_weights": torch.rand(size["tokens"], size["top_k"], generator=generator),
    }


def _swiglu(both: Any) -> Any:
    """The activation of interleaved gate and up, in float64."""
    from tests.patches.probes.marlin_layout import swiglu

    return swiglu(both[..., ::2].double(), both[..., 1::2].double())


def _reference(data: dict[str, Any]) -> Any:
    import torch

    from tests.patches.probes.marlin_layout import dense

    out = torch.zeros(data["x"].shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(
        zip(data["topk_ids"].tolist(), data["topk_weights"].to(torch.float64), strict=True)
    ):
        x = data["x"][token].to(torch.float64)
        for expert, share in zip(ids, weights, strict=True):
            w13 = dense(data["w13_weight"][expert], data["w13_weight_scale"][expert])
            w2 = dense(data["w2_weight"][expert], data["w2_weight_scale"][expert])
            inner = _swiglu(w13 @ x + data["w13_bias"][expert].to(torch.float64))
            out[token] += share * (w2 @ inner + data["w2_bias"][expert].to(torch.float64))
    return out


def _shard(data: dict[str, Any], size: Layer, rank: int) -> dict[str, Any]:
    """Cut as gpt-oss's loader does: the intermediate size in whole blocks of 32."""
    import torch

    blocks = size["intermediate"] // 32
    each = -(-blocks // size["ranks"]) * 32
    start, end = rank * each, min((rank + 1) * each, size["intermediate"])
    start = min(start, end)
    return {
        "w13_weight": data["w13_weight"][:, 2 * start : 2 * end],
        "w13_weight_scale": data["w13_weight_scale"][:, 2 * start : 2 * end],
        "w13_bias": data["w13_bias"][:, 2 * start : 2 * end],
        "w2_weight": data["w2_weight"][..., start // 2 : end // 2],
        "w2_weight_scale": data["w2_weight_scale"][..., start // 32 : end // 32],
        "w2_bias": data["w2_bias"] if rank == 0 else torch.zeros_like(data["w2_bias"]),
    }


def _moe_config(size: Layer) -> Any:
    inner, top_k = size["intermediate"] // size["ranks"], size["top_k"]
    more = {"experts_per_token": top_k, "moe_backend": "marlin"}
    return moe_config(size["experts"], size["hidden"], inner, **more)


def _method(config: Any) -> Any:
    """Return the method of gpt-oss's experts: the plugin's where it is installed."""
    if importlib.util.find_spec("vllm_sparkforge"):
        from vllm_sparkforge.quant import MoEMethod

        return MoEMethod(config)
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    return GptOssMxfp4MoEMethod(config)


def _padded(method: Any, hidden: int, inner: int) -> list[int]:
    import torch

    sizes: tuple[int, int] = method.maybe_roundup_sizes(
        hidden_size=hidden,
        intermediate_size_per_partition=inner,
        act_dtype=torch.bfloat16,
        moe_parallel_config=method.moe.moe_parallel_config,
    )
    return list(sizes)


def _rank(data: dict[str, Any], size: Layer, rank: int, gemm: Any) -> tuple[Any, list[int]]:
    """Return what one rank adds to the output, in float64, and its rounded sizes."""
    import torch
    import torch.nn.functional as F
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.scalar_type import scalar_types

    method = _method(_moe_config(size))
    hidden, inner = _padded(method, size["hidden"], size["intermediate"] // size["ranks"])
    layer = torch.nn.Module()
    method.create_weights(layer, size["experts"], hidden, inner, torch.bfloat16)
    loader = types.SimpleNamespace(
        quant_config=types.SimpleNamespace(get_name=lambda: "gpt_oss_mxfp4")
    )
    for name, part in _shard(data, size, rank).items():
        RoutedExperts.weight_loader(loader, getattr(layer, name), part, name, None, None)
    w13, w2, w13_scale, w2_scale, w13_bias, w2_bias = (
        oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
            method.mxfp4_backend,
            layer,
            *(getattr(layer, f"{name}_weight") for name in ("w13", "w2")),
            *(getattr(layer, f"{name}_weight_scale") for name in ("w13", "w2")),
            w13_bias=layer.w13_bias,
            w2_bias=layer.w2_bias,
        )
    )

    def activate(_: Any, output: Any, both: Any, **__: Any) -> None:
        output.copy_(_swiglu(both))

    def total(parts: Any, output: Any, *_: Any) -> Any:
        return parts.to(torch.float64).sum(1)

    # As moe_runner.py does before the layer and after it.
    x = F.pad(data["x"], (0, hidden - size["hidden"]))
    out = fused_marlin_moe(
        x,
        w13,
        w2,
        w13_bias,
        w2_bias,
        w13_scale,
        w2_scale,
        data["topk_weights"],
        data["topk_ids"],
        scalar_types.float4_e2m1f.id,
        activation_func=activate,
        moe_sum=total,
        workspace=torch.zeros(4),
    )
    return out[:, : size["hidden"]], [hidden, inner]


def _layer(size: Layer) -> dict[str, Any]:
    import torch
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe

    from tests.patches.probes import marlin_layout

    gemm = marlin_layout.MoeGemm()
    ops.gptq_marlin_repack = marlin_layout.repack
    ops.moe_wna16_marlin_gemm = gemm
    marlin_moe.moe_align_block_size = marlin_layout.align

    data = _checkpoint(size)
    out = torch.zeros(data["x"].shape, dtype=torch.float64)
    rounded: list[int] = []
    for rank in range(size["ranks"]):
        part, rounded = _rank(data, size, rank, gemm)
        out += part
    wanted = _reference(data)
    error = float((out - wanted).norm() / wanted.norm())
    return {"rounded": rounded, "error": error, "calls": gemm.calls}


def main() -> None:
    """Read the questions, write the answers."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"}
    fake_cuda.add_packages()
    fake_cuda.install(fake_cuda.Capability(12, 1))
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    config = VllmConfig()
    config.model_config = types.SimpleNamespace(
        quantization_config=None, is_diffusion=False, get_num_layers=lambda _: 36
    )
    with set_current_vllm_config(config):
        method = _method(_moe_config(asked["layers"][0]))

        def padded(name: str, hidden: int, inner: int) -> list[int]:
            method.mxfp4_backend = Mxfp4MoeBackend[name]
            return _padded(method, hidden, inner)

        answers = {
            "sizes": [
                {name: padded(name, *size) for name in ("MARLIN", "BATCHED_MARLIN")}
                for size in asked["sizes"]
            ],
            "layers": [_layer(size) for size in asked["layers"]],
            "experts": [padded(name, *size) for name, *size in asked["experts"]],
        }
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
