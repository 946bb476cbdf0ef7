"""Runs inside the interpreter under test: MXFP8 experts on their way into FlashInfer.

usage: python -m tests.patches.probes.probe_mxfp8_moe OUT.json

Real are vLLM's selection, parameters, weight preparation and modular kernel; the device
(fake_cuda.py), the quantiser of activations and FlashInfer's function are not: those two are
written from the definition (mxfp8_moe_reference.py).
"""

import importlib.metadata
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.patches.probes import fake_cuda
from tests.patches.probes.moe_layers import moe_config

CASES: dict[str, dict[str, Any]] = {
    "whole tiles": {"hidden": 256, "inter": 128},
    "padded, limited": {"hidden": 128, "inter": 160, "limit": 2.0},
    "SwiGLU-OAI": {"hidden": 128, "inter": 128, "limit": 7.0, "alpha": 1.702, "beta": 1.0},
    "weights on the input": {"hidden": 128, "inter": 128, "top_k": 1, "on_input": True},
    "many tokens": {"hidden": 128, "inter": 128, "tokens": 140},
}
"""Layers by name; what is not said is as in `_case`."""


def _case(more: dict[str, Any]) -> dict[str, Any]:
    plain = {"experts": 3, "top_k": 2, "tokens": 5, "limit": None, "alpha": None, "beta": None}
    return {**plain, "on_input": False, **more}


def _config(case: dict[str, Any], **more: Any) -> Any:
    """Return the layer in the engine's words."""
    given = {
        "experts_per_token": case["top_k"],
        "has_bias": False,
        "moe_backend": "flashinfer_cutlass",
        **{f"swiglu_{name}": case[name] for name in ("limit", "alpha", "beta")},
    }
    kind = "SWIGLUOAI_UNINTERLEAVE" if case["alpha"] else "SILU"
    return moe_config(case["experts"], case["hidden"], case["inter"], kind, **given | more)


