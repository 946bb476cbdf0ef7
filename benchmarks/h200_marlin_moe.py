"""Marlin's MXFP4 experts at gpt-oss-120b's shapes: one padding of them against another.

    python benchmarks/h200_marlin_moe.py --json moe.jsonl

128 experts, 4 a token, hidden and intermediate size 2880, biases, swigluoai. A variant is
NAME=HIDDENxINTERMEDIATE, the sizes that the experts are padded to; the first is what the others are
held against. All are measured in one run, in turn.

For each batch size: the time of a layer (with the padding of its input, as vLLM does it), the bytes
of weights that it must read, that rate as a share of the copy bandwidth of the same run, and the
distance of its output from a product in float32 with weights expanded by this script. Successive
calls take other experts of 1.7 GB in all, more than any cache; a CUDA graph replays them, so that
launches from Python are no part of the time. `--profile` adds the time of each GPU kernel.

Needs a GPU, and a vLLM on the Python path with the release wheel's extensions `_C_stable_libtorch`
and `_moe_C_stable_libtorch`: `fused_marlin_moe`, its kernels and the weight preparation are vLLM's
own. `--dry-run` checks the rest on a CPU, with small shapes and no vLLM.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import (
    BLOCK,
    Report,
    conditions,
    copy_bandwidth,
    distance,
    expand,
    kernels,
    machine,
    markdown,
    seconds,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64)
VARIANTS = ("stock=3072x2944", "plugin=2944x2880")

TOLERANCE = 0.01
"""Of |output - reference| / |reference|: each expert's activations and output are rounded to BF16
(2**-9 at the most, each) before they are summed."""


@dataclass(frozen=True)
class Shape:
    """What the model asks for."""

    hidden: int = 2880
    inner: int = 2880
    experts: int = 128
    top_k: int = 4


@dataclass(frozen=True)
class Variant:
    """What the experts are padded to."""

    name: str
    hidden: int
    inner: int

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read NAME=HIDDENxINTERMEDIATE.

        Raises:
            argparse.ArgumentTypeError: it is not that.

        """
        name, _, sizes = text.partition("=")
        hidden, _, inner = sizes.partition("x")
        if not (name and hidden.isdecimal() and inner.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=HIDDENxINTERMEDIATE")
        return cls(name, int(hidden), int(inner))

    def bytes_per_expert(self) -> int:
        """Bytes of one expert: half a byte a weight, a scale for 32 of them, biases in BF16."""
        weights = 3 * self.hidden * self.inner
        return weights // 2 + weights // BLOCK + 2 * (2 * self.inner + self.hidden)


@dataclass
class Experts:
    """Experts as a checkpoint holds them, gate and up interleaved."""

    w13: tuple[torch.Tensor, torch.Tensor]
    """Codes [E, 2I, H / 2] and scales [E, 2I, H / 32]."""
    w2: tuple[torch.Tensor, torch.Tensor]
    """Codes [E, H, I / 2] and scales [E, H, I / 32]."""
    b13: torch.Tensor
    """[E, 2I]."""
    b2: torch.Tensor
    """[E, H]."""

    @classmethod
    def random(cls, shape: Shape, device: str) -> Experts:
        """Draw random experts; every code occurs, activations are of a model's size."""
        count, hidden, inner = shape.experts, shape.hidden, shape.inner

        def codes(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            size = (count, rows, columns // 2)
            code = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
            size = (count, rows, columns // BLOCK)
            return code, torch.randint(117, 122, size, dtype=torch.uint8, device=device)

        def bias(rows: int) -> torch.Tensor:
            return torch.randn(count, rows, device=device).to(torch.bfloat16)

        return cls(codes(2 * inner, hidden), codes(hidden, inner), bias(2 * inner), bias(hidden))

    def padded(self, hidden: int, inner: int) -> Experts:
        """Return them as vLLM's loader leaves them in larger parameters: filled up with zeros."""

        def fill(tensor: torch.Tensor, *size: int) -> torch.Tensor:
            out = tensor.new_zeros(tensor.shape[0], *size)
            out[tuple(slice(0, n) for n in tensor.shape)] = tensor
            return out

        return Experts(
            (fill(self.w13[0], 2 * inner, hidden // 2), fill(self.w13[1], 2 * inner, hidden // 32)),
            (fill(self.w2[0], hidden, inner // 2), fill(self.w2[1], hidden, inner // 32)),
            fill(self.b13, 2 * inner),
            fill(self.b2, hidden),
        )


def swigluoai(both: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation of interleaved gate and up: limit 7, alpha 1.702."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def reference(
    experts: Experts, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Compute the layer in float32, expert by expert: x [M, H], ids and shares [M, top_k]."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        w13 = expand("mxfp4", experts.w13[0][expert], experts.w13[1][expert])
        w2 = expand("mxfp4", experts.w2[0][expert], experts.w2[1][expert])
        inner = swigluoai(x[token].float() @ w13.T + experts.b13[expert].float())
        part = inner @ w2.T + experts.b2[expert].float()
        out.index_add_(0, token, part * shares[token, place, None])
    return out


def routes(shape: Shape, batch: int, device: str) -> list[torch.Tensor]:
    """Return the experts of each call, [batch, top_k] int32 each.

    Up to 4 tokens, experts are dealt from a shuffled pack that is renewed when it is empty, so that
    an expert comes again only after all others and its weights are in no cache any more; in one
    token no expert comes twice. More tokens draw at random: their experts are too many to be kept.
    """
    if batch > 4:
        return [
            torch.rand(batch, shape.experts).topk(shape.top_k).indices.int().to(device)
            for _ in range(8)
        ]
    pack: list[int] = []
    calls = []
    for _ in range(max(4, -(-shape.experts // (batch * shape.top_k)))):
        rows = []
        for _ in range(batch):
            if len(pack) < shape.top_k:
                # What is left goes first, and not twice into the same token.
                fresh = [e for e in torch.randperm(shape.experts).tolist() if e not in pack]
                pack = pack + fresh
            rows.append(pack[: shape.top_k])
            pack = pack[shape.top_k :]
        calls.append(torch.tensor(rows, dtype=torch.int32, device=device))
    return calls


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""x [M, padded H], ids, shares -> [M, padded H]."""


def marlin(experts: Experts) -> Layer:
    """Return the layer as vLLM computes it with Marlin."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_moe_mxfp4_layer_for_marlin,
    )
    from vllm.scalar_type import scalar_types

    w13, w2, w13_scale, w2_scale, b13, b2 = prepare_moe_mxfp4_layer_for_marlin(
        types.SimpleNamespace(params_dtype=torch.bfloat16),
        experts.w13[0],
        experts.w2[0],
        experts.w13[1],
        experts.w2[1],
        experts.b13,
        experts.b2,
    )
    # Locks of the kernel: it leaves them at zero. Four blocks to a multiprocessor at the most.
    processors = torch.cuda.get_device_properties(w13.device).multi_processor_count
    workspace = torch.zeros(4 * processors, dtype=torch.int32, device=w13.device)

    def total(parts: torch.Tensor, output: torch.Tensor, *_: Any) -> torch.Tensor:
        ops.moe_sum(parts, output)
        return output

    def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        # Full of NaN where the kernel writes nothing.
        output = torch.full_like(x, float("nan")) if not capturing() else torch.empty_like(x)
        return fused_marlin_moe(
            x,
            w13,
            w2,
            b13,
            b2,
            w13_scale,
            w2_scale,
            shares,
            ids,
            scalar_types.float4_e2m1f.id,
            activation=MoEActivation.SWIGLUOAI,
            moe_sum=total,
            workspace=workspace,
            output=output,
        )

    return layer


def plain(experts: Experts) -> Layer:
    """Stand in for `marlin` in a dry run: the padded experts in float32, rounded to BF16."""

    def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return reference(experts, x, ids, shares).to(x.dtype)

    return layer


def capturing() -> bool:
    """Whether a CUDA graph is being recorded."""
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def through(call: Callable[[torch.Tensor], object], calls: Sequence[torch.Tensor]) -> None:
    """Make all calls, one after the other."""
    for ids in calls:
        call(ids)


def measure(arguments: argparse.Namespace, shape: Shape, device: str, report: Report) -> None:
    """Measure everything, a line of the report for each variant and batch size."""
    torch.manual_seed(arguments.seed)
    experts = Experts.random(shape, device)
    layers: dict[str, Layer] = {}
    for variant in arguments.variant:
        padded = experts.padded(variant.hidden, variant.inner)
        layers[variant.name] = plain(padded) if arguments.dry_run else marlin(padded)
        del padded
    bandwidth = copy_bandwidth(device, arguments.rounds)
    report.add({"kind": "machine", **machine(device), "copy_bandwidth": bandwidth})

    for batch in arguments.batch:
        calls = routes(shape, batch, device)
        x = torch.randn(batch, shape.hidden, device=device).to(torch.bfloat16)
        shares = torch.softmax(torch.randn(batch, shape.top_k, device=device), -1)
        exact = reference(experts, x, calls[0], shares)
        # Read in one replay: of each call every distinct expert once.
        distinct = sum(len(ids.unique()) for ids in calls)
        outputs = {}
        steps: dict[str, Callable[[], object]] = {}
        for variant in arguments.variant:
            layer = layers[variant.name]

            def call(
                ids: torch.Tensor,
                layer: Layer = layer,
                x: torch.Tensor = x,
                shares: torch.Tensor = shares,
                more: int = variant.hidden - shape.hidden,
            ) -> torch.Tensor:
                # As moe_runner does: pad only where there is something to pad.
                padded = F.pad(x, (0, more)) if more else x
                return layer(padded, ids, shares)[:, : shape.hidden]

            outputs[variant.name] = call(calls[0])
            steps[variant.name] = functools.partial(through, call, calls)
        if arguments.profile:
            for name, step in steps.items():
                rows = kernels(step)
                report.add({"kind": "kernels", "variant": name, "batch": batch, "kernels": rows})
        taken = seconds(steps, device, arguments.rounds)
        first = arguments.variant[0].name
        for variant in arguments.variant:
            each = [time / len(calls) for time in taken[variant.name]]
            middle = statistics.median(each)
            read = variant.bytes_per_expert() * distinct / len(calls)
            away = distance(outputs[variant.name], exact)
            report.add(
                {
                    "kind": "layer",
                    "variant": variant.name,
                    "batch": batch,
                    "padded": [variant.hidden, variant.inner],
                    "calls": len(calls),
                    "experts_per_call": distinct / len(calls),
                    "bytes": read,
                    "us": middle * 1e6,
                    "us_least": min(each) * 1e6,
                    "us_most": max(each) * 1e6,
                    "ratio": statistics.median(taken[first])
                    / statistics.median(taken[variant.name]),
                    "bytes_per_second": read / middle,
                    "share": read / middle / bandwidth,
                    "distance": away,
                    "right": away < TOLERANCE,
                    "distance_to_first": distance(outputs[variant.name], outputs[first]),
                }
            )


def table(report: Report) -> str:
    """Return the report as Markdown."""
    about = report.rows[0]
    head = ["batch", "variant", "padded to", "experts", "MB read", "µs (least–most)"]
    head += ["first / this", "share of copy", "distance"]
    rows = [
        [
            str(row["batch"]),
            row["variant"],
            "x".join(str(size) for size in row["padded"]),
            f"{row['experts_per_call']:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['us']:.1f} ({row['us_least']:.1f}–{row['us_most']:.1f})",
            f"{row['ratio']:.3f}",
            f"{row['share']:.0%}",
            f"{row['distance']:.4f}" + ("" if row["right"] else " WRONG"),
        ]
        for row in report.rows
        if row["kind"] == "layer"
    ]
    return f"{conditions(about)}\n\n{markdown(head, rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if an output is wrong, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", type=Variant.parse, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the lines of JSON")
    parser.add_argument("--profile", action="store_true", help="and each kernel's time (in --json)")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, without vLLM")
    arguments = parser.parse_args(argv)
    shape, device = Shape(), "cuda"
    if arguments.dry_run:
        shape, device = Shape(hidden=96, inner=64, experts=16), "cpu"
        arguments.rounds = 2
    elif not torch.cuda.is_available():
        print("h200_marlin_moe: needs a CUDA GPU (or --dry-run)", file=sys.stderr)
        return 2
    if arguments.profile and device != "cuda":
        parser.error("--profile needs a GPU")
    variants = ("stock=256x128", "plugin=128x64") if arguments.dry_run else VARIANTS
    arguments.variant = arguments.variant or [Variant.parse(text) for text in variants]
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report(arguments.json)
    with torch.inference_mode():
        measure(arguments, shape, device, report)
    print(table(report))
    return 0 if all(row.get("right", True) for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
