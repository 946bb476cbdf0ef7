"""What the decode kernels' operators give, with the contract in place of the kernels."""

import types
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import (
    BLOCKS,
    configured,
    elements_of,
    error_of,
    fake_shape,
    forget,
    linear_layer,
    load,
    random_weight,
    values_of,
)

UNITS = {"mxfp4": 126, "mxfp8": 120, "int8": 133, "int6": 133, "nvfp4": 126}
"""How far below a weight's value the BF16 number is that the kernels read for it."""


def packing(places: dict[str, Any]) -> dict[str, Any]:
    """Whether the packing puts every code where dense.cuh's own functions put it, and whether its
    lanes read a BF16 number that is what the code stands for times a power of two."""
    import torch
    from vllm_sparkforge.mx import lossless, tiles
    from vllm_sparkforge.mx.table import FORMATS

    same = {}
    for kind, table in places["packed"].items():
        n, k, pack = table["n"], table["k"], FORMATS[kind].pack
        codes = torch.tensor(table["codes"], dtype=torch.uint8).view(n, k)
        scale = torch.tensor(table["scales"], dtype=torch.int16).view(n, k // BLOCKS[kind])
        if kind.startswith("int"):  # sign and magnitude
            sign = 1 << int(kind[-1]) - 1
            weight = torch.where(codes >= sign, sign - codes.to(torch.int16), codes).to(torch.int8)
            scale = scale.view(torch.bfloat16)
        else:
            scale = scale.to(torch.uint8)
            pairs = codes[:, ::2] | codes[:, 1::2] << 4
            weight = codes.view(torch.float8_e4m3fn) if kind == "mxfp8" else pairs
        tensors = [weight, scale, *([torch.tensor(1.0)] if kind == "nvfp4" else [])]
        tiles._PACKED_ELEMS = 1  # a block at a time
        words, scales, *_ = pack(*tensors)
        same[f"{kind} weights"] = words.flatten().tolist() == table["words"]
        plain = scales.view(torch.int16) if kind.startswith("int") else scales
        same[f"{kind} scales"] = plain.flatten().tolist() == table["packed_scales"]
        tiles._PACKED_ELEMS = 8 << 20
        again = pack(*tensors)
        same[f"{kind} at once"] = bool((again[0] == words).all() and (again[1] == scales).all())
        read = (torch.tensor(table["read"], dtype=torch.int32) << 16).view(torch.float32)
        found = read.to(torch.float64).view(16, 64) * 2.0 ** UNITS[kind]
        wanted = elements_of(kind, weight)[:16, :64]
        same[f"{kind} read"] = bool(((found == wanted) | wanted.isnan()).all())
    table = places["lossless"]
    n, k = table["n"], table["k"]
    code = torch.tensor(table["codes"], dtype=torch.int32).view(n, k)
    operand = code >> 11 << 15 | code & 2047
    same["lossless read"] = operand[:16, :64].flatten().tolist() == table["read"]
    bits = operand + (90 << 7) * (code & 2047 != 0)
    words, _, _ = lossless.encode(bits.to(torch.int16).view(torch.bfloat16))
    same["lossless weights"] = words.flatten().tolist() == table["words"]
    return same


def marlin_order(places: dict[str, Any]) -> dict[str, bool]:
    """Whether experts.cuh and marlin_layout.py agree on Marlin's order."""
    import torch

    from tests.patches.probes import marlin_layout

    rows, columns = marlin_layout._tile()
    place = torch.tensor(places["place"])  # lane, word, nibble, then k and n
    # a lane's 16 bytes are four words of the tile's 128
    place = place.view(128, 8, 2)
    scale = torch.zeros(64)
    scale[torch.tensor(places["scale_at"])] = torch.arange(64.0)
    column = torch.arange(64).reshape(8, 8).T.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
    bias = marlin_layout.bias(torch.arange(32.0))
    return {
        "k": bool((place[..., 0].flatten() == rows).all()),
        "n": bool((place[..., 1].flatten() == columns).all()),
        "scales": scale.tolist() == column.tolist(),
        "biases": bias.tolist() == [float(at) for at in places["bias_at"]],
    }


SHAPES = {
    # n, k, numbers of rows
    "narrow": (40, 192, (0, 1, 7, 8, 9, 16, 17, 64, 65)),
    "half an o": (32, 2048, (1, 9)),  # one of two ranks has these columns
    "long": (32, 3136, (1, 9)),
    "wide": (65_552, 64, (1, 9, 17)),
    "expanded in slices": (16_400, 64, (65,)),
}


def dense_layers(launches: Any) -> dict[str, Any]:
    """Errors of the MX operator against the definition, and the kernels that it launched."""
    import torch
    from vllm_sparkforge.decode import dense, module
    from vllm_sparkforge.mx.table import FORMATS, LOSSLESS

    result = {}
    for kind in (*BLOCKS, "lossless"):
        for name, (n, k, counts) in SHAPES.items():
            tensors = random_weight(kind, n, k)
            packed, values = FORMATS.get(kind, LOSSLESS).pack(*tensors), values_of(kind, *tensors)
            bias = torch.randn(n).to(torch.bfloat16)
            for count in counts:
                launches.names.clear()
                # not contiguous, and not on a boundary of 16 bytes
                x = torch.randn(count, k + 1).to(torch.bfloat16)[:, 1:]
                out = dense.mx_linear(x, kind, packed, bias, n)
                wanted = x.to(torch.float64) @ values.T + bias.to(torch.float64)
                result[f"{kind} {name} {count}"] = {
                    "error": error_of(out, wanted) if count else 0.0,
                    "shape": list(out.shape),
                    "launches": list(launches.names),
                    "fake": fake_shape(dense.mx_linear, x, kind, packed, bias, n),
                }

    def one(n: int, k: int, x: Any) -> dict[str, Any]:
        """Without a bias."""
        weight, scale = random_weight("mxfp4", n, k)
        packed = FORMATS["mxfp4"].pack(weight, scale)
        launches.names.clear()
        out = dense.mx_linear(x, "mxfp4", packed, None, n)
        return {
            "error": error_of(out, x.to(torch.float64) @ values_of("mxfp4", weight, scale).T),
            "shape": list(out.shape),
            "launches": list(launches.names),
            "fake": fake_shape(dense.mx_linear, x, "mxfp4", packed, None, n),
        }

    def random(*shape: int) -> Any:
        return torch.randn(*shape).to(torch.bfloat16)

    result["without a bias, three dimensions"] = one(48, 128, random(2, 3, 128))
    # an offset of half a boundary
    x = random(129)[1:].view(1, 128)
    result["an address that is no multiple of 16"] = one(48, 128, x)
    # less shared memory than the rows of lm_head take
    with mock.patch.object(module, "max_shared_memory", lambda device: 16 * 96 * 2 - 1):
        result["wide without the shared memory"] = one(65_552, 64, random(9, 64))
    return result


def bf16_layers(launches: Any) -> dict[str, Any]:
    """Unquantized linear layers: which calls go through the kernels, and their errors."""
    import torch

    ours, others = "gpt_oss_mxfp4", None
    cases = {
        "large": (2048, 2112, torch.bfloat16, "auto", ours),
        "small": (128, 2880, torch.bfloat16, "auto", ours),
        "odd": (2112, 2080, torch.bfloat16, "auto", ours),
        "float16": (2048, 2112, torch.float16, "auto", ours),
        "another model": (2048, 2112, torch.bfloat16, "auto", others),
        "another model, on": (2048, 2112, torch.bfloat16, "on", others),
        "large, on": (2048, 2112, torch.bfloat16, "on", ours),
        "off": (2048, 2112, torch.bfloat16, "off", ours),
    }
    result: dict[str, Any] = {}
    for name, (n, k, dtype, option, quantization) in cases.items():
        forget()
        with configured(option):
            layer = linear_layer(n, k, dtype, quantization)
            load(layer.quant_method, layer)
            result[name] = {}
            for shape in ((0,), (1,), (2, 8), (17,)):
                launches.names.clear()
                x = torch.randn(*shape, k).to(dtype)
                out = layer.quant_method.apply(layer, x, layer.bias)
                wanted = torch.nn.functional.linear(
                    x.double(), layer.weight.double(), layer.bias.double()
                )
                result[name][str(shape)] = {
                    "launches": list(launches.names),
                    "error": error_of(out, wanted) if out.numel() else 0.0,
                    "same shape": out.shape == wanted.shape,
                }
                if getattr(layer, "uses_decode_kernels", False):
                    operator = torch.ops.sparkforge.bf16_linear
                    fake = fake_shape(operator, x, layer.weight, layer.bias)
                    result[name][str(shape)]["fake"] = fake == list(wanted.shape)
    return result


def head(launches: Any) -> list[str]:
    """Launches of an unquantized lm_head, after those of its self-check."""
    import torch
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding
    from vllm_sparkforge.model import SparkGptOssForCausalLM

    head = embedding.ParallelLMHead.__new__(embedding.ParallelLMHead)
    torch.nn.Module.__init__(head)
    head.weight = torch.nn.Parameter(torch.randn(65_600, 64).to(torch.bfloat16))
    head.quant_method = embedding.UnquantizedEmbeddingMethod()
    with configured("auto") as config:
        SparkGptOssForCausalLM._set_head(types.SimpleNamespace(lm_head=head), config, None)
        load(head.quant_method, head)
    launches.names.clear()
    head.quant_method.apply(head, torch.randn(3, 64).to(torch.bfloat16))
    return list(launches.names)
