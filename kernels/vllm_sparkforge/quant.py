# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's MXFP4 checkpoints: which method loads and computes each layer.

Registered in place of vLLM's own configuration of the same name, of which it is a subclass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import (
    MarlinExperts,
    fused_marlin_moe,
)
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up

from vllm_sparkforge import contract, options
from vllm_sparkforge.decode import bf16, expertcheck, experts, module
from vllm_sparkforge.mx.linear import MxLinearMethod, lossless_method
from vllm_sparkforge.mx.table import FORMATS

logger = init_logger(f"vllm.{__name__}")

# the last two parts of a layer's name in vLLM
_KINDS = {"attn.qkv_proj": "qkv", "attn.o_proj": "o"}


class Bf16LinearMethod(UnquantizedLinearMethod):
    """A BF16 layer, whose few rows go through our kernels where it is large."""

    def process_weights_after_loading(self, layer: Module) -> None:
        """Compare the kernels with torch."""
        super().process_weights_after_loading(layer)
        bf16.prepare(layer)

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Compute the layer."""
        if layer.uses_decode_kernels:
            return torch.ops.sparkforge.bf16_linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class _FewRows:
    """Experts whose few rows go through our kernels; beside a class of vLLM's experts."""

    uses_decode_kernels = False

    def hooked(self, rows: int) -> bool:
        """Whether a model computes something between the second product and the sum: since 0.33."""
        hooks = getattr(self, "_uses_post_gemm2_hook", None)
        return hooks is not None and bool(hooks(rows))

    def decode_weights(self, w1: torch.Tensor, w2: torch.Tensor) -> experts.Weights:
        """Return what the kernels read."""
        return experts.Weights(w1, self.w1_scale, self.w1_bias, w2, self.w2_scale, self.w2_bias)

    def _prepare_half(self, layer: Module) -> None:
        if (half := getattr(layer, "decode_half", None)) is not None:
            half.prepare(self)


