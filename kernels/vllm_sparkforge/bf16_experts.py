# SPDX-License-Identifier: Apache-2.0
"""Experts of gpt-oss expanded to BF16 while they load, computed by the CPU's unquantized MoE.

Taken by name only: it needs 3.8 times the memory, and reads as much more for every token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.nn import Module
from vllm.config import VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, biased_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, backend_to_kernel_cls
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import (
    get_cgroup_memory_limit,
    get_cgroup_memory_usage,
    get_memory_node_info,
    get_visible_memory_node,
)
from vllm.utils.math_utils import cdiv, round_up
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.mem_utils import format_gib, format_mib

from vllm_sparkforge.memory_nodes import get_allocation_nodes, get_cgroup_reclaimable_memory
from vllm_sparkforge.mx.formats import BLOCK, mxfp4_dequantize

logger = init_logger(f"vllm.{__name__}")

SAID = "Using 'BF16_DEQUANT' Mxfp4 MoE backend."
"""As vLLM says of its own backends; a server's check of them reads the log."""
_NAME = "experts 'bf16_dequant'"


@dataclass(frozen=True)
class Cost:
    """What the experts of one rank take, biases left out (they stay as they are).

    Attributes:
        num_layers: MoE layers on this rank.
        num_experts: Experts of one layer on this rank.
        packed: Bytes of all experts in MXFP4 (blocks and scales).
        dequantized: Bytes of all experts in BF16.
        peak: Most bytes of expert weights alive at once while loading.
    """

    num_layers: int
    num_experts: int
    packed: int
    dequantized: int
    peak: int


def cost(moe: FusedMoEConfig, config: VllmConfig) -> Cost:
    """Count the expert weights of the whole model on this rank.

    Every layer of gpt-oss is an MoE layer of the same shape.
    """
    num_layers = config.model_config.get_num_layers(config.parallel_config)
    # the loader cuts the intermediate dim in whole MXFP4 blocks
    shard = round_up(moe.intermediate_size_per_partition, BLOCK)
    num_w2 = moe.num_local_experts * moe.hidden_dim * shard
    num_w13 = moe.w13_num_shards * num_w2
    num_weights = num_w13 + num_w2
    return Cost(
        num_layers=num_layers,
        num_experts=moe.num_local_experts,
        packed=num_layers * (num_weights // 2 + num_weights // BLOCK),
        dequantized=num_layers * num_weights * 2,
        # packed weights go away layer by layer, so the peak is in the last layer: everything in
        # BF16, and w13 once more while it is prepacked
        peak=num_layers * num_weights * 2 + num_w13 * 2,
    )


def hint(moe: FusedMoEConfig, config: VllmConfig) -> str | None:
    """Return what to add to vLLM's refusal of a checkpoint; None where this would not help."""
    if _experts(moe, config)[0] is None:
        return None
    found = cost(moe, config)
    return (
        "This platform can run the checkpoint with --additional-config"
        ' \'{"sparkforge": {"experts": "bf16_dequant"}}\' (in sparkforge: --moe-backend'
        f" bf16_dequant), which expands the experts to BF16 at load: {found.num_layers} layers x"
        f" {found.num_experts} experts take {_bytes(found.dequantized)} on this rank instead of"
        f" {_bytes(found.packed)}."
    )


def admit(moe: FusedMoEConfig, config: VllmConfig) -> None:
    """Refuse where the weights cannot fit, and say what they cost where they can.

    To be called before any expert weight is allocated.

    Raises:
        ValueError: nothing computes them, or this rank's memory cannot hold them.
    """
    found, reason = _experts(moe, config)
    if found is None:
        raise ValueError(f"{_NAME} cannot be used since {reason}.")
    need = cost(moe, config)
    # The KV cache is allocated after loading, when the transients are gone. Its automatic size is
    # what remains, so only an explicit one counts here.
    kv_cache = config.cache_config.kv_cache_memory_bytes or 0
    required = max(need.peak, need.dequantized + kv_cache)
    available = _available_memory_per_rank(config)
    if required > available:
        msg = (
            f"{_NAME} needs {_bytes(required)} on this rank, but {_bytes(available)} are available."
            f" The experts of {need.num_layers} layers x {need.num_experts} take"
            f" {_bytes(need.dequantized)} in BF16, loading them up to {_bytes(need.peak)}, the KV"
            f" cache asked for {_bytes(kv_cache)}. Use a machine with more memory, spread the model"
            " over more hosts or memory nodes (tensor or pipeline parallelism), lower"
            " VLLM_CPU_KVCACHE_SPACE or --kv-cache-memory-bytes, or use a smaller checkpoint."
        )
        raise ValueError(msg)
    logger.warning_once(
        "%s expands the MXFP4 experts to BF16 at load: %d layers x %d experts on this rank grow"
        " from %s to %s (%.2fx), and so do the bytes read for every token.%s",
        _NAME,
        need.num_layers,
        need.num_experts,
        _bytes(need.packed),
        _bytes(need.dequantized),
        need.dequantized / need.packed,
        " This CPU has a backend that keeps them in MXFP4: leave the option out."
        if _has_native_backend(moe)
        else "",
    )


def method(moe: FusedMoEConfig, config: VllmConfig) -> FusedMoEMethodBase:
    """Return the method of a layer, once ``admit`` has let it in."""
    found, reason = _experts(moe, config)
    assert found is not None, reason
    logger.info_once(SAID)
    return Bf16ExpertsMethod(moe, found)


class Bf16ExpertsMethod(GptOssMxfp4MoEMethod):
    """Loads MXFP4 experts as vLLM's method does, and expands them.

    Args:
        experts: vLLM's unquantized experts that compute them.
    """

    def __init__(self, moe: FusedMoEConfig, experts: type) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # vLLM's own would choose a backend
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend = Mxfp4MoeBackend.EMULATION  # its sizes: whole blocks
        self.experts_cls = experts
        self.max_capture_size = moe.max_capture_size
        self._cache_permute_indices: dict[torch.Size, torch.Tensor] = {}
        self.moe_kernel = None
        self.w13_precision_config = self.w2_precision_config = None

    def process_weights_after_loading(self, layer: Module) -> None:
        """Expand one tensor after the other, each packed one freed before the next."""
        for name in ("w13_weight", "w2_weight"):
            self._expand(layer, name)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = unquantized.make_unquantized_moe_kernel(
            quant_config=self.moe_quant_config,
            moe_config=self.moe,
            backend=unquantized.UnquantizedMoeBackend.CPU,
            experts_cls=self.experts_cls,
            routing_tables=layer._expert_routing_tables(),
        )
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def _expand(self, layer: Module, name: str) -> None:
        blocks, scales = getattr(layer, name).data, getattr(layer, f"{name}_scale").data
        shape = (*blocks.shape[:-1], blocks.shape[-1] * 2)
        weight = torch.empty(shape, dtype=torch.bfloat16)
        for expert in range(blocks.shape[0]):
            mxfp4_dequantize(blocks[expert], scales[expert], out=weight[expert])
            # only the three largest scales, NaN among them, can leave BF16
            if scales[expert].max() >= 0xFD and not weight[expert].isfinite().all():
                msg = (
                    f"{layer.layer_name}: expert {expert} of {name} has MXFP4 scales that are NaN"
                    " or lead beyond the range of BF16. The checkpoint is damaged or needs an MXFP4"
                    " backend."
                )
                raise ValueError(msg)
        delattr(layer, f"{name}_scale")
        replace_parameter(layer, name, weight)

    def get_fused_moe_quant_config(self, layer: Module) -> Any:
        """Return gpt-oss's activation and biases; no scales are left."""
        return biased_moe_quant_config(
            layer.w13_bias, layer.w2_bias, gemm1_alpha=1.702, gemm1_beta=1.0, gemm1_clamp_limit=7.0
        )


def _experts(moe: FusedMoEConfig, config: VllmConfig) -> tuple[type | None, str]:
    """Find the unquantized experts; if there are none, the second value says why."""
    if not current_platform.is_cpu():
        return None, "it is available on CPU only"
    asked = config.model_config.quantization_config
    if isinstance(asked, QuantizationConfigArgs) and asked.moe and asked.moe.activation:
        return None, (
            "it keeps activations in BF16, but quantization_config.moe.activation asks for"
            " quantized ones"
        )
    if moe.moe_parallel_config.use_ep:
        # the CPU kernels take no expert map: global expert ids would index past the experts of
        # this rank
        return None, "the unquantized CPU MoE does not support expert parallelism"
    if moe.hidden_dim % BLOCK != 0 or moe.intermediate_size % BLOCK != 0:
        return None, (
            f"hidden size {moe.hidden_dim} and intermediate size {moe.intermediate_size} must be"
            f" multiples of the MXFP4 block ({BLOCK})"
        )
    # ask with the shapes that will be allocated
    asked_moe = copy.copy(moe)
    asked_moe.intermediate_size_per_partition = round_up(moe.intermediate_size_per_partition, BLOCK)
    reasons = []
    for one in unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU):
        supported, reason = one.is_supported_config(one, asked_moe, None, None, _format(moe))
        if supported:
            return one, ""
        reasons.append(f"{one.__name__}: {reason}")
    return None, (
        f"no unquantized CPU MoE runs hidden size {moe.hidden_dim} with intermediate size"
        f" {asked_moe.intermediate_size_per_partition} per rank ({'; '.join(reasons)})"
    )


