"""How far MXFP4 and MXFP8 move a weight, and a product with it: --mxfp4-layers' cost in accuracy.

    PYTHON benchmarks/mx_accuracy.py [--trained FILE.safetensors]... [--json OUT.json]

PYTHON: an interpreter with the patched vLLM, e.g. that of the cpu target's environment; its own
quantisers are measured. Nobody here has the weights of gpt-oss, so these are made up at the shapes
of gpt-oss-120b, from what trained weights are known to do: heavier tails than a normal
distribution, and outliers that sit in single elements, in input channels or in output rows. With
--trained, the matrices of a model that someone trained are measured too.

For each matrix and format: the relative error of the weight, ||Q(W) - W|| / ||W|| (Frobenius), the
same as a signal-to-noise ratio in dB, the worst single row, and the relative error of y = W x for
activations with outlier channels. Beside the scale rule that the code has stand the ones that it
could have had:

    mxfp4          the exponent of the block's largest magnitude, rounded to two bits, less two
    mxfp4 floor    without that rounding: the conversion in the OCP MX text
    mxfp4 ceil     the smallest scale with which nothing is cut off
    mxfp4 best     the one of these (and half, and twice) with the least squared error
    mxfp8          the smallest scale with which nothing is cut off
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils import mxfp4_utils, mxfp8_utils

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


def vllm_mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """What the patched vLLM multiplies with, [N, K] in float32."""
    values: torch.Tensor = mxfp4_utils.dequant_mxfp4_to_bf16(
        *mxfp4_utils.mxfp4_quantize_torch(weight)
    )
    return values.float()


def vllm_mxfp8(weight: torch.Tensor) -> torch.Tensor:
    """As vllm_mxfp4, for MXFP8."""
    values: torch.Tensor = mxfp8_utils.dequant_mxfp8_to_bf16(
        *mxfp8_utils.mxfp8_quantize_weight_torch(weight)
    )
    return values.float()


def e2m1(blocks: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 32] rounded to E2M1 under scales of 2**exponent [...]; ties to even codes."""
    scale = (exponent + 127 << 23).view(torch.float32).unsqueeze(-1)  # from its bits: exact
    size = (blocks.abs() / scale).clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # torch.round takes ties to the even multiple, whose code is even too
    return torch.copysign(torch.round(size / step) * step * scale, blocks)


def exponents(blocks: torch.Tensor, rule: str) -> torch.Tensor:
    """The exponent of each block's scale under a rule for MXFP4, int32."""
    largest = blocks.abs().amax(dim=-1).clamp(min=2.0**-120)
    fraction, exponent = torch.frexp(largest)  # fraction in [0.5, 1)
    floor = exponent - 1 - 2
    if rule == "floor":
        return floor
    if rule == "ceil":
        return floor + (fraction > 0.75)  # beyond six in units of the floor's scale
    assert rule == "round"
    return floor + (fraction >= 0.875)  # seven and more


