"""Weight-only dense layers at gpt-oss-120b's shapes: Marlin with MXFP4 and MXFP8 against BF16.

    python benchmarks/h200_dense.py --json dense.jsonl

For each layer, format and batch size: the time of a product, that of BF16
`torch.nn.functional.linear` over it, the bytes that it reads as a share of the copy bandwidth of
the same run, and its distance from a product in float32 whose weights are expanded by this script.

A layer of 8 MB would stay in the cache between two products, which no layer of a model does: a pass
goes over copies of it that are together larger than any cache, and a CUDA graph replays it, so that
launches from Python are no part of the time.

Needs a GPU, and a vLLM on the Python path with the release wheel's extension `_C_stable_libtorch`:
weight preparation and kernels are vLLM's own. `--quantiser plugin` takes those of our plugin,
else this script's are used. `--dry-run` checks the rest on a CPU, with small shapes and no vLLM.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import (
    Report,
    Step,
    conditions,
    copy_bandwidth,
    distance,
    expand,
    kernels,
    machine,
    markdown,
    quantise,
    seconds,
)

# (out, in, bias) of gpt-oss-120b
LAYERS: dict[str, tuple[int, int, bool]] = {
    "qkv": (5120, 2880, True),
    "o": (2880, 4096, True),
    "lm_head": (201_088, 2880, False),
}
SMALL: dict[str, tuple[int, int, bool]] = {"qkv": (256, 128, True), "lm_head": (512, 64, False)}
FORMATS = ("mxfp4", "mxfp8")
BATCHES = (1, 2, 4, 8, 16, 32, 64)

BEYOND_CACHE = 512 << 20
"""Bytes of weights in one pass, at the least; an H200 caches 50 MB."""

SLICE = 8192
"""Rows that are made, quantised or multiplied in float32 at once: 96 MB."""

TOLERANCE = 0.004
"""Of |output - reference| / |reference|: the result is rounded to BF16 (2**-9 at the most, 0.0017
RMS), and partial sums are added in another order."""


def slices(rows: int) -> Iterator[slice]:
    """Cut rows into pieces of ``SLICE``."""
    for start in range(0, rows, SLICE):
        yield slice(start, min(start + SLICE, rows))


def heavy_tailed(rows: int, columns: int, device: str) -> torch.Tensor:
    """Return BF16 weights [rows, columns] with outliers, as trained ones have."""
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
    for part in slices(rows):
        normal, other = torch.randn(2, *weight[part].shape, device=device)
        weight[part] = 0.02 * normal / (0.5 + other.abs())
    return weight


def product(
    x: torch.Tensor, rows: int, weight: Callable[[slice], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x [M, K] times the weight [rows, K] in float32, a slice of its rows at a time."""
    out = torch.cat([x.float() @ weight(part).float().T for part in slices(rows)], -1)
    return out if bias is None else out + bias.float()


class Layer(torch.nn.Module):  # type: ignore[misc]
    """What vLLM's functions read of a linear layer, and rewrite."""

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.output_size_per_partition = codes.shape[0]
        self.input_size_per_partition = scales.shape[1] * 32
        self.params_dtype = torch.bfloat16
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)


Linear = Callable[[torch.Tensor], torch.Tensor]