def _format(moe: FusedMoEConfig) -> FusedMoEActivationFormat:
    if moe.moe_parallel_config.use_batched_activation_format:
        return FusedMoEActivationFormat.BatchedExperts
    return FusedMoEActivationFormat.Standard


def _has_native_backend(moe: FusedMoEConfig) -> bool:
    return any(
        one.is_supported_config(one, moe, kMxfp4Static, None, _format(moe))[0]
        for one in backend_to_kernel_cls(Mxfp4MoeBackend.CPU)
    )


def _bytes(count: int) -> str:
    if count >= GiB_bytes:
        return f"{format_gib(count)} GiB ({count} bytes)"
    return f"{format_mib(count)} MiB ({count} bytes)"


def _available_memory_per_rank(config: VllmConfig) -> int:
    """Bytes that one rank may still allocate: what is available on the memory
    nodes that its pages may come from, shared evenly among the ranks that
    allocate there.
    """
    nodes = get_allocation_nodes()
    memory = [get_memory_node_info(node) for node in nodes]
    available = sum(node.available_memory for node in memory)
    limit, usage = get_cgroup_memory_limit(), get_cgroup_memory_usage()
    if limit is not None and usage is not None:
        # Usage counts page cache, and so does what a node has left where the
        # cgroup is the tighter limit.
        reclaimable = get_cgroup_reclaimable_memory()
        if any(node.total_memory == limit for node in memory):
            available = min(available + reclaimable, psutil.virtual_memory().available)
        available = min(available, limit - usage + reclaimable)
    parallel_config = config.parallel_config
    num_ranks = parallel_config.local_world_size * parallel_config.data_parallel_size_local
    # Ranks are spread evenly over the visible nodes.
    num_nodes = max(len(get_visible_memory_node()), len(nodes))
    return available // max(cdiv(num_ranks * len(nodes), num_nodes), 1)
