"""The minimum time of each decode kernel, from its machine code: for memory, and for all else.

A kernel of a decode step should be bound by memory. So its other limits (instructions, and each
unit that they need) may take at most 60 % of memory's time: 40 % to spare.

A warp's pass of the main loop takes as many cycles of a scheduler as its busiest unit needs. In
addition there are the instructions outside the loop, once a warp, and those that end a row. Nothing
waits in this model, so a real kernel is slower. ``MEASURED`` has the times on an H200.

A kernel that the model does not know, or cannot estimate, is a ProofError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkforge.core.errors import ProofError
from sparkforge.inspect.perf.kernelwork import Work
from sparkforge.inspect.perf.machines import SCHEDULERS, Machine
from sparkforge.inspect.perf.traffic import (
    Format,
    Shape,
    distinct_experts,
    padded_experts,
    weight_bytes,
)
from sparkforge.inspect.proofs.flow import WARP

MOST_SHARE = 0.6
"""Limit for all else as a share of memory's time: 40 % to spare."""
_K_TILE = 64  # columns of a tile of a dense weight; a warp ends a row after all of them
_PAD = 32  # columns between two rows in shared memory
_RESERVED = 1024  # bytes of each block's shared memory for the system
_REGISTERS_STEP = 256  # a warp's registers are allocated in steps of this number


@dataclass(frozen=True)
class Product:
    """A kernel's work in a step."""

    kernel: str
    layer: str
    """e.g. ``qkv``."""
    rows: int
    """The kernel's limit for rows of the step."""
    n: int
    k: int
    """``n``, ``k``: rows and columns of the weight."""
    form: Format
    copies: float
    """Copies of the weight to read: distinct experts."""
    blocks: float | None
    """Of the launch; None: one for each SM."""
    shared: int
    """Dynamic bytes of a block."""

    @property
    def bytes(self) -> float:
        """Bytes of weights and scales to read."""
        return self.copies * weight_bytes(self.n, self.k, self.form)


@dataclass(frozen=True)
class Estimate:
    """The minimum time of a product on a machine."""

    product: Product
    per_kib: float
    """Instructions of a warp for 1,024 bytes of weights, in the main loop."""
    memory_us: float
    compute_us: float
    """``memory_us``, ``compute_us``: time for memory, and for all else."""
    unit: str
    """The busiest unit of all else."""
    in_flight: float
    """Bytes of weights in flight in an SM, on average over all SMs."""
    blocks: int
    """Number that fits an SM at once."""

    @property
    def share(self) -> float:
        """Time of all else as a share of memory's."""
        return self.compute_us / self.memory_us

    @property
    def bound_by_memory(self) -> bool:
        """Whether memory is the limit, with 40 % to spare."""
        return self.share <= MOST_SHARE

    @property
    def least_us(self) -> float:
        """The larger of the two times."""
        return max(self.memory_us, self.compute_us)


_DENSE = re.compile(
    r"dense_(?P<form>mxfp4|mxfp8|bf16)_(?P<kind>narrow_12|narrow_16|wide)_(?P<rows>\d+)"
)
_EXPERTS = re.compile(r"experts_(?P<order>rows_)?(?P<kind>gate_up|down)_(?P<rows>\d+)")
_ROUTE = re.compile(r"route_(?P<rows>\d+)")
NOT_MODELLED: Mapping[str, str] = {
    r"experts_combine|add_norm|rotate_and_cache": "reads no weights",
    r"expand_mxfp[48]": "for prefill",
}
_FORMS: Mapping[str, Format] = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "bf16": "bf16"}


