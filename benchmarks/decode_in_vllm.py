"""Put the kernels of decode_kernels/ into a vLLM that runs, for ``decode.py --kernels``.

Up to eight rows, Marlin's MXFP4 experts and its MXFP4 dense layers go through them; more rows go
through Marlin, as before. So a dense layer has its weights twice here, which no build would do. The
first calls of each number of rows are compared with Marlin's result, and the largest difference is
printed: Frobenius norm, relative.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROWS = 8
_TOP_K = 4
_CHECKED_LAYERS = 4  # of each kind and number of rows
_library: ctypes.CDLL
_differences: dict[tuple[str, int], list[float]] = {}


def build(folder: Path) -> Path:
    """Compile the kernels for the GPU that is here; returns the library."""
    library = folder / "decode_kernels.so"
    source = Path(__file__).with_name("decode_kernels") / "vllm.cu"
    flags = ("-O3", "-std=c++17", "-arch=native", "-shared", "-Xcompiler", "-fPIC")
    subprocess.run(["nvcc", *flags, "-o", library, source], check=True)
    return library


def install(library: Path) -> None:
    """Replace what vLLM calls; before a model is loaded."""
    global _library  # noqa: PLW0603 - the operators' functions take tensors only
    _library = ctypes.CDLL(str(library))
    from vllm.model_executor.kernels.linear.mxfp4 import marlin
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.utils.torch_utils import direct_register_custom_op

    # opaque to torch.compile: the number of rows is known when a graph is captured, not before
    direct_register_custom_op("decode_mxfp4", _dense, fake_impl=_dense_fake)
    kernel: Any = marlin.MarlinMxFp4LinearKernel
    load = kernel.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        layer.decode_weight, layer.decode_scale = pack(layer.weight.data, layer.weight_scale.data)
        bias = getattr(layer, "bias", None)
        layer.decode_bias = None if bias is None else bias.data.clone()  # Marlin's is permuted
        load(self, layer)

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        k = layer.input_size_per_partition
        y = torch.ops.vllm.decode_mxfp4(
            x.reshape(-1, k),
            layer.weight,
            layer.weight_scale,
            bias,
            layer.decode_weight,
            layer.decode_scale,
            None if bias is None else layer.decode_bias,
            layer.output_size_per_partition,
        )
        return y.reshape(*x.shape[:-1], -1)

    kernel.process_weights_after_loading, kernel.apply_weights = process, apply
    theirs = marlin_moe.fused_marlin_moe

    def experts(**options: Any) -> Any:
        rows = options["hidden_states"].shape[0]
        if rows > ROWS or options["topk_ids"].shape[1] != _TOP_K:
            return theirs(**options)
        if _to_check("experts", rows):
            made_up = _made_up(options)
            theirs(**made_up)
            expected = made_up["output"].clone()
            _compare("experts", expected, _moe(made_up))
        return _moe(options)

    marlin_moe.fused_marlin_moe = experts


def pack(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's weights and scales in the order of dense.cuh.

    Args:
        weight: MXFP4 as uint8 [n, k / 2], the even element in the low nibble; k a multiple of 64.
        scale: E8M0 as uint8 [n, k / 32].

    Returns:
        int32 [n / 16, k / 64, 32, 4] and uint8 [n / 16, k / 64, 8, 2, 2], n rounded up to 16.
    """
    n, tiles = weight.shape[0], weight.shape[1] // 32
    padding = (0, 0, 0, -n % 16)
    weight = torch.nn.functional.pad(weight, padding)
    scale = torch.nn.functional.pad(scale.view(torch.uint8), padding)
    blocks = weight.shape[0] // 16
    words = weight.new_empty((blocks, tiles, 8, 4, 2, 2), dtype=torch.int32)
    for block in range(0, blocks, 1024):  # of lm_head the intermediate would be gigabytes
        some = weight[16 * block : 16 * (block + 1024)].to(torch.int64)
        # row 8r + g, column 64t + 32h + 8q + 2j + i
        some = torch.stack([some & 15, some >> 4], -1).view(-1, 2, 8, tiles, 2, 4, 4, 2)
        word = torch.zeros_like(some[..., 0, 0])
        for j in range(4):
            spread = 15 - 3 * j, 7 - 3 * j, 6 - 3 * j
            sign, exponent, mantissa = (14, 10, 13) if j == 3 else spread
            for i in range(2):
                code = some[..., j, i]
                bits = (code >> 3) << sign | (code >> 1 & 3) << exponent | (code & 1) << mantissa
                word |= bits << 16 * i
        word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
        words[block : block + 1024] = word.permute(0, 3, 2, 5, 4, 1)  # block t g q h r
    scales = scale.view(blocks, 2, 8, tiles, 2).permute(0, 3, 2, 1, 4)  # block t g r h
    return words.view(blocks, tiles, 32, 4), scales.contiguous()


