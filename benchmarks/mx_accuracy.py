"""How far MXFP4 and MXFP8 move a weight, and a product with it: what --mxfp4-layers costs.

    PYTHON benchmarks/mx_accuracy.py [--model FOLDER]... [--json OUT.json]

PYTHON: an interpreter with our plugin of vLLM, e.g. that of the cpu target's environment; MXFP4 and
MXFP8 are its own quantisers. Nobody here has the weights of gpt-oss, so these are made up at the
shapes of gpt-oss-120b, from what trained weights are known to do: heavier tails than a normal
distribution, and outliers that sit in input channels.
With --model, the matrices of a checkpoint are measured instead: FOLDER has its *.safetensors. Of
matrices that differ in the layer's number only (and of queries, keys and values), 8192 rows
together, evenly spread.

For each matrix and format: the relative error of the weight, ||Q(W) - W|| / ||W|| (Frobenius), and
of y = W x for activations with outlier channels. For MXFP4, also with other scales:

    mxfp4           of all powers of two the one with the least squared error
    mxfp4 largest   the exponent of the block's largest magnitude, rounded to two bits, less two
    mxfp4 OCP       without that rounding: the conversion in the OCP MX text
    mxfp8           the smallest power of two with which nothing is cut off
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from vllm_sparkforge.mx import formats

BLOCK = 32
MAX_ROWS = 8192
"""Rows of a layer that are measured: all but the head's 201,088 are fewer."""

# (out, in) at gpt-oss-120b
SHAPES = {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201_088, 2880)}

STANDARD_DEVIATION = 0.02
OUTLIER_SHARE = 0.005
OUTLIER_FACTOR = 20.0
COLUMNS_OF_X = 64

Quantise = Callable[[torch.Tensor], torch.Tensor]
Errors = dict[str, dict[str, float]]


def vllm_mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """What vLLM multiplies with, by the plugin, [N, K] in float32."""
    values: torch.Tensor = formats.mxfp4_dequantize(*formats.mxfp4_quantize(weight))
    return values.float()


def vllm_mxfp8(weight: torch.Tensor) -> torch.Tensor:
    """As vllm_mxfp4, for MXFP8."""
    values: torch.Tensor = formats.mxfp8_dequantize(*formats.mxfp8_quantize(weight))
    return values.float()


def e2m1(blocks: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 32] rounded to E2M1 under scales of 2**exponent [...]; ties to even codes."""
    # 2**exponent, from its bits, so exact
    scale = (exponent + 127 << 23).view(torch.float32).unsqueeze(-1)
    size = (blocks.abs() / scale).clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # torch.round takes ties to the even multiple, whose code is even too
    return torch.copysign(torch.round(size / step) * step * scale, blocks)


def exponents(blocks: torch.Tensor, limit: float) -> torch.Tensor:
    """The smallest exponent that puts a block's largest magnitude below `limit`, int32."""
    largest = blocks.abs().amax(dim=-1).clamp(min=2.0**-100)
    return torch.frexp(largest / limit).exponent


# Seven is where rounding to two bits carries.
OCP, CARRIED = 8.0, 7.0


