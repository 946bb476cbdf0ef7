# SPDX-License-Identifier: Apache-2.0
"""gpt-oss with the half of a layer, and rotary embedding with the KV cache, as one operator each.

In the registry in place of vLLM's class, of which it is a subclass: vLLM builds the model, and then
blocks, attention and norms get a class of ours where the kernels can be used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.models.gpt_oss import (
    GptOssForCausalLM,
    MLPBlock,
    OAIAttention,
    TransformerBlock,
)
from vllm.transformers_utils.config import checkpoint_has_lm_head

from vllm_sparkforge import contract, graph_memory, options
from vllm_sparkforge.decode import bf16, layer, module, rotary
from vllm_sparkforge.mx.linear import MxLinearMethod, lossless_method
from vllm_sparkforge.mx.table import FORMATS
from vllm_sparkforge.trial import prompts

logger = init_logger(f"vllm.{__name__}")


class NormalizedBefore(RMSNorm):
    """A norm whose product the operator before it has made."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Pass on what it is given."""
        return x, residual


class JoinedBlock(TransformerBlock):
    """A layer whose part after the attention is one operator, with the norm that follows it."""

    moe_half: layer.MoEHalf

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer; the first one's input is not normalized yet."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.attn(hidden_states, positions)
        return self.moe_half(hidden_states, residual)


