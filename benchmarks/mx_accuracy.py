"""How far MXFP4, MXFP8 and INT8 move a checkpoint's weights: what --mxfp4-layers costs.

    PYTHON benchmarks/mx_accuracy.py --model FOLDER [--json OUT.json]

PYTHON: an interpreter with our plugin of vLLM, e.g. that of the cpu target's environment, whose
quantisers these are. FOLDER has the checkpoint's *.safetensors. Of matrices that differ in
the layer's number only (and of queries, keys and values), 8192 rows together, evenly spread.

For each matrix and format: the relative error of the weight, ||Q(W) - W|| / ||W|| (Frobenius).
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from vllm_sparkforge.mx import formats

BLOCK = 64
MAX_ROWS = 8192


def of_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of a checkpoint in BF16 by name, sampled, those of all layers under one another."""
    groups: dict[tuple[str, int], list[tuple[Path, str, int]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                shape = part.get_shape()
                floats = part.get_dtype() in ("BF16", "F16", "F32")
                if floats and len(shape) == 2 and shape[1] % BLOCK == 0 and min(shape) >= 2 * BLOCK:
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


def errors(weight: torch.Tensor) -> dict[str, float]:
    """Relative errors of the formats on one weight [N, K]."""
    values = {
        "mxfp4": formats.mxfp4_dequantize(*formats.mxfp4_quantize(weight)),
        "mxfp8": formats.mxfp8_dequantize(*formats.mxfp8_quantize(weight)),
        "int8": formats.int8_dequantize(*formats.int8_quantize(weight)),
    }
    exact = weight.float()
    return {
        name: float((value.float() - exact).norm() / exact.norm()) for name, value in values.items()
    }


def main() -> None:
    """Print a Markdown table; with --json write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    print("| relative error of the weight | mxfp4 | mxfp8 | int8 |\n|---|---|---|---|")
    results = {}
    for label, weight in of_checkpoint(options.model):
        found = results[label] = errors(weight)
        print(f"| {label} | {' | '.join(f'{error:.4f}' for error in found.values())} |", flush=True)
    if options.json:
        document = {"torch": torch.__version__, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
