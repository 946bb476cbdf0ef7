"""Marlin's experts with the decode kernels, with the contract in place of the kernels."""

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import configured, error_of, forget, load, logged


def emulate_marlin() -> None:
    """Put stand-ins in place of Marlin's operators."""
    import torch
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe

    from tests.patches.probes import marlin_layout

    ops.gptq_marlin_repack = marlin_layout.repack
    ops.moe_wna16_marlin_gemm = marlin_layout.MoeGemm()
    ops.moe_sum = lambda parts, out, *_: out.copy_(parts.sum(1))
    marlin_moe.moe_align_block_size = marlin_layout.align
    marlin_moe.get_marlin_workspace = lambda device: torch.zeros(4)
    marlin_moe._fused_marlin_moe = _without_workspaces(marlin_moe._fused_marlin_moe)


def experts_layer(hidden: int, inner: int, experts: int, **moe: Any) -> tuple[Any, Any, Any]:
    """Return the experts as the layer makes them, the layer, and the checkpoint."""
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm_sparkforge.quant import few_rows

    from tests.patches.probes.probe_marlin_padding import _checkpoint, _moe_config, _swiglu

    size = {"hidden": hidden, "intermediate": inner, "experts": experts}
    size |= {"top_k": 4, "tokens": 17, "ranks": 1, "seed": 5}
    data = _checkpoint(size)
    config = _moe_config(size)
    for name, value in moe.items():
        setattr(config, name, value)
    layer, quant = converted("MARLIN", data)
    marlin = few_rows(marlin_moe.MarlinExperts)(config, quant)
    marlin.activation = lambda _, output, both, **__: output.copy_(_swiglu(both))
    return marlin, layer, data


def converted(backend_name: str, data: dict[str, Any], **limits: float) -> tuple[Any, Any]:
    """Return a layer with a checkpoint's weights in a backend's format, and their scales."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

    layer, backend = torch.nn.Module(), oracle.Mxfp4MoeBackend[backend_name]
    layer.params_dtype = torch.bfloat16
    tensors = oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
        backend,
        layer,
        *(data[f"{name}_weight"] for name in ("w13", "w2")),
        *(data[f"{name}_weight_scale"] for name in ("w13", "w2")),
        w13_bias=data["w13_bias"],
        w2_bias=data["w2_bias"],
    )
    names = ("w13_weight", "w2_weight", "w13_scale", "w2_scale", "w13_bias", "w2_bias")
    for name, tensor in zip(names, tensors, strict=True):
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    scales = {"w1_scale": layer.w13_scale, "w2_scale": layer.w2_scale}
    biases = {"w1_bias": layer.w13_bias, "w2_bias": layer.w2_bias}
    return layer, oracle.make_mxfp4_moe_quant_config(
        mxfp4_backend=backend, swiglu_limit=7.0, **scales, **biases, **limits
    )


def apply(experts: Any, layer: Any, data: dict[str, Any], rows: int, **others: Any) -> Any:
    """Compute some rows; ``others`` are other arguments than the usual ones."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    out = torch.full((rows, data["x"].shape[1]), torch.nan, dtype=torch.bfloat16)
    arguments = {
        "hidden_states": data["x"][:rows],
        "topk_weights": data["topk_weights"][:rows],
        "topk_ids": data["topk_ids"][:rows],
        "a1q_scale": None,
    } | others
    experts.apply(
        output=out,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        activation=MoEActivation.SWIGLUOAI,
        global_num_experts=data["w13_weight"].shape[0],
        expert_map=None,
        a2_scale=None,
        workspace13=torch.empty(0),
        workspace2=torch.empty(0),
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
        **arguments,
    )
    return out


def experts(launches: Any) -> dict[str, Any]:
    """Few rows and more, against the checkpoint in float64."""
    import torch

    from tests.patches.probes.probe_marlin_padding import _reference

    result: dict[str, Any] = {}
    with configured("auto"):
        marlin, layer, data = experts_layer(192, 128, 6)
        load(marlin, layer)
        wanted = _reference(data)
        for rows in (0, 1, 2, 3, 8, 9, 16, 17):
            launches.names.clear()
            out = apply(marlin, layer, data, rows)
            error = error_of(out, wanted[:rows]) if rows else 0.0
            result[str(rows)] = {"error": error, "launches": list(launches.names)}
        ids = data["topk_ids"][:3].clone()
        ids[1] = -1
        out = apply(marlin, layer, data, 3, topk_ids=ids.to(torch.int64))
        result["padding"] = {
            "zeros": not out[1].any(),
            "error": error_of(out[::2], wanted[:3:2]),
        }
        result["left to Marlin"] = _left_to_marlin(marlin, launches)
        launches.names.clear()
        marlin._lora_context = None
        marlin.uses_decode_kernels = False
        apply(marlin, layer, data, 1)
        result["switched off"] = list(launches.names)

    refused = {
        "LoRA": {"is_lora_enabled": True},
        "float16": {"in_dtype": torch.float16},
        "three experts a row": {"experts_per_token": 3},
        "no bias": {"has_bias": False},
    }
    for name, moe in refused.items():
        forget()
        with configured("auto"), logged() as lines:
            marlin, layer, data = experts_layer(192, 128, 6, **moe)
            load(marlin, layer)
            result[name] = [marlin.uses_decode_kernels, *lines]
    with configured("auto"), logged() as lines:
        marlin, layer, data = experts_layer(192, 128, 6)
        marlin.w2_scale.view(torch.uint8)[3, 1, 5] = 191
        load(marlin, layer)
        result["a scale of 191"] = [marlin.uses_decode_kernels, *lines]
    with configured("off"), logged() as lines:
        load(marlin, layer)
        result["off"] = [marlin.uses_decode_kernels, *lines]
    return result


def _left_to_marlin(marlin: Any, launches: Any) -> dict[str, bool]:
    """Whether two rows reach Marlin as they came, by what is asked for beside the experts."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

    signature = inspect.signature(MarlinExperts.apply)
    usual = dict.fromkeys(list(signature.parameters)[1:])
    usual |= {"hidden_states": torch.zeros(2, 192), "apply_router_weight_on_input": False}
    cases = {
        "an expert map": ({"expert_map": torch.zeros(6)}, None, False),
        "router weights on the input": ({"apply_router_weight_on_input": True}, None, False),
        "LoRA": ({}, "a context", False),
        "a hook": ({}, None, True),
    }
    result = {}
    for name, (change, lora, hook) in cases.items():
        given = usual | change
        launches.names.clear()
        with (
            mock.patch.object(MarlinExperts, "apply") as apply,
            mock.patch.object(marlin, "_lora_context", new=lora, create=True),
            mock.patch.object(
                marlin, "_uses_post_gemm2_hook", new=lambda rows, hook=hook: hook, create=True
            ),
        ):
            marlin.apply(**given)
        (call,) = apply.call_args_list
        reached = signature.bind(marlin, *call.args, **call.kwargs).arguments
        same = all(reached[parameter] is value for parameter, value in given.items())
        result[name] = same and not launches.names
    return result


def _without_workspaces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``fused_marlin_moe`` make its own, as it does where it is given none."""

    def call(**options: Any) -> Any:
        return function(**options | {"intermediate_cache13": None, "intermediate_cache2": None})

    return call