def _checkpoint(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tests.patches.probes import mxfp8_moe_reference as reference

    generator = torch.Generator().manual_seed(11)

    def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (case["experts"] * rows, columns)
        # Rows and blocks of different magnitude, so that no two scales may change places.
        size_of_block = torch.randint(-4, 4, (size[0], columns // 32), generator=generator)
        factors = torch.exp2(size_of_block.double()).repeat_interleave(32, 1)
        values = torch.randn(size, generator=generator, dtype=torch.float64) * factors / columns
        values, scales = reference.quantise(values)
        return (
            values.reshape(case["experts"], rows, columns),
            scales.reshape(case["experts"], rows, columns // 32),
        )

    w13, w13_scale = weights(2 * case["inter"], case["hidden"])
    w2, w2_scale = weights(case["hidden"], case["inter"])
    tokens = range(case["tokens"])
    order = [torch.randperm(case["experts"], generator=generator) for _ in tokens]
    return {
        "w13": w13,
        "w13_scale": w13_scale,
        "w2": w2,
        "w2_scale": w2_scale,
        "x": (4 * torch.randn(case["tokens"], case["hidden"], generator=generator)).bfloat16(),
        "ids": torch.stack([row[: case["top_k"]] for row in order]).to(torch.int32),
        "shares": torch.rand(case["tokens"], case["top_k"], generator=generator),
    }


def _layer(case: dict[str, Any], data: dict[str, Any]) -> tuple[Any, Any]:
    """Return method and layer after loading and preparation, by vLLM's own code."""
    import torch
    from vllm.model_executor.layers.quantization.modelopt import (
        ModelOptMxFp8Config,
        ModelOptMxFp8FusedMoE,
    )

    config = _config(case)
    method = ModelOptMxFp8FusedMoE(ModelOptMxFp8Config(True, None, []), config)
    layer = torch.nn.Module()
    for name, value in {
        "intermediate_size_per_partition": case["inter"],
        "hidden_size": case["hidden"],
        "moe_config": config,
        "activation": config.activation,
        "expert_map": None,
        "global_num_experts": case["experts"],
        "_expert_routing_tables": lambda: None,
        "apply_router_weight_on_input": case["on_input"],
    }.items():
        setattr(layer, name, value)
    method.create_weights(
        layer,
        case["experts"],
        case["hidden"],
        case["inter"],
        torch.bfloat16,
        weight_loader=lambda *_: None,
    )
    for name in ("w13", "w2"):
        getattr(layer, f"{name}_weight").data.copy_(data[name])
        getattr(layer, f"{name}_weight_scale").data.copy_(data[f"{name}_scale"])
    method.process_weights_after_loading(layer)
    return method, layer


def _stand_ins() -> None:
    """Put the quantiser and FlashInfer's function in place, and a group of one rank."""
    import torch
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.fused_moe import utils
    from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe

    from tests.patches.probes import mxfp8_moe_reference as reference

    def quantiser(
        x: torch.Tensor, is_sf_swizzled_layout: bool = False, alignment: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = reference.quantise(x)
        return values, reference.swizzle(scales) if is_sf_swizzled_layout else scales

    parameter.get_tensor_model_parallel_rank = lambda: 0
    parameter.get_tensor_model_parallel_world_size = lambda: 1
    utils.mxfp8_e4m3_quantize = quantiser
    flashinfer_cutlass_moe.flashinfer_cutlass_fused_moe = reference.cutlass_fused_moe
    flashinfer_cutlass_moe.activation_to_flashinfer_type = lambda _: reference.SWIGLU


def _compute(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tests.patches.probes import mxfp8_moe_reference as reference

    data = _checkpoint(case)
    method, layer = _layer(case, data)
    wanted_of: dict[str, torch.Tensor] = dict(data)
    if case["on_input"]:
        wanted_of["x"] = data["x"] * data["shares"].to(torch.bfloat16)
        wanted_of["shares"] = torch.ones_like(data["shares"])
    inf = float("inf")
    wanted = reference.experts(
        wanted_of, case["alpha"] or 1.0, case["beta"] or 0.0, case["limit"] or inf
    )
    out = method.apply(layer, data["x"].clone(), data["shares"], data["ids"], None, None)
    error = float((out.double() - wanted).norm() / wanted.norm())
    return {"error": error, "inter": method.moe.intermediate_size_per_partition}


PACKED = "0.7.0.post1+spark.1"
"""Version of the installed FlashInfer, and of a pack of the same sources."""


def _prebuilt(version: str, modules: tuple[str, ...]) -> None:
    """Have FlashInfer load these modules from a cache of this version."""
    artifact = types.SimpleNamespace(provider_id="cache")
    env: Any = types.ModuleType("flashinfer.jit.env")
    env.get_aot_artifacts = lambda name: (artifact,) if name in modules else ()
    env.FLASHINFER_AOT_PROVIDERS = (types.SimpleNamespace(provider_id="cache", version=version),)
    sys.modules["flashinfer.jit.env"] = env


def _reasons() -> dict[str, str | None]:
    """Why MXFP8 experts are refused, by what is missing."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.oracle import mxfp8 as oracle
    from vllm.utils import flashinfer as ours

    fused_moe = sys.modules["flashinfer.fused_moe"]

    def ask(**more: Any) -> str | None:
        for function in vars(ours).values():
            if callable(getattr(function, "cache_clear", None)):
                function.cache_clear()
        config = _config(_case({"hidden": 256, "inter": 128}), **more)
        try:
            backend, _ = oracle.select_mxfp8_moe_backend(config)
        except ValueError as error:
            return str(error).partition("FLASHINFER_CUTLASS: ")[2]
        return None if config.moe_backend == "flashinfer_cutlass" else str(backend.value)

    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.dp_size = 2
    in_parts = {"use_ep": True, "ep_size": 2, "num_experts": 4, "num_local_experts": 2}
    reasons = {
        "nothing": ask(),
        "automatically": ask(moe_backend="auto"),
        "hidden size": ask(hidden_dim=2880),
        "biases": ask(has_bias=True),
        "activation": ask(activation=MoEActivation.SWIGLUOAI),
        "data parallelism": ask(moe_parallel_config=parallel),
        "nothing, equal parts": ask(**in_parts),
        "equal parts": ask(**{**in_parts, "num_experts": 5}),
    }

    def without(holder: Any, name: str, value: Any, then: Callable[[], str | None]) -> str | None:
        with mock.patch.object(holder, name, value):
            return then()

    reasons["linear placement"] = without(
        get_current_vllm_config().parallel_config,
        "expert_placement_strategy",
        "round_robin",
        lambda: ask(**in_parts),
    )
    reasons["JIT"] = without(os, "environ", {**os.environ, "FLASHINFER_DISABLE_JIT": "1"}, ask)
    nothing_found = types.SimpleNamespace(which=lambda _: None)
    reasons["compiler"] = without(ours, "shutil", nothing_found, ask)
    # nvcc is on the PATH, and FlashInfer does not look there: CUDA_HOME names another place
    there = {"nvcc": "/usr/bin/nvcc", "/usr/bin/nvcc": "/usr/bin/nvcc"}
    on_path = types.SimpleNamespace(which=there.get)
    elsewhere = {**os.environ, "CUDA_HOME": "/no/such/cuda"}
    reasons["CUDA_HOME"] = without(
        ours, "shutil", on_path, lambda: without(os, "environ", elsewhere, ask)
    )
    find_spec = ours.importlib.util.find_spec
    both = ("fused_moe_120", "mxfp8_quantization_sm100")
    caches: dict[str, tuple[str, tuple[str, ...]]] = {
        "prebuilt modules": ("0.7.0.post1+cu130", both),
        "nothing, a pack": (PACKED, both),
    }
    for name, (version, modules) in caches.items():
        _prebuilt(version, modules)

        def installed(name: str) -> Any:
            return name == "flashinfer_jit_cache" or find_spec(name)

        reasons[name] = without(ours.importlib.util, "find_spec", installed, ask)
    released = types.SimpleNamespace(supported=lambda arch: arch in (100, 103, 107))
    reasons["kernels"] = without(fused_moe, "CutlassMxfp8Config", released, ask)
    reasons["class"] = without(fused_moe, "CutlassMxfp8Config", None, ask)
    return reasons


def main() -> None:
    """Compute all cases and ask for all reasons."""
    # As vLLM's requirements install it; without, no compiler means no FlashInfer.
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    fake_cuda.add_packages()
    fake_cuda.install(fake_cuda.Capability(12, 1))
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.utils import flashinfer as ours
    from vllm.v1.worker.workspace import init_workspace_manager

    fused_moe: Any = sys.modules["flashinfer.fused_moe"]
    fused_moe.CutlassMxfp8Config = types.SimpleNamespace(supported=lambda arch: arch in (120, 121))
    ours.shutil = types.SimpleNamespace(which=lambda program: program)
    versions = importlib.metadata.version
    ours.importlib.metadata.version = lambda name: (
        PACKED if name == "flashinfer-python" else versions(name)
    )
    init_workspace_manager(torch.device("cpu"))
    torch.accelerator.empty_cache = lambda: None  # asked for by the manager; there is none
    _stand_ins()
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        answers = {name: _compute(_case(more)) for name, more in CASES.items()}
        reasons = _reasons()
    Path(sys.argv[1]).write_text(json.dumps({"cases": answers, "reasons": reasons}), "utf-8")


if __name__ == "__main__":
    main()