def copies_of(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return so many copies of a layer's tensors that one pass over them leaves no cache warm."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    least = BEYOND_CACHE if tensors[0].is_cuda else size
    return [[tensor.clone() for tensor in tensors] for _ in range(-(-least // size))]


def marlin(
    fmt: str, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> tuple[list[Linear], int]:
    """Return the layer as vLLM computes it with Marlin, several times, and the bytes of one."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4, marlin_utils_fp8

    layer = Layer(codes, scales, bias)
    rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
    if fmt == "mxfp4":
        marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
        apply = functools.partial(
            marlin_utils_fp4.apply_fp4_marlin_linear, weight_global_scale=None
        )
    else:
        marlin_utils_fp8.prepare_mxfp8_layer_for_marlin(layer)
        apply = functools.partial(marlin_utils_fp8.apply_mxfp8_marlin_linear)
    # Locks of the kernel: it leaves them at zero. Four blocks to a multiprocessor at the most.
    processors = torch.cuda.get_device_properties(codes.device).multi_processor_count
    workspace = torch.zeros(4 * processors, dtype=torch.int32, device=codes.device)

    def linear(weight: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return apply(
            input=x,
            weight=weight,
            weight_scale=scale,
            workspace=workspace,
            size_n=rows,
            size_k=columns,
            bias=layer.bias,
        )

    tensors = [layer.weight.data, layer.weight_scale.data]
    made = [functools.partial(linear, *copy) for copy in copies_of(tensors)]
    return list(made), nbytes([*tensors, *([] if bias is None else [bias])])


def plain(
    fmt: str, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> tuple[list[Linear], int]:
    """Stand in for `marlin` in a dry run: the expanded weight, the result rounded to BF16."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        out = product(x, codes.shape[0], lambda part: expand(fmt, codes[part], scales[part]), bias)
        return out.to(x.dtype)

    return [linear], nbytes([codes, scales, *([] if bias is None else [bias])])


def nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def plugin_quantise(fmt: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with our plugin's functions."""
    from vllm_sparkforge.mx import formats

    codes, scales = getattr(formats, f"{fmt}_quantize")(weight)
    return codes, scales


def run(layers: Sequence[Linear], x: torch.Tensor) -> None:
    """Go through the copies of a layer."""
    for layer in layers:
        layer(x)


def measure_layer(
    name: str,
    size: tuple[int, int, bool],
    arguments: argparse.Namespace,
    bandwidth: float,
    report: Report,
) -> None:
    """Measure one layer: a line of the report for each format and batch size."""
    device = "cpu" if arguments.dry_run else "cuda"
    rows, columns, has_bias = size
    weight = heavy_tailed(rows, columns, device)
    # Small beside the product, which it would hide from the distances.
    bias = 0.1 * torch.randn(rows, device=device).to(torch.bfloat16) if has_bias else None
    inputs = torch.randn(max(arguments.batch), columns, device=device).to(torch.bfloat16)

    cases: dict[str, tuple[list[Linear], int]] = {}
    exact: dict[str, torch.Tensor] = {}
    cases["bf16"] = (
        [functools.partial(F.linear, weight=copy[0], bias=bias) for copy in copies_of([weight])],
        nbytes([weight, *([] if bias is None else [bias])]),
    )
    exact["bf16"] = product(inputs, rows, weight.__getitem__, bias)
    for fmt in FORMATS:
        quantiser = plugin_quantise if arguments.quantiser == "plugin" else quantise
        parts = [quantiser(fmt, weight[part]) for part in slices(rows)]
        codes, scales = (torch.cat([part[index] for part in parts]) for index in range(2))
        del parts

        def expanded(
            part: slice, fmt: str = fmt, codes: torch.Tensor = codes, scales: torch.Tensor = scales
        ) -> torch.Tensor:
            return expand(fmt, codes[part], scales[part])

        exact[fmt] = product(inputs, rows, expanded, bias)
        cases[fmt] = (plain if arguments.dry_run else marlin)(fmt, codes, scales, bias)

    for batch in arguments.batch:
        x = inputs[:batch].contiguous()
        steps: dict[str, Step] = {
            fmt: functools.partial(run, layers, x) for fmt, (layers, _) in cases.items()
        }
        if arguments.profile:
            for fmt, step in steps.items():
                report.add(
                    {
                        "kind": "kernels",
                        "layer": name,
                        "format": fmt,
                        "batch": batch,
                        "kernels": kernels(step),
                    }
                )
        taken = seconds(steps, device, arguments.rounds)
        each = {fmt: [time / len(cases[fmt][0]) for time in times] for fmt, times in taken.items()}
        for fmt, (layers, size_of_one) in cases.items():
            middle = statistics.median(each[fmt])
            away = distance(layers[0](x), exact[fmt][:batch])
            report.add(
                {
                    "kind": "product",
                    "layer": name,
                    "shape": [rows, columns],
                    "format": fmt,
                    "batch": batch,
                    "copies": len(layers),
                    "bytes": size_of_one,
                    "us": middle * 1e6,
                    "us_least": min(each[fmt]) * 1e6,
                    "us_most": max(each[fmt]) * 1e6,
                    "ratio": statistics.median(each["bf16"]) / middle,
                    "share": size_of_one / middle / bandwidth,
                    "distance": away,
                    "right": away < TOLERANCE,
                    # How far quantising itself goes: the control of the distance.
                    "distance_of_format": distance(exact[fmt], exact["bf16"]),
                }
            )


def table(report: Report) -> str:
    """Return the report as Markdown."""
    about = report.rows[0]
    head = ["layer", "batch", "format", "MB", "µs (least–most)", "BF16 / this", "share of copy"]
    head += ["distance", "of the format"]
    rows = [
        [
            row["layer"],
            str(row["batch"]),
            row["format"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['us']:.1f} ({row['us_least']:.1f}–{row['us_most']:.1f})",
            f"{row['ratio']:.2f}",
            f"{row['share']:.0%}",
            f"{row['distance']:.4f}" + ("" if row["right"] else " WRONG"),
            f"{row['distance_of_format']:.4f}",
        ]
        for row in report.rows
        if row["kind"] == "product"
    ]
    return f"{conditions(about)}\n\n{markdown(head, rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a product is wrong, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", nargs="+", help=f"of {', '.join(LAYERS)}; all by default")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quantiser", choices=("own", "plugin"), default="own")
    parser.add_argument("--json", type=Path, help="file for the lines of JSON")
    parser.add_argument("--profile", action="store_true", help="and each kernel's time (in --json)")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, without vLLM")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.rounds = 2
        if arguments.profile:
            parser.error("--profile needs a GPU")
    elif not torch.cuda.is_available():
        print("h200_dense: needs a CUDA GPU (or --dry-run)", file=sys.stderr)
        return 2
    layers: dict[str, Any] = SMALL if arguments.dry_run else LAYERS
    names = arguments.layer or list(layers)
    if unknown := [name for name in names if name not in layers]:
        parser.error(f"no layer {', '.join(unknown)}; there are {', '.join(layers)}")
    # vLLM's preparation of MXFP8 scales goes by it.
    torch.set_default_dtype(torch.bfloat16)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(arguments.seed)
    device = "cpu" if arguments.dry_run else "cuda"
    report = Report(arguments.json)
    with torch.inference_mode():
        bandwidth = copy_bandwidth(device, arguments.rounds)
        report.add({"kind": "machine", **machine(device), "copy_bandwidth": bandwidth})
        for name in names:
            measure_layer(name, layers[name], arguments, bandwidth, report)
            if device == "cuda":
                torch.cuda.empty_cache()
    print(table(report))
    return 0 if all(row.get("right", True) for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
