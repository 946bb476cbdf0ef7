"""What becomes of layers whose decode kernels are wrong, or that they cannot take."""

from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import (
    BLOCKS,
    SPOILS,
    configured,
    forget,
    linear_layer,
    load,
    logged,
    random_weight,
    right,
)
from tests.patches.probes.decode_experts import experts_layer

NAMES = ("w13", "w2")


def _kept_in_bf16(form: str) -> dict[str, Any]:
    """A layer without decode kernels."""
    import torch
    from vllm_sparkforge.mx.table import FORMATS

    from tests.patches.probes.decode_device import error_of, mx_layer

    with configured("off", mxfp4_layers=f"qkv={form}"), logged() as lines:
        layer = mx_layer(form)
    x = torch.randn(3, 128).to(torch.bfloat16)
    out, _ = layer(x)
    wanted = x.double() @ layer.weight.double().T + layer.bias.double()
    names = [name for name, _ in layer.named_parameters()]
    kept, kind = layer.weight.data, FORMATS[form]
    rounded = torch.equal(kind.dequantise(*kind.quantise(kept)), kept)
    found = {"parameters": names, "as loaded": not rounded}
    return found | {"error": error_of(out, wanted), "said": lines}


def _draws() -> dict[int, list[bool]]:
    """Whether every one of so many experts is compared, and a row's are four."""
    import torch
    from vllm_sparkforge.decode import expertcheck

    found = {}
    for count in (4, 6, 32, 128):
        rows = [row for ids in expertcheck._draws(count, torch.device("cpu")) for row in ids]
        seen = {int(one) for row in rows for one in row}
        found[count] = [seen == set(range(count)), all(len(set(row.tolist())) == 4 for row in rows)]
    return found


def _order(*, wrong: bool) -> list[Any]:
    """Whether experts are used; ``wrong``: in another order, which Marlin and the kernels read."""
    import torch
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
    from vllm_sparkforge.decode import expertcheck
    from vllm_sparkforge.quant import MoEMethod

    forget()
    kept: list[Any] = []
    with configured("auto"), logged() as lines:
        marlin, layer, data = experts_layer(192, 128, 6)
        if wrong:
            layer.w13_weight.data[-1] = layer.w13_weight.data[-1].flip(0)
        names = [f"{name}_{what}" for what in ("weight", "weight_scale", "bias") for name in NAMES]

        def convert(self: Any, layer: Any, *tensors: Any) -> None:
            kept.append(layer.decode_last_expert)
            load(marlin, layer)

        with mock.patch.object(GptOssMxfp4MoEMethod, "_setup_kernel", new=convert):
            given = [torch.nn.Parameter(data[name], requires_grad=False) for name in names]
            MoEMethod.__new__(MoEMethod)._setup_kernel(layer, *given)
    (last,) = kept
    same = all(torch.equal(one[0], data[name][-1]) for one, name in zip(last, names, strict=True))
    assert isinstance(last, expertcheck.Checkpoint)
    return [marlin.uses_decode_kernels, same, hasattr(layer, "decode_last_expert"), lines]


def self_check(launches: Any) -> dict[str, Any]:
    """What becomes of layers whose kernels are wrong."""
    import torch
    from vllm_sparkforge.decode import selfcheck
    from vllm_sparkforge.mx.linear import DecodeKernel
    from vllm_sparkforge.mx.table import FORMATS

    def dense(
        kind: str,
        n: int,
        k: int,
        dtype: Any = torch.bfloat16,
        largest: int = 120,
        *,
        zero: bool = False,
    ) -> dict[str, Any]:
        layer = torch.nn.Module()
        weight, scale, *factor = random_weight(kind, n, k)
        if factor:
            factor[0].fill_(2.0 ** (largest - 127))
        else:
            scale[7, 1] = 2.0 ** (largest - 127) if kind.startswith("int") else largest
        if zero:
            weight = torch.zeros_like(weight.view(torch.uint8)).view(weight.dtype)
        for attribute, one in zip(FORMATS[kind].names, (weight, scale, *factor), strict=True):
            setattr(layer, attribute, torch.nn.Parameter(one, requires_grad=False))
        layer.params_dtype = dtype
        layer.output_size_per_partition, layer.input_size_per_partition = n, k
        found: dict[str, Any] = {}

        class Fallback:
            def process_weights_after_loading(self, layer: Any) -> None:
                # what it gets are weights that nobody has packed
                found["fallback"] = bool((layer.weight.data == weight).all())

            def apply_weights(self, layer: Any, x: Any, bias: Any) -> Any:
                return "by the fallback"

        kernel = DecodeKernel(FORMATS[kind], Fallback())
        with logged() as lines:
            try:
                load(kernel, layer)
            except RuntimeError as error:
                found["raised"] = str(error)
        found["packed"] = layer.weight.dtype == torch.int32
        found["said"] = lines
        if "raised" not in found:
            launches.names.clear()
            try:
                out = kernel.apply_weights(layer, torch.ones(2, k, dtype=torch.bfloat16), None)
                found["computed"] = list(launches.names) or out
            except RuntimeError as error:
                found["computed"] = str(error)
        return found

    result: dict[str, Any] = {}
    before = torch.get_rng_state()
    selfcheck.passes("MXFP4", (1, 1), True, lambda: float(torch.rand(1)) * 0)
    result["same random numbers"] = bool((torch.get_rng_state() == before).all())

    for name, spoil in SPOILS.items():
        for option in ("auto", "on"):
            launches.spoil = spoil
            forget()
            with configured(option):
                for kind in BLOCKS:
                    result[f"{name}, {kind}, {option}"] = dense(kind, 48, 128)
                if option == "auto":
                    result[f"{name}, another shape"] = dense("mxfp4", 64, 128)
                # a checkpoint of zeros is compared, too
                forget()
                for kind in BLOCKS:
                    result[f"{name}, zero {kind}, {option}"] = dense(kind, 48, 128, zero=True)
        forget()
        with configured("auto"), logged() as lines:
            layer = linear_layer(2048, 2112, torch.bfloat16)
            load(layer.quant_method, layer)
            launches.names.clear()
            x = torch.randn(2, 2112).to(torch.bfloat16)
            layer.quant_method.apply(layer, x)
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
    launches.spoil = right
    forget()
    with configured("auto"):
        result["k = 96"] = dense("mxfp4", 48, 96)
        result["float16"] = dense("mxfp4", 48, 128, torch.float16)
        result["a scale of 191"] = dense("mxfp4", 48, 128, largest=191)
        result["a scale of 2**64"] = dense("int8", 48, 128, largest=191)
        result["a factor of 2**55"] = dense("nvfp4", 48, 128, largest=182)
    result["kept in BF16"] = {form: _kept_in_bf16(form) for form in ("int8", "int6")}
    result["draws"] = _draws()
    result["orders"] = {wrong: _order(wrong=wrong) for wrong in (False, True)}
    return result
