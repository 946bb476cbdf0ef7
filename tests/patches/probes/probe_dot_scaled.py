"""Runs inside the interpreter under test: compiles products of Triton for several devices.

usage: python -P probe_dot_scaled.py OUT_FOLDER CAPABILITY...

OUT_FOLDER gets PTX and a cubin for each kernel and device, ``NAME.CAPABILITY.ptx`` and ``.cubin``.
Nothing is run. Triton is the first on the path.
"""

import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def scaled(
    a: tl.tensor,
    sa: tl.tensor,
    b: tl.tensor,
    sb: tl.tensor,
    c: tl.tensor,
    K: tl.tensor,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    m, k, s = tl.arange(0, 64), tl.arange(0, 128), tl.arange(0, 4)
    acc = tl.zeros((64, 64), dtype=tl.float32)
    for start in range(0, K, 128):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        w = tl.load(
            b
            + (start // PACKED + tl.arange(0, 128 // PACKED))[:, None]
            + m[None, :] * (K // PACKED)
        )
        x_scale = tl.load(sa + m[:, None] * (K // 32) + start // 32 + s[None, :])
        w_scale = tl.load(sb + m[:, None] * (K // 32) + start // 32 + s[None, :])
        acc = tl.dot_scaled(x, x_scale, "e4m3", w, w_scale, FORMAT, acc)
    tl.store(c + m[:, None] * 64 + m[None, :], acc)


def dense(a: tl.tensor, b: tl.tensor, c: tl.tensor, K: tl.tensor) -> None:
    m = tl.arange(0, 64)
    acc = tl.zeros((64, 64), dtype=tl.float32)
    for start in range(0, K, 64):
        x = tl.load(a + m[:, None] * K + start + m[None, :])
        w = tl.load(b + (start + m)[:, None] * 64 + m[None, :])
        acc = tl.dot(x, w, acc)
    tl.store(c + m[:, None] * 64 + m[None, :], acc)


def tma(rows: tl.tensor, c: tl.tensor, K: tl.tensor) -> None:
    m = tl.arange(0, 64)
    acc = tl.zeros((64, 64), dtype=tl.float32)
    for start in range(0, K, 64):
        x = rows.load([tl.program_id(0) * 64, start])
        acc = tl.dot(x, x.T, acc)
    tl.store(c + m[:, None] * 64 + m[None, :], acc)


_SCALES = {"sa": "*u8", "sb": "*u8", "c": "*fp32", "K": "i32"}
_PLAIN = {"c": "*fp32", "K": "i32"}
# function, types of its arguments, constants
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "mxfp8-mxfp8": (
        scaled,
        {"a": "*fp8e4nv", "b": "*fp8e4nv", **_SCALES},
        {"FORMAT": "e4m3", "PACKED": 1},
    ),
    "mxfp8-mxfp4": (
        scaled,
        {"a": "*fp8e4nv", "b": "*u8", **_SCALES},
        {"FORMAT": "e2m1", "PACKED": 2},
    ),
    "fp8-fp8": (dense, {"a": "*fp8e4nv", "b": "*fp8e4nv", **_PLAIN}, {}),
    "bf16-bf16": (dense, {"a": "*bf16", "b": "*bf16", **_PLAIN}, {}),
    "bf16-tma": (tma, {"rows": "tensordesc<bf16[64,64]>", **_PLAIN}, {}),
}


def main() -> None:
    out = Path(sys.argv[1])
    for capability in map(int, sys.argv[2:]):
        for name, (function, types, constants) in CASES.items():
            kernel = triton.jit(function)
            signature = {word: types.get(word, "constexpr") for word in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            (out / f"{name}.{capability}.ptx").write_text(made.asm["ptx"])
            (out / f"{name}.{capability}.cubin").write_bytes(made.asm["cubin"])


if __name__ == "__main__":
    main()
