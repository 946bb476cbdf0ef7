"""What becomes of BF16 layers that are to be packed bit for bit."""

import types
from collections.abc import Callable
from typing import Any

from tests.patches.probes.decode_cache import begin
from tests.patches.probes.decode_device import (
    configured,
    error_of,
    fail,
    forget,
    linear_layer,
    load,
    logged,
    right,
)


def _head(config: Any, n: int, k: int, head_dtype: Any) -> Any:
    """Return an lm_head with random weights, its method set."""
    import torch
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding
    from vllm_sparkforge.model import SparkGptOssForCausalLM

    model, form = config.model_config, config.additional_config["sparkforge"]["mxfp4_layers"]
    model.hf_config = model.hf_text_config = types.SimpleNamespace()
    model.head_dtype = head_dtype
    head = embedding.ParallelLMHead.__new__(embedding.ParallelLMHead)
    torch.nn.Module.__init__(head)
    weight = torch.randn(n, k).to(torch.bfloat16)
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    head.quant_method = embedding.UnquantizedEmbeddingMethod()
    form = form.rpartition("=")[2]
    SparkGptOssForCausalLM._set_head(types.SimpleNamespace(lm_head=head), config, form)
    return head


def lossless_layers(launches: Any) -> dict[str, Any]:
    """Layers that are packed and layers that stay, with what the log says and the cache's key."""
    import torch
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm_sparkforge.decode import dense

    def one(
        power: int | None = 0,
        *,
        n: int = 48,
        k: int = 128,
        dtype: Any = torch.bfloat16,
        option: str = "auto",
        spoil: Callable[[Any], Any] = right,
        head_dtype: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Every 100th column is 2^power times as large; None: all are zero."""
        forget()
        torch.manual_seed(5)
        launches.spoil = spoil
        layers = "qkv=lossless,lm_head=lossless"
        with configured(option, mxfp4_layers=layers, **options) as config, logged() as lines:
            if option != "on":
                begin(config)
            layer = _head(config, n, k, head_dtype) if head_dtype else linear_layer(n, k, dtype)
            layer.weight.data[:, ::100] *= 2.0 ** (power or 0)
            if power is None:
                layer.weight.data.zero_()
            values = layer.weight.data.double()
            load(layer.quant_method, layer)
            key = str(aot_compile_hash_factors(config))
        launches.spoil = right
        found: dict[str, Any] = {"said": lines, "key": key, "errors": [], "launches": []}
        bias = getattr(layer, "bias", None)
        for rows in (1, dense.MX_ROWS + 1):
            launches.names.clear()
            x = torch.randn(rows, k).to(dtype)
            out = layer.quant_method.apply(layer, x, bias)
            wanted = x.double() @ values.T + (0 if bias is None else bias.double())
            found["errors"].append(error_of(out, wanted))
            found["launches"] += launches.names
        found["method"] = type(layer.quant_method).__name__
        found["parameters"] = {
            name: str(one.dtype).removeprefix("torch.") for name, one in layer.named_parameters()
        }
        found["listed"] = len(getattr(layer, "weight_listed", ()))
        return found

    return {
        "packed": one(),
        "packed again": one(),
        "on": one(option="on"),
        "a dummy checkpoint": one(None),
        "a short list": one(-11),
        "a long list": one(-30),
        "a long list, on": one(-30, option="on"),
        "kernels that fail": one(spoil=fail),
        "float16": one(dtype=torch.float16),
        "96 columns": one(k=96),
        "off": one(option="off"),
        "part off": one(off=["layers"]),
        "a failed trial": one(failed="LOSSLESS"),
        "head": one(n=65_552, k=64, head_dtype=torch.bfloat16),
        "a float32 head": one(head_dtype=torch.float32),
    }