def product_of(name: str, shape: Shape) -> Product | None:
    """Return a kernel's work in a step of a model; None: see ``NOT_MODELLED``."""
    if any(re.fullmatch(pattern, name) for pattern in NOT_MODELLED):
        return None
    hidden, inner = padded_experts(shape, "marlin")
    if match := _DENSE.fullmatch(name):
        rows, form = int(match["rows"]), _FORMS[match["form"]]
        layer, n, k = {
            "narrow_12": ("qkv", shape.qkv_rows, shape.hidden),
            "narrow_16": ("o", shape.hidden, shape.o_columns),
            "wide": ("lm_head", shape.vocab, shape.hidden),
        }[match["kind"]]
        if match["kind"] == "wide":
            return Product(name, layer, rows, n, k, form, 1, None, _rows_in_shared(rows, k))
        return Product(name, layer, rows, n, k, form, 1, -(-n // 16), 0)
    if match := _EXPERTS.fullmatch(name):
        rows, up = int(match["rows"]), match["kind"] == "gate_up"
        n, k = (2 * inner, hidden) if up else (hidden, inner)
        copies = distinct_experts(shape.experts, shape.top_k, rows)
        if match["order"]:  # read without padding; one or two rows and 32 or 64 columns a block
            here = min(rows, 2)
            blocks = copies * -(-n // (here * (64 if up else 32)))
            shared = _rows_in_shared(here, -(-k // 128) * 128)
            layer = f"{match['kind']}, row-major"
            return Product(name, layer, rows, n, k, "mxfp4", copies, blocks, shared)
        columns = 128 if up and rows == 8 else 64
        blocks = copies * -(-n // columns)
        shared = _rows_in_shared(rows, k)
        return Product(name, match["kind"], rows, n, k, "mxfp4", copies, blocks, shared)
    if match := _ROUTE.fullmatch(name):
        rows, n, k = int(match["rows"]), shape.experts, shape.hidden
        shared = _rows_in_shared(rows, k)
        return Product(name, "router", rows, n, k, "bf16", 1, n // 16, shared)
    msg = f"{name}: the model does not know what this kernel multiplies"
    raise ProofError(msg, "add it to sparkforge/inspect/perf/kernelmodel.py")


def _rows_in_shared(rows: int, k: int) -> int:
    return rows * (k + _PAD) * 2


def blocks_of(work: Work, product: Product, machine: Machine) -> int:
    """Return the number of a kernel's blocks that an SM holds at once."""
    warps = work.threads // WARP
    registers = -(-work.registers * WARP // _REGISTERS_STEP) * _REGISTERS_STEP * warps
    shared = work.shared + product.shared + _RESERVED
    return min(
        machine.warps // warps,
        machine.registers // registers,
        machine.shared // shared,
        machine.blocks,
    )


def estimate(work: Work, product: Product, machine: Machine) -> Estimate:
    """Return the minimum time of a product."""
    flow, blocks = work.flow, blocks_of(work, product, machine)
    if flow is None or not blocks:
        msg = f"{work.name}: " + ("no block fits an SM" if flow else "reads no weights")
        raise ProofError(msg, f"see {machine.name} in sparkforge/inspect/perf/machines.py")
    cycles = {
        "instructions": float(flow.instructions),
        "integer": flow.integer * machine.integer,
        "multiply": flow.multiply * machine.multiply,
        "float32": flow.float32 * machine.float32,
        "matrix": flow.matrix * machine.matrix,
        "loads": SCHEDULERS * flow.loaded / machine.loaded,
        "shared memory": SCHEDULERS * flow.shared / machine.from_shared,
    }
    unit = max(cycles, key=lambda name: cycles[name])
    launched = machine.multiprocessors if product.blocks is None else product.blocks
    # of SMs with a block: a router's few blocks cannot use the other SMs' schedulers
    busy = min(1.0, launched / machine.multiprocessors)
    plain = product.bytes / _with_scales(product.form)
    passes = plain / flow.weights
    ends = flow.beside * _K_TILE / product.k
    once = launched * work.threads / WARP * flow.once
    compute = (passes * (cycles[unit] + ends) + once) / (machine.issue * busy)
    at_once = min(float(blocks), launched / machine.multiprocessors)
    return Estimate(
        product,
        flow.instructions / flow.weights * 1024,
        product.bytes / machine.memory_gb_s / 1e3,
        compute * 1e6,
        unit,
        at_once * work.threads / WARP * flow.in_flight,
        blocks,
    )


def _with_scales(form: Format) -> float:
    """Return the bytes of a weight and its scales for each byte of the weight."""
    return {"bf16": 1.0, "mxfp8": 33 / 32, "mxfp4": 17 / 16}[form]


def estimates(works: Sequence[Work], shape: Shape, machine: Machine) -> list[Estimate]:
    """Return the estimates of all modelled kernels."""
    pairs = [(work, product_of(work.name, shape)) for work in works]
    return [estimate(work, product, machine) for work, product in pairs if product is not None]


MEASURED: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("qkv", "mxfp4"): {1: 4.6, 2: 4.6, 4: 4.7, 8: 4.8},
    ("qkv", "mxfp8"): {1: 5.3, 2: 5.7, 4: 5.8, 8: 5.6},
    ("qkv", "bf16"): {1: 10.6, 2: 10.5, 4: 10.8, 8: 10.9},
    ("o", "mxfp4"): {1: 4.2, 2: 4.2, 4: 4.2, 8: 4.4},
    ("o", "mxfp8"): {1: 5.2, 2: 5.5, 4: 5.6, 8: 5.7},
    ("o", "bf16"): {1: 7.7, 2: 7.5, 4: 7.8, 8: 8.0},
    ("lm_head", "mxfp4"): {1: 99, 2: 99, 4: 100, 8: 100},
    ("lm_head", "mxfp8"): {1: 138, 2: 138, 4: 139, 8: 140},
    ("lm_head", "bf16"): {1: 257, 2: 258, 4: 259, 8: 259},
    ("experts", "mxfp4"): {1: 30, 2: 44, 4: 77, 8: 137},
    ("router", "bf16"): {1: 4.0, 2: 4.8, 4: 5.6, 8: 7.9},
}
"""Microseconds on an H200 by layer, format and rows: docs/h200.md, "Kernels for one to eight rows".

``experts`` are gate_up and down in turn.
"""