def with_scale(limit: float) -> Quantise:
    """MXFP4 whose scale follows from a block's largest magnitude."""

    def quantise(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.float().unflatten(-1, (-1, BLOCK))
        return e2m1(blocks, exponents(blocks, limit)).flatten(-2)

    return quantise


FORMATS: dict[str, Quantise] = {
    "mxfp4": vllm_mxfp4,
    "mxfp8": vllm_mxfp8,
    "mxfp4 largest": with_scale(CARRIED),
    "mxfp4 OCP": with_scale(OCP),
}


def made_up(rows: int, columns: int, kind: str, seed: int) -> torch.Tensor:
    """A weight [rows, columns] in BF16."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    if kind.startswith("student"):
        # a normal value over the root of a mean of squares of as many as there are degrees
        degrees = int(kind.partition(" ")[2])
        squares = torch.zeros(rows, columns)
        for _ in range(degrees):
            squares += torch.randn(rows, columns, generator=generator).square()
        weight /= (squares / degrees).sqrt()
    elif kind == "outlier columns":
        weight[:, _some(columns, generator)] *= OUTLIER_FACTOR
    else:
        assert kind == "normal"
    return (weight * STANDARD_DEVIATION).bfloat16()


def _some(count: int, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.randperm(count, generator=generator)
    return chosen[: max(1, round(count * OUTLIER_SHARE))]


KINDS = (
    "normal",
    "student 5",
    "outlier columns",
)


def activations(columns: int, seed: int) -> torch.Tensor:
    """[columns, COLUMNS_OF_X] as behind a norm: of one size but for a few channels that are large
    for every token, which transformers are known for."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(columns, COLUMNS_OF_X, generator=generator)
    x[_some(columns, generator)] *= OUTLIER_FACTOR
    return x


def measure(weight: torch.Tensor, seed: int) -> Errors:
    """Errors of every format on one weight [N, K]."""
    exact = weight.float()
    x = activations(exact.shape[1], seed)
    y = exact @ x
    results: Errors = {}
    for name, quantise in FORMATS.items():
        error = quantise(weight) - exact
        results[name] = {
            "weight": float(error.norm() / exact.norm()),
            "product": float((error @ x).norm() / y.norm()),
        }
    return results


def check_least(weight: torch.Tensor) -> None:
    """No scale from a quarter to four times the largest magnitude's has less error than vLLM's."""
    blocks = weight.double().unflatten(-1, (-1, BLOCK))
    ours = (vllm_mxfp4(weight).double().unflatten(-1, (-1, BLOCK)) - blocks).square().sum(-1)
    exponent = exponents(blocks.float(), CARRIED)
    for shift in range(-2, 3):
        other = (e2m1(blocks.float(), exponent + shift).double() - blocks).square().sum(-1)
        if (ours > other * (1 + 1e-9)).any():
            raise SystemExit("vLLM's MXFP4 quantiser is not what this file says it is")


def of_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of a checkpoint in BF16 by name, sampled, those of all layers under one another."""
    groups: dict[tuple[str, int], list[tuple[Path, str, int]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                shape = part.get_shape()
                floats = part.get_dtype() in ("BF16", "F16", "F32")
                if floats and len(shape) == 2 and shape[1] % BLOCK == 0 and min(shape) >= 4 * BLOCK:
                    kind = re.sub(r"\b[qkv]_proj\b", "qkv_proj", re.sub(r"\.\d+\.", ".*.", name))
                    groups.setdefault((kind, shape[1]), []).append((path, name, shape[0]))
    if not groups:
        raise SystemExit(f"{folder} has no matrices in *.safetensors")
    for (kind, _), members in groups.items():
        step = -(-sum(rows for _, _, rows in members) // MAX_ROWS)
        parts = []
        for path, name, _ in members:
            with safe_open(path, framework="pt") as file:
                parts.append(file.get_tensor(name)[::step].bfloat16())
        yield kind, torch.cat(parts)


def print_tables(results: dict[str, Errors]) -> None:
    """Print Markdown."""
    for field, title in (("weight", "of the weight"), ("product", "of y = W x")):
        print(f"\nrelative error {title}\n")
        print(f"| {' | '.join(('layer, weights', *FORMATS))} |\n|{'---|' * (len(FORMATS) + 1)}")
        for label, errors in results.items():
            cells = [f"{errors[name][field]:.4f}" for name in FORMATS]
            print(f"| {label} | {' | '.join(cells)} |")


def main() -> None:
    """Print Markdown tables; with --json write every figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument(
        "--rows", type=int, default=MAX_ROWS, help="of a made-up layer, at the most"
    )
    options = parser.parse_args()

    def layers() -> Iterator[tuple[str, torch.Tensor]]:
        for folder in options.model:
            yield from of_checkpoint(folder)
        for number, (layer, (rows, columns)) in enumerate(SHAPES.items()):
            for kind in KINDS if not options.model else ():
                weight = made_up(min(rows, options.rows), columns, kind, seed=number)
                yield f"{layer}, {kind}", weight

    start = time.monotonic()
    results: dict[str, Errors] = {}
    for number, (label, weight) in enumerate(layers()):
        check_least(weight[:512])
        results[label] = measure(weight, seed=100 + number)
    print_tables(results)
    print(f"\n{time.monotonic() - start:.0f} s, torch {torch.__version__}")
    if options.json:
        document = {"torch": torch.__version__, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
