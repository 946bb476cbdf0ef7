"""What becomes of layers whose decode kernels are wrong, or that they cannot take.

Runs inside the interpreter under test; used by probe_decode_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.patches.probes.decode_device import configured, linear_layer, load, logged, random_weight
from tests.patches.probes.decode_experts import experts_layer


def self_check(launches: Any) -> dict[str, Any]:
    """What becomes of layers whose kernels are wrong."""
    import torch
    from vllm.model_executor.kernels.decode import selfcheck
    from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearLayerConfig
    from vllm.model_executor.kernels.linear.mxfp4.decode import DecodeMxFp4LinearKernel
    from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearLayerConfig
    from vllm.model_executor.kernels.linear.mxfp8.decode import DecodeMxFp8LinearKernel

    def fail(result: Any) -> Any:
        raise RuntimeError("CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS")

    spoils: dict[str, Callable[[Any], Any]] = {
        "right": lambda result: result,
        "3 % too large": lambda result: result * 1.03,
        "1 % too large": lambda result: result * 1.01,
        "NaN": lambda result: result * torch.nan,
        "an error": fail,
    }

    def dense(kernel: Any, kind: str, n: int, k: int, *, zero: bool = False) -> dict[str, Any]:
        layer = torch.nn.Module()
        weight, scale = random_weight(kind, n, k)
        if zero:
            weight = torch.zeros_like(weight.view(torch.uint8)).view(weight.dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.params_dtype, layer.output_size_per_partition = torch.bfloat16, n
        found: dict[str, Any] = {}

        class Fallback:
            def __init__(self, config: Any) -> None:
                pass

            def process_weights_after_loading(self, layer: Any) -> None:
                # what it gets are weights that nobody has packed
                found["fallback"] = bool((layer.weight.data == weight).all())

        kernel.fallback_cls = Fallback
        with logged() as lines:
            try:
                load(kernel, layer)
            except RuntimeError as error:
                found["raised"] = str(error)
        found["packed"] = layer.weight.dtype == torch.int32
        found["said"] = lines
        return found

    def kernels() -> dict[str, Any]:
        four, eight = MxFp4LinearLayerConfig(), Mxfp8LinearLayerConfig((48, 128))
        made = {}
        for kind, cls, config in (
            ("mxfp4", DecodeMxFp4LinearKernel, four),
            ("mxfp8", DecodeMxFp8LinearKernel, eight),
        ):
            made[kind] = cls.__new__(cls)
            made[kind].config = config
        return made

    result: dict[str, Any] = {}
    before = torch.get_rng_state()
    selfcheck.passes("MXFP4", (1, 1), True, lambda: float(torch.rand(1)) * 0)
    result["same random numbers"] = bool((torch.get_rng_state() == before).all())

    def forget() -> None:
        selfcheck._passed.clear()
        selfcheck._switched_off.clear()

    for name, spoil in spoils.items():
        for option in ("auto", "on"):
            launches.spoil = spoil
            forget()
            with configured(option):
                for kind, kernel in kernels().items():
                    result[f"{name}, {kind}, {option}"] = dense(kernel, kind, 48, 128)
                if option == "auto":
                    other = dense(kernels()["mxfp4"], "mxfp4", 64, 128)
                    result[f"{name}, another shape"] = other
                # a checkpoint of zeros is compared, too
                forget()
                zero = dense(kernels()["mxfp4"], "mxfp4", 48, 128, zero=True)
                result[f"{name}, zero weights, {option}"] = zero
        forget()
        with configured("auto"), logged() as lines:
            layer, method = linear_layer(2048, 2112, torch.bfloat16)
            load(method, layer)
            launches.names.clear()
            x = torch.randn(2, 2112).to(torch.bfloat16)
            method.apply(layer, x)
            result[f"{name}, BF16"] = {"launches": list(launches.names), "said": lines}
        for weights in ("real", "zero"):
            forget()
            with configured("auto"), logged() as lines:
                marlin, layer, _ = experts_layer(192, 128, 6)
                if weights == "zero":
                    for tensor in (layer.w13_weight, layer.w2_weight):
                        tensor.zero_()
                load(marlin, layer)
                result[f"{name}, {weights} experts"] = {
                    "used": marlin.uses_decode_kernels,
                    "said": lines,
                }
    launches.spoil = lambda result: result
    forget()
    with configured("auto"):
        kernel = kernels()["mxfp4"]
        for name, k, dtype, largest in (
            ("k = 96", 96, torch.bfloat16, 120),
            ("float16", 128, torch.float16, 120),
            ("a scale of 191", 128, torch.bfloat16, 191),
        ):
            layer = torch.nn.Module()
            weight, scale = random_weight("mxfp4", 48, k)
            scale[7, 1] = largest
            layer.weight, layer.weight_scale, layer.params_dtype = weight, scale, dtype
            with logged() as lines:
                found = kernel._packed(layer)
            result[name] = {"packed": found is not None, "said": lines}
    return result