class JoinedAttention(OAIAttention):
    """Attention whose rotary embedding and cache are one operator."""

    joined: rotary.RotaryAndCache

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the attention of a layer."""
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.o_proj(self.joined(qkv, positions))
        return output


class CheckedAttention(Attention):
    """vLLM's attention; once it is ready the kernel is compared with it."""

    decode_rotary: rotary.RotaryAndCache

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare both."""
        super().process_weights_after_loading(act_dtype)
        self.decode_rotary.prepare()


class Bf16Head(UnquantizedEmbeddingMethod):
    """A BF16 head, whose few rows go through our kernels."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Compare the kernels with torch."""
        super().process_weights_after_loading(layer)
        bf16.prepare(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Compute logits."""
        if layer.uses_decode_kernels:
            return torch.ops.sparkforge.bf16_linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class SparkGptOssForCausalLM(GptOssForCausalLM):
    """gpt-oss as vLLM has it, with the parts that the options ask for."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        chosen = options.of(vllm_config)
        module.verify_option(vllm_config)
        quantised = FORMATS.keys() & chosen.mxfp4_layers.values()
        if quantised and (reason := contract.broken("layers")) is not None:
            raise ValueError(f"{options.KEY}: mxfp4_layers cannot be used: {reason}")
        # what torch.compile makes of the model follows from this wheel, too
        if chosen.failed:  # sparkforge/serving/profile.py looks for this line
            logger.warning("Kernels that failed their trial: %s.", ",".join(sorted(chosen.failed)))
        prompts.leave_out(chosen.failed)
        used = chosen.decode_kernels != "off"
        options.note(vllm_config, "kernels", module.fingerprint() if used else "")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        graph_memory.measure(vllm_config)
        _join_rotary(vllm_config, self.model)
        _join_halves(vllm_config, self.model)
        for part, kind in (("rotary", JoinedAttention), ("norms", JoinedBlock)):
            joined = any(isinstance(one, kind) for one in self.modules())
            options.note(vllm_config, part, str(joined))
        self._set_head(vllm_config, chosen.mxfp4_layers.get("lm_head"))
        # A bias is registered after the method has made the weight, and a checkpoint may hold it
        # before the weight. Loaded unwrapped it would not count, and the layer would keep the BF16
        # weight until everything else is loaded.
        for one in self.modules():
            if get_layerwise_info(one).can_load():
                initialize_online_processing(one)

    def _set_head(self, config: VllmConfig, form: str | None) -> None:
        """Give the head its method; its weight is made anew where it gets another format.

        Raises:
            ValueError: something else relies on the head as it is.
        """
        head = self.lm_head
        if type(head.quant_method) is not UnquantizedEmbeddingMethod:
            return
        obstacle = _head_obstacle(config) if form else None
        if form not in FORMATS:
            if module.enabled(config, "bf16"):
                head.quant_method = Bf16Head()
            if form:
                head.quant_method = lossless_method(config, head.quant_method, obstacle)
            return
        if obstacle is not None:
            msg = f"lm_head cannot be quantized: {obstacle}. Make it lossless in mxfp4_layers."
            raise ValueError(msg)
        head.quant_method = MxLinearMethod(form)
        head.quant_method.create_weights(
            head,
            head.input_size_per_partition,
            head.output_partition_sizes,
            head.input_size,
            head.output_size,
            params_dtype=head.params_dtype,
            weight_loader=head.weight_loader,
        )
        head.update_param_tp_status()


def _join_rotary(config: VllmConfig, model: Any) -> None:
    """Join rotary embedding and cache in the layers of this rank."""
    joined = []
    for block in _blocks(model):
        if type(block) is not TransformerBlock or type(block.attn) is not OAIAttention:
            return
        attention = block.attn.attn
        both = rotary.join(config, block.attn.rotary_emb, attention)
        if both is None or type(attention) is not Attention:
            return
        joined.append((block.attn, attention, both))
    for outer, attention, both in joined:
        attention.decode_rotary = both
        attention.__class__ = CheckedAttention
        outer.joined = both
        outer.__class__ = JoinedAttention
    splits = config.compilation_config.splitting_ops
    if joined and splits is not None and "vllm::unified_kv_cache_update" in splits:
        splits.append("sparkforge::rotate_and_cache")


def _join_halves(config: VllmConfig, model: Any) -> None:
    """Join norms, router and experts of all layers on all ranks, or of none."""
    blocks = _blocks(model)
    norms = [*(block.input_layernorm for block in blocks[1:]), model.norm]
    halves = [] if get_pp_group().world_size > 1 else _halves(config, blocks, norms)
    if not layer.on_all_ranks(len(halves) > 0):
        return
    for block, norm, half in zip(blocks, norms, halves, strict=True):
        runner = half.runner
        runner.routed_experts.decode_half = runner.decode_half = block.moe_half = half
        norm.__class__ = NormalizedBefore
        block.__class__ = JoinedBlock
    usual = model._maybe_add_hidden_state

    def add(states: Any, index: int, x: Any, residual: Any) -> Any:
        # after such a layer the residual is the sum already
        return usual(states, index, residual, None) if index > 0 else usual(states, 0, x, residual)

    model._maybe_add_hidden_state = add


def _halves(config: VllmConfig, blocks: list[Any], norms: list[Any]) -> list[layer.MoEHalf]:
    """Return a half for each layer, none if one of them stays as it is."""
    halves: list[layer.MoEHalf] = []
    for block, norm in zip(blocks, norms, strict=True):
        plain = type(block) is TransformerBlock and type(block.mlp) is MLPBlock
        if not plain or type(norm) is not RMSNorm:
            return []
        mlp = block.mlp
        half = layer.join(config, block.post_attention_layernorm, mlp.router, mlp.experts, norm)
        if half is None:
            return []
        halves.append(half)
    return halves


def _blocks(model: Any) -> list[Any]:
    return list(model.layers[model.start_layer : model.end_layer])


def _head_obstacle(config: VllmConfig) -> str | None:
    """Return why the head of this deployment cannot be quantized, if so."""
    model = config.model_config
    if any(
        getattr(one, "tie_word_embeddings", False)
        for one in (model.hf_config, model.hf_text_config)
    ):
        return "it is tied to the input embeddings, which are read row by row and stay unquantized"
    if model.head_dtype != model.dtype:
        return f"head_dtype asks for {model.head_dtype}, which is at odds with a quantized weight"
    if config.lora_config is not None and _has_lora(config.lora_config):
        return "LoRA applies to it (leave it out of --lora-target-modules to combine them)"
    drafter = config.speculative_config
    if drafter is not None and drafter.use_eagle():
        draft = drafter.draft_model_config
        # an MTP drafter always takes the head of the target, others do when their checkpoint has
        # none
        if drafter.method == "mtp" or not checkpoint_has_lm_head(
            draft.model, revision=draft.revision
        ):
            return (
                f"the {drafter.method} drafter {draft.model} has no lm_head of its own and would"
                " share it"
            )
    return None


def _has_lora(lora: Any) -> bool:
    from vllm.lora.utils import is_in_target_modules

    if lora.target_modules is not None:
        return is_in_target_modules("lm_head", lora.target_modules)
    return "lm_head" in getattr(GptOssForCausalLM, "embedding_modules", {})
