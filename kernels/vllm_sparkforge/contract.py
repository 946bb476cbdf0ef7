# SPDX-License-Identifier: Apache-2.0
"""What each part uses of vLLM, compared with the vLLM that is installed.

A subclass breaks without a word where upstream renames. So a part whose parameters or attributes
are not those it was written for is off, and one line says so.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import cache

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

_MODELS = "vllm.model_executor.models.gpt_oss"
_LAYERS = "vllm.model_executor.layers"
_RUNNERS = "vllm.v1.worker"
_APPLY = (
    *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
    *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
    *("expert_tokens_meta", "apply_router_weight_on_input"),
)
_CREATE = (
    *("self", "layer", "input_size_per_partition", "output_partition_sizes", "input_size"),
    *("output_size", "params_dtype", "extra_weight_attrs"),
)

USED: Mapping[str, Mapping[str, tuple[str, ...] | None]] = {
    "": {
        f"{_LAYERS}.quantization.register_quantization_config": ("quantization",),
        f"{_LAYERS}.quantization.mxfp4.GptOssMxfp4Config._make_moe_method": ("self", "moe"),
        f"{_LAYERS}.quantization.mxfp4.GptOssMxfp4Config.get_quant_method": (
            *("self", "layer", "prefix"),
        ),
        f"{_LAYERS}.quantization.mxfp4.GptOssMxfp4MoEMethod.__init__": ("self", "moe"),
        f"{_MODELS}.GptOssForCausalLM.__init__": ("self", "vllm_config", "prefix"),
        "vllm.config.VllmConfig.compute_hash": None,
    },
    "experts": {
        f"{_LAYERS}.fused_moe.experts.marlin_moe.MarlinExperts.apply": _APPLY,
        f"{_LAYERS}.fused_moe.experts.flashinfer_cutlass_moe.FlashInferExperts.apply": _APPLY,
        f"{_LAYERS}.fused_moe.experts.marlin_moe.MarlinExperts.process_weights_after_loading": (
            *("self", "layer"),
        ),
    },
    "layers": {
        f"{_LAYERS}.linear.LinearMethodBase.create_weights": _CREATE,
        "vllm.model_executor.model_loader.reload.layerwise.initialize_online_processing": (
            "layer",
        ),
    },
    "bf16": {
        f"{_LAYERS}.linear.UnquantizedLinearMethod.apply": ("self", "layer", "x", "bias"),
        f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod.apply": (
            *("self", "layer", "x", "bias"),
        ),
    },
    "norms": {
        f"{_MODELS}.TransformerBlock.forward": (
            *("self", "hidden_states", "positions", "residual"),
        ),
        f"{_MODELS}.GptOssModel._maybe_add_hidden_state": (
            *("self", "aux_hidden_states", "layer_idx", "hidden_states", "residual"),
        ),
        f"{_LAYERS}.fused_moe.runner.moe_runner.get_layer_from_name": ("layer_name",),
        f"{_LAYERS}.fused_moe.runner.moe_runner.MoERunner._forward_impl": None,
        f"{_LAYERS}.fused_moe.runner.moe_runner.MoERunner._encode_layer_name": ("self",),
        f"{_LAYERS}.fused_moe.runner.moe_runner.MoERunner._maybe_reduce_final_output": (
            *("self", "states", "trunc_size", "output_is_reduced"),
        ),
        f"{_LAYERS}.fused_moe.router.fused_topk_router._get_padding_mask": None,
    },
    "rotary": {
        f"{_MODELS}.OAIAttention.forward": ("self", "hidden_states", "positions"),
        f"{_LAYERS}.attention.attention.Attention.process_weights_after_loading": (
            *("self", "act_dtype"),
        ),
        f"{_LAYERS}.attention.attention.get_attention_context": ("layer_name",),
        f"{_LAYERS}.rotary_embedding.RotaryEmbedding.forward_static": None,
    },
    "memory": {
        f"{_RUNNERS}.gpu_model_runner.GPUModelRunner.profile_cudagraph_memory": ("self",),
        f"{_RUNNERS}.gpu_model_runner.GPUModelRunner.capture_model": ("self",),
        f"{_RUNNERS}.gpu.model_runner.GPUModelRunner.profile_cudagraph_memory": ("self",),
        f"{_RUNNERS}.gpu.model_runner.GPUModelRunner.capture_model": ("self", "profile_only"),
    },
}
"""By part ("": all of them): parameters by name of a function; None: that it is there."""


@cache
def broken(part: str) -> str | None:
    """Return how this vLLM differs from what a part needs, None if it does not."""
    for used in (USED[""], USED.get(part, {})):
        for name, parameters in used.items():
            found = _parameters(name)
            if found is None:
                return f"this vLLM has no {name}"
            if parameters is not None and found != parameters:
                return f"{name} of this vLLM takes {', '.join(found)}, not {', '.join(parameters)}"
    return None


def works(part: str) -> bool:
    """Whether a part can be used with this vLLM; one line says why not."""
    reason = broken(part)
    if reason is not None:
        logger.warning_once("vllm-sparkforge: part %s is off: %s.", part, reason)
    return reason is None


def _parameters(name: str) -> tuple[str, ...] | None:
    """Return the names of a function's parameters; None: there is none of that name."""
    words = name.split(".")
    for size in range(len(words) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(words[:size]))
        except ModuleNotFoundError:
            continue
        try:
            for word in words[size:]:
                found = getattr(found, word)
        except AttributeError:
            return None
        return tuple(inspect.signature(found).parameters)
    return None
