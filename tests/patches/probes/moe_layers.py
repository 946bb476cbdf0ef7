"""An MoE layer in vLLM's words."""

from typing import Any


def moe_config(
    experts: int, hidden: int, inner: int, kind: str = "SWIGLUOAI", **others: Any
) -> Any:
    """Return a layer, gpt-oss's by default.

    Args:
        kind: the activation's name.
        others: its other fields, and ``tp_size``, ``ep_size`` and ``use_ep`` of how it is cut.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    parallel = FusedMoEParallelConfig.make_no_parallel()
    for name in ("tp_size", "ep_size", "use_ep"):
        setattr(parallel, name, others.pop(name, getattr(parallel, name)))
    given = {
        "num_experts": experts,
        "experts_per_token": 4,
        "hidden_dim": hidden,
        "intermediate_size": inner,
        "num_local_experts": experts,
        "num_logical_experts": experts,
        "activation": MoEActivation[kind],
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "has_bias": True,
    }
    return FusedMoEConfig(**given | others)