def _dense(
    x: torch.Tensor,
    marlin_weight: torch.Tensor,
    marlin_scale: torch.Tensor,
    marlin_bias: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    rows, k = x.shape
    check = _to_check(f"dense {n} x {k}", rows)
    if rows > ROWS or check:
        theirs: torch.Tensor = marlin_utils_fp4.apply_fp4_marlin_linear(
            x, marlin_weight, marlin_scale, None, None, size_n=n, size_k=k, bias=marlin_bias
        )
        if rows > ROWS:
            return theirs
    x = x.contiguous()
    out = x.new_empty(rows, n)
    _call("dense_mxfp4", (rows, n, k), (x, weight, scale, bias, out))
    if check:
        _compare(f"dense {n} x {k}", theirs, out)
    return out


def _dense_fake(
    x: torch.Tensor,
    marlin_weight: torch.Tensor,
    marlin_scale: torch.Tensor,
    marlin_bias: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], n)


def _moe(options: dict[str, Any]) -> torch.Tensor:
    x, w1, w2 = (options[name] for name in ("hidden_states", "w1", "w2"))
    rows, k = x.shape
    inner = w1.shape[2] // 4  # int32 [experts, k / 16, 2 n], n = 2 inner
    out: torch.Tensor = options["output"]
    tensors = (
        x,
        w1,
        options["w1_scale"],
        options["bias1"],
        w2,
        options["w2_scale"],
        options["bias2"],
        options["topk_ids"],  # int32; -1 in rows that pad a captured graph
        options["topk_weights"],
        x.new_empty(rows * _TOP_K, inner),
        x.new_empty(rows * _TOP_K, k, dtype=torch.float32),
        out,
    )
    _call("moe_mxfp4", (rows, k, inner), tensors)
    return out


def _call(name: str, sizes: tuple[int, ...], tensors: tuple[torch.Tensor | None, ...]) -> None:
    pointers = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if error := getattr(_library, name)(stream, *sizes, *pointers):
        raise RuntimeError(f"{name}: CUDA error {error}")


# -- the comparison with Marlin --------------------------------------------------------------------


def _to_check(kind: str, rows: int) -> bool:
    done = len(_differences.get((kind, rows), ()))
    return rows <= ROWS and done < _CHECKED_LAYERS and not torch.cuda.is_current_stream_capturing()


def _made_up(options: dict[str, Any]) -> dict[str, Any]:
    """Return the same call on other values: made-up experts of a dummy checkpoint are all zero."""

    def bytes_like(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        made = torch.empty(size, dtype=torch.uint8, device=tensor.device).random_(low, high)
        return made.view(tensor.dtype).view(tensor.shape)

    experts, ids = options["w1"].shape[0], options["topk_ids"]
    chosen = [torch.randperm(experts, device=ids.device)[:_TOP_K] for _ in ids]
    return options | {
        "hidden_states": torch.randn_like(options["hidden_states"]),
        "w1": bytes_like(options["w1"], 0, 256),
        "w2": bytes_like(options["w2"], 0, 256),
        "w1_scale": bytes_like(options["w1_scale"], 117, 123),
        "w2_scale": bytes_like(options["w2_scale"], 117, 123),
        "bias1": torch.randn_like(options["bias1"]),
        "bias2": torch.randn_like(options["bias2"]),
        "topk_ids": torch.stack(chosen).to(ids.dtype),
        "topk_weights": torch.rand_like(options["topk_weights"]),
        "output": torch.empty_like(options["output"]),
        "intermediate_cache13": None,
        "intermediate_cache2": None,
    }


def _compare(kind: str, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    theirs = theirs.float()
    difference = float((ours.float() - theirs).norm() / theirs.norm())
    found = _differences.setdefault((kind, ours.shape[0]), [])
    found.append(difference)
    if len(found) == _CHECKED_LAYERS:
        text = f"{kind}, {ours.shape[0]} rows: at most {max(found):.1e} from Marlin"
        print(text, file=sys.stderr, flush=True)
    if not difference < 0.02:  # two roundings to BF16 in another order give less; NaN is more
        raise RuntimeError(f"{kind}, {ours.shape[0]} rows: {difference} from Marlin")