def with_rule(rule: str) -> Quantise:
    """MXFP4 under a scale rule, written from the definition."""

    def quantise(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.float().unflatten(-1, (-1, BLOCK))
        if rule != "best":
            return e2m1(blocks, exponents(blocks, rule)).flatten(-2)
        best, least = blocks, torch.full(blocks.shape[:-1], math.inf)
        for shift in (-1, 0, 1):
            tried = e2m1(blocks, exponents(blocks, "round") + shift)
            error = (tried - blocks).square().sum(-1)
            best = torch.where((error < least).unsqueeze(-1), tried, best)
            least = torch.minimum(error, least)
        return best.flatten(-2)

    return quantise


FORMATS: dict[str, Quantise] = {
    "mxfp4": vllm_mxfp4,
    "mxfp4 floor": with_rule("floor"),
    "mxfp4 ceil": with_rule("ceil"),
    "mxfp4 best": with_rule("best"),
    "mxfp8": vllm_mxfp8,
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
    elif kind == "outlier elements":
        chosen = torch.rand(rows, columns, generator=generator) < OUTLIER_SHARE / 5
        weight[chosen] *= OUTLIER_FACTOR
    elif kind == "outlier columns":
        weight[:, _some(columns, generator)] *= OUTLIER_FACTOR
    elif kind == "outlier rows":
        weight[_some(rows, generator)] *= OUTLIER_FACTOR
    else:
        assert kind == "normal"
    return (weight * STANDARD_DEVIATION).bfloat16()


def _some(count: int, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.randperm(count, generator=generator)
    return chosen[: max(1, round(count * OUTLIER_SHARE))]


KINDS = (
    "normal",
    "student 4",
    "student 3",
    "outlier elements",
    "outlier columns",
    "outlier rows",
)


def activations(columns: int, seed: int) -> torch.Tensor:
    """[columns, COLUMNS_OF_X] as behind a norm: of one size but for a few channels that are large
    for every token, which transformers are known for."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(columns, COLUMNS_OF_X, generator=generator)
    x[_some(columns, generator)] *= OUTLIER_FACTOR
    return x


def measure(weight: torch.Tensor, seed: int) -> dict[str, dict[str, float]]:
    """Errors of every format on one weight [N, K]."""
    exact = weight.float()
    x = activations(exact.shape[1], seed)
    y = exact @ x
    rows = exact.norm(dim=1).clamp(min=1e-30)
    results = {}
    for name, quantise in FORMATS.items():
        error = quantise(weight) - exact
        relative = float(error.norm() / exact.norm())
        results[name] = {
            "weight": relative,
            "sqnr_db": -20 * math.log10(relative),
            "worst_row": float((error.norm(dim=1) / rows).max()),
            "output": float((error @ x).norm() / y.norm()),
        }
    return results


def check_rule(weight: torch.Tensor) -> None:
    """The code's rule as this file describes it gives what the code gives."""
    if not torch.equal(with_rule("round")(weight), vllm_mxfp4(weight)):
        raise SystemExit("vLLM's MXFP4 quantiser is not what this file says it is")


def trained(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of a checkpoint by name, those of all layers under one another."""
    from safetensors.torch import load_file

    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in load_file(path).items():
        if tensor.dim() == 2 and tensor.shape[1] % BLOCK == 0 and min(tensor.shape) >= 4 * BLOCK:
            groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(tensor)
    for name, tensors in groups.items():
        yield name, torch.cat(tensors)[:: max(1, sum(map(len, tensors)) // MAX_ROWS)].bfloat16()


def line(label: str, results: dict[str, dict[str, float]], field: str) -> str:
    cells = " | ".join(f"{results[name][field]:.4f}" for name in FORMATS)
    return f"| {label} | {cells} |"


def main() -> None:
    """Print Markdown tables; with --json write every figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trained", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()

    results: dict[str, dict[str, dict[str, float]]] = {}
    start = time.monotonic()
    for number, (layer, (rows, columns)) in enumerate(SHAPES.items()):
        for kind in KINDS:
            weight = made_up(min(rows, MAX_ROWS), columns, kind, seed=number)
            check_rule(weight[:512])
            results[f"{layer}, {kind}"] = measure(weight, seed=100 + number)
    for file in options.trained:
        for name, weight in trained(file):
            check_rule(weight[:512])
            results[name] = measure(weight, seed=200)

    head = f"| {' | '.join(('layer, weights', *FORMATS))} |\n|{'---|' * (len(FORMATS) + 1)}"
    for field, title in (
        ("weight", "relative error of the weight"),
        ("worst_row", "relative error of its worst row"),
        ("output", "relative error of y = W x, x with outlier channels"),
    ):
        print(f"\n{title}\n\n{head}")
        for label, result in results.items():
            print(line(label, result, field))
    print(f"\n{time.monotonic() - start:.0f} s, torch {torch.__version__}")
    if options.json:
        document: dict[str, Any] = {"torch": torch.__version__, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
