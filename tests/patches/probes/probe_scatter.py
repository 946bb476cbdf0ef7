"""Program for the cpu target's interpreter: build triton_kernels' scattering matmul for a device.

usage: python probe_scatter.py CAPABILITY OUT_FOLDER

The real triton_kernels and Triton, both found on the path, run on CPU tensors of gpt-oss's shapes
up to the launch. There Triton and ptxas compile the kernel, which is not launched. OUT_FOLDER gets
a cubin for each kernel and kernels.json: the request, TMA forms in the PTX, or the error.
"""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXPERTS, HIDDEN, ROWS = 4, 2880, 64
SHARED_MEMORY = 101_376  # bytes a block on SM12x
# rows of a tile that vLLM's series lets SM12x have
BLOCKS = (16, 32)


def compile_instead_of_launching(
    capability: tuple[int, int], shared_memory: int, note: Callable[[Any], None]
) -> None:
    """Replace Triton's driver by one for a device that compiles each kernel and runs none.

    Args:
        capability: of the device, e.g. (12, 1).
        shared_memory: bytes of a block there.
        note: called with each compiled kernel.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cuda

    triton.runtime.driver.set_active(Driver())
    properties = types.SimpleNamespace(
        multi_processor_count=48,
        shared_memory_per_block_optin=shared_memory,
        major=capability[0],
        minor=capability[1],
    )
    torch.cuda.get_device_properties = lambda device=0: properties
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.current_device = lambda: 0

    def getitem(self: Any, grid: Any) -> Callable[..., Any]:
        def go(*args: Any, **kwargs: Any) -> Any:
            compiled = self.warmup(*args, grid=grid, **kwargs)
            note(compiled)
            return compiled

        return go

    JITFunction.__getitem__ = getitem


def routing(experts: int, rows: int, top_k: int) -> tuple[Any, Any, Any]:
    """Return routing that names no expert: it is never read."""
    import torch
    from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx
    from triton_kernels.routing import ExptData

    def zeros(size: int) -> Any:
        return torch.zeros(size, dtype=torch.int32)

    sizes = (16, 32, 64, 128)
    data = ExptData(
        zeros(experts),
        zeros(experts + 1),
        {size: zeros(experts + 1) for size in sizes},
        {size: zeros(rows) for size in sizes},
    )
    gates, index = torch.zeros(rows, dtype=torch.bfloat16), zeros(rows)
    made = RoutingData(gates, zeros(experts), experts, top_k, data)
    return made, GatherIndx(index, index), ScatterIndx(index, index)


def scatter(block_m: int) -> None:
    """Run one expert matmul that scatters its rows in its epilogue: MXFP4 weights, one expert each.

    gpt-oss's down projection as triton_unfused shapes it, with the fused scatter allowed.
    """
    import torch
    from triton_kernels import matmul_ogs
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    value_layout, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(
        mx_axis=1, num_warps=8
    )
    # packed along the inner dimension, which must be the one with stride 1
    blocks = torch.zeros(EXPERTS, HIDDEN, HIDDEN // 2, dtype=torch.uint8).mT
    weight = convert_layout(wrap_torch_tensor(blocks, dtype=FP4), value_layout, **options)
    scales = torch.zeros(EXPERTS, HIDDEN, HIDDEN // 32, dtype=torch.uint8).mT
    scale = convert_layout(wrap_torch_tensor(scales), scale_layout, **scale_options)
    precision = matmul_ogs.PrecisionConfig(
        weight_scale=scale, flex_ctx=matmul_ogs.FlexCtx(rhs_data=InFlexData())
    )
    opt_flags.update_opt_flags_constraints(
        {"block_m": block_m, "is_persistent": True, "epilogue_subtile": 1}
    )
    made, gather, scattered = routing(EXPERTS, ROWS, 1)
    matmul_ogs.matmul_ogs(
        torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16),
        weight,
        None,
        made,
        gather_indx=gather,
        scatter_indx=scattered,
        precision_config=precision,
    )


def main() -> None:
    capability, out = int(sys.argv[1]), Path(sys.argv[2])
    built: list[Any] = []
    compile_instead_of_launching(divmod(capability, 10), SHARED_MEMORY, built.append)
    import triton

    cases = []
    for block_m in BLOCKS:
        built.clear()
        error = ""
        try:
            scatter(block_m)
        except Exception as problem:
            error = f"{type(problem).__name__}: {str(problem)[:4000]}"
        kernels = []
        for kernel in built:
            name = f"{kernel.metadata.name}-{block_m}"
            (out / f"{name}.cubin").write_bytes(kernel.asm["cubin"])
            ptx = kernel.asm["ptx"]
            kernels.append(
                {
                    "name": name,
                    "shared": kernel.metadata.shared,
                    "scatter4": ptx.count(".tile::scatter4"),
                    "gather4": ptx.count(".tile::gather4"),
                }
            )
        cases.append({"block_m": block_m, "error": error, "kernels": kernels})
    result = {"triton": triton.__version__, "capability": capability, "cases": cases}
    (out / "kernels.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
