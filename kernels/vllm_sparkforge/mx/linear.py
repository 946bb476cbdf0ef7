# SPDX-License-Identifier: Apache-2.0
"""Layers that are quantized while they load, weights only, or packed as they are.

Weights go through the torch quantizers on every platform, not through the kernel that is fastest
there: a model has the same weights wherever it runs, so a test on one machine speaks for another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Module
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp4.marlin import MarlinMxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp8.marlin import MarlinMxfp8LinearKernel
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from vllm_sparkforge import options
from vllm_sparkforge.decode import dense, module, selfcheck
from vllm_sparkforge.mx import cpu, lossless
from vllm_sparkforge.mx.table import FORMATS, LOSSLESS, Format

logger = init_logger(f"vllm.{__name__}")


def _name_of(layer: Module) -> str:
    return getattr(layer, "prefix", type(layer).__name__)


def _tensors(form: Format, layer: Module) -> list[torch.Tensor]:
    return [getattr(layer, name) for name in form.names]


class CpuKernel:
    """The product in plain torch, on weights as the format has them."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def process_weights_after_loading(self, layer: Module) -> None:
        """Leave the weight as it is."""

    def apply_weights(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the product."""
        return cpu.mx_linear(x, self._form.name, _tensors(self._form, layer), bias)


class PlainKernel:
    """The product with the weight as it was loaded: vLLM has no kernel for such scales."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def process_weights_after_loading(self, layer: Module) -> None:
        """Leave the weight to the method, which has the loaded one."""
        logger.warning_once(
            "Layers in %s stay in BF16, as they were loaded: no decode kernels.", self._form.label
        )

    def apply_weights(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the product."""
        return F.linear(x, layer.weight, bias)


class DecodeKernel:
    """The decode kernels, which expand the weight for many rows; else the fallback.

    Args:
        fallback: Marlin's kernel, or ``PlainKernel``.
    """

    def __init__(self, form: Format, fallback: Any) -> None:
        self._form, self._fallback = form, fallback
        self._packed = False

    @property
    def is_plain(self) -> bool:
        """Whether the layer computes with the weight as it was loaded."""
        return not self._packed and isinstance(self._fallback, PlainKernel)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Pack the weight, if the kernels pass the comparison with torch on it."""
        config = get_current_vllm_config()
        shape = (layer.output_size_per_partition, layer.input_size_per_partition)
        packed = self._pack(layer, shape)
        if packed is None:
            # another operator is traced
            options.note(config, _name_of(layer), "fallback")
            self._fallback.process_weights_after_loading(layer)
            return
        self._packed = True
        for name, tensor in zip(self._form.names, packed, strict=True):
            replace_parameter(layer, name, tensor)

    def _pack(self, layer: Module, shape: tuple[int, int]) -> tuple[torch.Tensor, ...] | None:
        config, form = get_current_vllm_config(), self._form
        if not module.enabled(config, "layers"):
            return None
        tensors = [one.data for one in _tensors(form, layer)]
        reason = dense.refused(form, tensors, shape[1], layer.params_dtype)
        if reason is not None:
            logger.info_once(
                "Decode kernels are not used for %s %d x %d: %s.", form.label, *shape, reason
            )
            return None
        bias = getattr(layer, "bias", None)
        packed = form.pack(*tensors)
        right = selfcheck.passes(
            form.label,
            shape,
            module.is_required(config),
            lambda: selfcheck.compare_mx(form, tensors, bias, packed, shape[1]),
        )
        return packed if right else None

    def apply_weights(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the product."""
        if not self._packed:
            return self._fallback.apply_weights(layer, x, bias)
        tensors = _tensors(self._form, layer)
        return dense.mx_linear(x, self._form.name, tensors, bias, layer.output_size_per_partition)


class MxLinearMethod(LinearMethodBase):
    """Loads a BF16 weight, leaves it quantized, multiplies activations as they come.

    vLLM's base of such methods would want a configuration of vLLM's own for them, since 0.32.

    Args:
        form: the name of one of ``FORMATS``.
    """

    uses_meta_device = True

    def __init__(self, form: str) -> None:
        self.form = FORMATS[form]

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the weight on the meta device; it is loaded and quantized layer by layer.

        Raises:
            ValueError: the format or the kernels cannot take it.
        """
        if input_size_per_partition % self.form.block != 0:
            msg = (
                f"{self.form.label} requires input_size_per_partition"
                f" ({input_size_per_partition}) to be divisible by {self.form.block}."
            )
            raise ValueError(msg)
        # Marlin has kernels with E8M0 scales for no other type, and would only say so at the first
        # forward
        if current_platform.is_cuda() and params_dtype != torch.bfloat16:
            msg = f"Weight-only formats need --dtype bfloat16, got {params_dtype}."
            raise ValueError(msg)
        layer.params_dtype = params_dtype
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        shape = (layer.output_size_per_partition, input_size_per_partition)
        weight = ModelWeightParameter(
            data=torch.empty(shape, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)
        if isinstance(layer, VocabParallelEmbedding):
            # the rows that pad the shard are never loaded: waiting for them would put the layer off
            # until everything else is loaded
            layer.weight.weight_loader_numel = (
                layer.shard_indices.num_org_elements * input_size_per_partition
            )
        self.kernel = self._kernel(shape)

    def _say(self, where: str) -> None:
        # as vLLM says of its own
        kernel = f"{where}{self.form.kernel}LinearKernel"
        logger.info_once("Using %s for %s GEMM", kernel, self.form.label)

    def _kernel(self, shape: tuple[int, int]) -> CpuKernel | DecodeKernel:
        """Return what computes the products of a weight [N, K].

        Raises:
            ValueError: this platform has no kernel.
        """
        if current_platform.is_cpu():
            self._say("CPU")
            return CpuKernel(self.form)
        if not current_platform.is_cuda():
            # what vLLM has there expands MXFP8 to BF16 at load: less accurate, and no smaller
            platform = current_platform._enum.name
            raise ValueError(f"Weight-only {self.form.label} has no kernel on {platform}.")
        fallback = self._marlin(shape) or PlainKernel(self.form)
        config = get_current_vllm_config()
        failed = self.form.label in options.of(config).failed
        ours = module.enabled(config, "layers") and not failed
        theirs = "Plain" if isinstance(fallback, PlainKernel) else "Marlin"
        self._say("Decode" if ours else theirs)
        return DecodeKernel(self.form, fallback)

    def _marlin(self, shape: tuple[int, int]) -> Any:
        """Return Marlin's kernel, None if it has none for the format."""
        if self.form.name == "mxfp4":
            marlin, config = MarlinMxFp4LinearKernel, MxFp4LinearLayerConfig(None)
        elif self.form.name == "mxfp8":
            marlin, config = MarlinMxfp8LinearKernel, Mxfp8LinearLayerConfig(shape)
        elif self.form.name == "nvfp4":
            marlin, config = MarlinNvFp4LinearKernel, NvFp4LinearLayerConfig()
        else:
            return None
        supported, reason = marlin.is_supported()
        if not supported:
            raise ValueError(f"Weight-only {self.form.label} has no kernel here: {reason}.")
        return marlin(config)

    def tie_weights(self, layer: Module, embed_tokens: Module) -> None:
        """Refuse it."""
        raise ValueError("A head that is tied to the input embeddings cannot be quantized online.")

    def process_weights_after_loading(self, layer: Module) -> None:
        """Quantize the weight.

        Raises:
            ValueError: an element is not finite.
        """
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        # a shared scale would hide such an element or spread it over its block
        smallest, largest = torch.aminmax(layer.weight)
        if not (smallest.isfinite() and largest.isfinite()):
            msg = (
                f"{_name_of(layer)}.weight has elements that are not finite and cannot be"
                f" quantized to {self.form.label}."
            )
            raise ValueError(msg)
        kernel, loaded = self.kernel, layer.weight.data
        tensors = self.form.quantise(loaded)
        layer.input_scale = None
        for name, tensor in zip(self.form.names, tensors, strict=True):
            replace_parameter(layer, name, tensor)
        kernel.process_weights_after_loading(layer)
        if isinstance(kernel, DecodeKernel) and kernel.is_plain:
            # rounded weights would be no smaller in BF16
            replace_parameter(layer, "weight", loaded)
            for name in self.form.names[1:]:
                delattr(layer, name)
        layer._already_called_process_weights_after_loading = True

    def apply(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the layer."""
        return self.kernel.apply_weights(layer, x, bias)


class LosslessLinearMethod(LinearMethodBase):
    """Packs a BF16 weight bit for bit; gives its layer back where that cannot be.

    Args:
        plain: the layer's method otherwise.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def create_weights(self, layer: Module, *sizes: Any, **named: Any) -> None:
        """Register the weight as ever."""
        self._plain.create_weights(layer, *sizes, **named)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Pack the weight, if it fits and the kernels pass the comparison with torch on it."""
        config, weight = get_current_vllm_config(), layer.weight.data
        packed, reason = self._pack(layer, weight, module.is_required(config))
        if packed is None:
            logger.info("%s stays in BF16: %s.", _name_of(layer), reason)
            options.note(config, _name_of(layer), "bf16")  # another operator is traced
            layer.quant_method = self._plain
            self._plain.process_weights_after_loading(layer)
            return
        self._n = len(weight)
        for name, tensor in zip(LOSSLESS.names, packed, strict=True):
            replace_parameter(layer, name, tensor)

    def _pack(
        self, layer: Module, weight: torch.Tensor, strict: bool
    ) -> tuple[lossless.Packed | None, str]:
        """Return the packed weight, or why there is none."""
        n, k = weight.shape
        if (reason := dense.refused(LOSSLESS, [weight], k, weight.dtype)) is not None:
            return None, reason
        packed = lossless.encode(weight)
        room = int(weight.numel() * lossless.LARGEST_SHARE) - (
            listed := lossless.num_listed(packed)
        )
        if room < 0:
            return None, f"{listed} of its elements are not within 15 powers of two"
        # of one size whatever was loaded: torch.compile's results have it, and so do other weights
        # that are loaded into the same place
        packed = (*packed[:2], F.pad(packed[2], (0, room)))
        bias = getattr(layer, "bias", None)
        right = selfcheck.passes(
            LOSSLESS.label,
            (n, k),
            strict,
            lambda: selfcheck.compare_mx(LOSSLESS, [weight], bias, packed, k),
        )
        return (packed, "") if right else (None, "its kernels are switched off")

    def apply(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the layer."""
        return dense.mx_linear(x, LOSSLESS.name, _tensors(LOSSLESS, layer), bias, self._n)


def lossless_method(config: VllmConfig, plain: Any, obstacle: str | None = None) -> Any:
    """Return the method of a layer that is to be packed bit for bit.

    Args:
        plain: what it has otherwise, and without the decode kernels.
        obstacle: why it has to stay as it is, if so.
    """
    if LOSSLESS.label in options.of(config).failed:
        obstacle = "the kernels failed their trial"
    ours = obstacle is None and module.enabled(config, "layers")
    where = "Decode" if ours else "CPU" if current_platform.is_cpu() else "Bf16"
    logger.info_once("Using %sLosslessLinearKernel for LOSSLESS GEMM", where)
    if not ours:
        logger.info_once("Layers stay in BF16: %s.", obstacle or "there are no decode kernels")
    return LosslessLinearMethod(plain) if ours else plain