class FewRowsMarlin(_FewRows, MarlinExperts):
    """Marlin's experts, in its order."""

    def process_weights_after_loading(self, layer: Module) -> None:
        """Compare the kernels with Marlin."""
        super().process_weights_after_loading(layer)
        self.uses_decode_kernels = experts.prepare(self, layer)
        self._prepare_half(layer)

    def decode_reference(
        self,
        x: torch.Tensor,
        weights: experts.Weights,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute what the kernels are compared with."""
        output = torch.empty_like(x)
        fused_marlin_moe(
            hidden_states=x,
            w1=weights.w13,
            w2=weights.w2,
            bias1=weights.w13_bias,
            bias2=weights.w2_bias,
            w1_scale=weights.w13_scale,
            w2_scale=weights.w2_scale,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            quant_type_id=self.quant_type_id,
            activation=self.moe_config.activation,
            activation_func=self.activation,
            moe_sum=self.moe_sum,
            output=output,
        )
        return output

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Compute the layer; see MarlinExperts.apply."""
        rows = hidden_states.size(0)
        if (
            self.uses_decode_kernels
            and rows <= experts.MAX_ROWS
            and self._lora_context is None
            and _given(self, rest, named, "expert_map") is None
            and not _given(self, rest, named, "apply_router_weight_on_input")
            and not self.hooked(rows)
        ):
            # inside the operator ``moe_forward``: the number of rows is the real one
            weights = self.decode_weights(w1, w2)
            experts.experts(output, hidden_states, weights, topk_ids, topk_weights)
            return
        super().apply(output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **named)


class FewRowsCutlass(_FewRows, FlashInferExperts):
    """The experts of FlashInfer's CUTLASS MoE with MXFP8 activations, row by row.

    Where our kernels are used all rows arrive unquantized.
    """

    def process_weights_after_loading(self, layer: Module) -> None:
        """Compare the kernels with torch, and roughly with CUTLASS."""
        super().process_weights_after_loading(layer)
        config = self.quant_config
        if (config.weight_quant_dtype, config.quant_dtype) == ("mxfp4", "mxfp8"):
            self.uses_decode_kernels = False  # not while they are compared
            self.uses_decode_kernels = experts.prepare_row_major(self, layer)
            self._prepare_half(layer)

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Whether the prepare step leaves rows as they are."""
        return self.uses_decode_kernels or super().expects_unquantized_inputs

    def decode_weights(self, w1: torch.Tensor, w2: torch.Tensor) -> experts.Weights:
        """Return what the kernels read."""
        inner = self.moe_config.intermediate_size_per_partition_unpadded
        return super().decode_weights(w1, w2)._replace(inner=inner)

    def decode_reference(
        self,
        x: torch.Tensor,
        weights: experts.Weights,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute what rows beyond the kernels' get, from the real weights."""
        quantized, scale = self._quantize(x)
        output = torch.empty_like(x)
        super().apply(
            output=output,
            hidden_states=quantized,
            w1=weights.w13,
            w2=weights.w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=self.moe_config.activation,
            global_num_experts=self.moe_config.num_experts,
            expert_map=None,
            a1q_scale=scale,
            a2_scale=None,
            workspace13=None,
            workspace2=None,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return output

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantize rows as the prepare step does where it is not deferred."""
        config = self.quant_config
        return moe_kernel_quantize_input(
            x,
            config.a1_scale,
            quant_dtype=config.quant_dtype,
            per_act_token_quant=config.per_act_token_quant,
            block_shape=config.block_shape,
            is_scale_swizzled=config.is_scale_swizzled,
            mx_alignment=config.mx_alignment,
        )

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Compute the layer; see FlashInferExperts.apply."""
        if self.uses_decode_kernels:
            if (
                hidden_states.size(0) <= experts.MAX_ROWS
                and expert_map is None
                and not _given(self, rest, named, "apply_router_weight_on_input")
            ):
                weights = self.decode_weights(w1, w2)
                experts.experts(output, hidden_states, weights, topk_ids, topk_weights)
                return
            hidden_states, a1q_scale = self._quantize(hidden_states)
        super().apply(
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            a1q_scale,
            *rest,
            **named,
        )


APPLY = (
    *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
    *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
    *("expert_tokens_meta", "apply_router_weight_on_input"),
)
"""Parameters of ``apply`` of all experts; ``contract`` compares them."""


def _given(which: _FewRows, rest: tuple[Any, ...], named: dict[str, Any], name: str) -> Any:
    """Return an argument of ``apply``, by place or by name."""
    first = 6 if isinstance(which, MarlinExperts) else 10
    place = APPLY.index(name) - first
    return rest[place] if place < len(rest) else named.get(name)


def few_rows(chosen: Any) -> Any:
    """Return the class in place of the experts' that vLLM chose."""
    ours = {MarlinExperts: FewRowsMarlin, FlashInferExperts: FewRowsCutlass}.get(chosen)
    return chosen if ours is None or not contract.works("experts") else ours


class MoEMethod(GptOssMxfp4MoEMethod):
    """vLLM's method of these experts, with ours for few rows, and padded no further than needed."""

    def __init__(self, moe: Any) -> None:
        """Select the experts' kernels as vLLM does.

        ``flashinfer_cutlass`` stands for two of them: with BF16 activations for 9.0 alone, and with
        MXFP8 activations for 10.x and 12.x. vLLM drops the second before it asks either.
        """
        asked = moe.moe_backend
        try:
            super().__init__(moe)
        except ValueError:
            off = "experts" in options.of(get_current_vllm_config()).off
            if asked != "flashinfer_cutlass" or not _blackwell() or off:
                raise
            moe.moe_backend = "flashinfer_cutlass_afp8"  # which --moe-backend does not take
            try:
                super().__init__(moe)
            finally:
                moe.moe_backend = asked
            logger.warning_once(
                "--moe-backend flashinfer_cutlass has no kernel for BF16 activations on this"
                " device; %s quantizes them to MXFP8.",
                self.mxfp4_backend.value,
            )
        self.experts_cls = few_rows(self.experts_cls)

    def _setup_kernel(self, layer: Module, *tensors: Any, **named: Any) -> None:
        """Put the weights into the backend's order; the self-check knows one expert's before."""
        if all(tensor is not None for tensor in tensors):
            last = expertcheck.Checkpoint(*(tensor.data[-1:].clone() for tensor in tensors))
            layer.decode_last_expert = last
        super()._setup_kernel(layer, *tensors, **named)
        layer.__dict__.pop("decode_last_expert", None)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *rest: Any, **named: Any
    ) -> tuple[int, int]:
        """Pad gpt-oss's 2880 x 2880 to 2944 x 2880 for Marlin, not to 3072 x 2944.

        Marlin's thread tiles are 64 x 128 and 128 x 64 (k x n), at every batch size. The first
        product, whose n is twice the intermediate size, takes a k of 64; the second has the
        intermediate size as k and the hidden size as n, a multiple of 128 then. Where vLLM pads
        less, that stays.
        """
        hidden, inner = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, *rest, **named
        )
        if self.mxfp4_backend == Mxfp4MoeBackend.MARLIN and self.moe.in_dtype == torch.bfloat16:
            multiple, of_inner = experts.PADDED[experts.KIND]
            hidden = min(hidden, round_up(hidden_size, multiple))
            inner = min(inner, round_up(intermediate_size_per_partition, of_inner))
        return hidden, inner


def _blackwell() -> bool:
    return any(current_platform.is_device_capability_family(family) for family in (100, 120))


@register_quantization_config("gpt_oss_mxfp4")
class GptOssConfig(GptOssMxfp4Config):
    """Configuration of gpt-oss's MXFP4 checkpoints."""

    def _make_moe_method(self, moe: Any) -> Any:
        from vllm_sparkforge import bf16_experts

        config = get_current_vllm_config()
        if options.of(config).experts == options.EXPERTS:
            if not getattr(self, "_admitted", False):
                # once for the model, at its first MoE layer: the layers after it find part of the
                # memory taken by the ones before
                bf16_experts.admit(moe, config)
                self._admitted = True
            return bf16_experts.method(moe, config)
        try:
            return MoEMethod(moe)
        except NotImplementedError as error:
            if (hint := bf16_experts.hint(moe, config)) is None:
                raise
            raise NotImplementedError(f"{str(error).rstrip()} {hint}") from error

    def get_quant_method(self, layer: Module, prefix: str) -> Any:
        """Return the method of a layer."""
        method = super().get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase) or type(method) is not UnquantizedLinearMethod:
            return method
        kind = _KINDS.get(".".join(prefix.rsplit(".", 2)[-2:]), "")
        config = get_current_vllm_config()
        form = options.of(config).mxfp4_layers.get(kind)
        if form in FORMATS:
            return MxLinearMethod(form)
        plain = Bf16LinearMethod() if module.enabled(config, "bf16") else method
        return plain if form is None else lossless_method(config, plain)
