"""Runs inside the interpreter under test: the Python side of the decode kernels, without a GPU.

usage: python -m tests.patches.probes.probe_decode_kernels IN.json OUT.json

Its parts are decode_*.py.

IN holds "places", the tables that the CUDA sources print, or null, and "capabilities". OUT has an
entry for each capability and one for what is computed. Real are vLLM, and the plugin's choice,
packing, operators, self-check and expert classes; the device (fake_cuda.py), Marlin's CUDA
operators (marlin_layout.py), the kernels (decode_contract.py) and the driver (decode_device.py) are
not.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.patches.probes import (
    decode_cache,
    decode_experts,
    decode_half,
    decode_lossless,
    decode_metrics,
    decode_parts,
    decode_results,
    decode_rotary,
    decode_row_major,
    decode_selfcheck,
    decode_trial,
)
from tests.patches.probes.decode_device import (
    BLOCKS,
    Named,
    configured,
    emulate,
    forget,
    logged,
    mx_layer,
    ship,
    start,
)
from tests.patches.probes.probe_selection import outcome

# -- what is selected ------------------------------------------------------------------


def _selection(capability: str, folder: Path, out: Path) -> None:
    """Which dense kernels are chosen, by option and by what the wheel ships."""
    shipped = ship(folder / f"shipped {capability}")
    start(capability, shipped)
    emulate()
    import torch
    from vllm_sparkforge.decode import module

    damaged = ship(folder / f"damaged {capability}")
    for file in damaged.glob("*.cubin"):
        file.write_bytes(b"another one")
    unreadable = ship(folder / f"unreadable {capability}")
    (unreadable / "manifest.json").write_text("{", encoding="utf-8")
    newer = ship(folder / f"newer {capability}")
    (newer / "manifest.json").write_text('{"schema": 2, "cubins": []}', encoding="utf-8")
    folders = {
        "shipped": shipped,
        "none": folder / "none",
        "damaged": damaged,
        "unreadable": unreadable,
        "newer": newer,
    }

    def ask(option: str) -> dict[str, Any]:
        forget()
        packed = []
        with configured(option) as config, logged() as lines:
            for form in BLOCKS:
                config.additional_config["sparkforge"]["mxfp4_layers"] = f"qkv={form}"
                with decode_cache.marlin() as reached:
                    layer = mx_layer(form)
                packed.append(layer.weight.dtype == torch.int32)
                assert reached == ([] if packed[-1] or form.startswith("int") else [form])
        names = [line.split()[2] for line in lines if line.startswith("INFO: Using ")]
        off = [line.split("Decode kernels ")[1] for line in lines if "kernels are off" in line]
        with configured(option) as config:
            refusal = outcome(lambda: decode_cache.begin(config))[0]
            key = config.compute_hash()
        return {
            "chosen": " ".join(names),
            "packed": packed,
            "refusal": refusal,
            "said": off,
            "key": key,
        }

    result: dict[str, Any] = {}
    for name, path in folders.items():
        module.CUBINS = path
        module.unavailable.cache_clear()
        result[name] = {option: ask(option) for option in ("auto", "on", "off")}
    module.CUBINS = shipped
    for variable in ("VLLM_BATCH_INVARIANT", "VLLM_LORA_ENABLE_DUAL_STREAM"):
        module.unavailable.cache_clear()
        os.environ[variable] = "1"
        result[variable] = {"auto": ask("auto")}
        del os.environ[variable]
    out.write_text(json.dumps(result), encoding="utf-8")


# -- the driver ------------------------------------------------------------------------


def _driver() -> dict[str, Any]:
    """What reaches the driver of two launches and of one that it refuses."""
    import torch
    from vllm_sparkforge.decode import module

    driver = sys.modules["cuda.bindings"].driver
    properties = types.SimpleNamespace(
        shared_memory_per_block_optin=101_376, multi_processor_count=48
    )
    kept = torch.cuda.current_stream, torch.cuda.get_device_properties
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=77)
    torch.cuda.get_device_properties = lambda device: properties
    operands = module.CombineOperands(experts=16, ids=32, sum=48, k=64)
    device = torch.device("cuda", 0)
    try:
        for _ in range(2):
            module.launch("experts_combine", (3, 2), 256, 1024, operands, device)
        calls = list(driver.calls)
        unknown = outcome(lambda: str(module.launch("no", (1, 1), 1, 0, operands, device)))
        driver.error = Named(1, "CUDA_ERROR_INVALID_VALUE")
        name = "experts_combine"
        refused = outcome(lambda: str(module.launch(name, (1, 1), 1, 0, operands, device)))
        sizes = [module.max_shared_memory(0), module.multiprocessors(0)]
    finally:
        torch.cuda.current_stream, torch.cuda.get_device_properties = kept
    return {
        "calls": calls,
        "refused": [unknown[0], refused[0]],
        "sizes": sizes,
    }


def _structures() -> dict[str, list[int]]:
    """Size and offsets of each structure of operands."""
    import ctypes

    from vllm_sparkforge.decode import module

    found = {}
    for name in ("Dense", "Expand", "Expert", "Combine", "Norm", "Route", "Rotary"):
        kind = getattr(module, f"{name}Operands")
        offsets = [getattr(kind, field).offset for field, _ in kind._fields_]
        found[name] = [ctypes.sizeof(kind), *offsets]
    return found


def _write(
    out: Path, result: dict[str, Any], steps: Mapping[str, Callable[[Any], Any]], launches: Any
) -> None:
    """Write what steps find, beside what is known."""
    for name, step in steps.items():
        try:
            result[name] = step(launches)
        except Exception:  # with a part switched off: the tests of the others need their answers
            result[name] = traceback.format_exc()
    out.write_text(json.dumps(result), encoding="utf-8")


def _compute(asked: dict[str, Any], folder: Path, out: Path) -> None:
    start("9.0", ship(folder / "computed"))
    import torch

    torch.manual_seed(3)
    result: dict[str, Any] = {"structures": _structures(), "driver": _driver()}
    if asked["places"] is not None:
        result["packing"] = decode_results.packing(asked["places"])
        result["marlin"] = decode_results.marlin_order(asked["places"])
        result["scale order"] = decode_row_major.scale_order(asked["places"])
    launches = emulate()
    decode_experts.emulate_marlin()
    steps: dict[str, Callable[[Any], Any]] = {
        "dense": decode_results.dense_layers,
        "bf16": decode_results.bf16_layers,
        "lossless": decode_lossless.lossless_layers,
        "head": decode_results.head,
        "experts": decode_experts.experts,
        "row_major": decode_row_major.row_major,
        "half": decode_half.half,
        "rotary": lambda launches: decode_rotary.rotary(
            launches, asked["places"] and asked["places"]["caches"]
        ),
        "self_check": decode_selfcheck.self_check,
        "cache": decode_cache.cache,
        "metrics": decode_metrics.metrics,
        "parts": decode_parts.parts,
        "trial": decode_trial.trial,
    }
    _write(out, result, steps, launches)


def _rank(rank: int, folder: Path, out: Path) -> None:
    """One of two ranks of tensor parallelism."""
    start("9.0", folder / "computed", rank, 2)
    import torch

    torch.manual_seed(3)
    decode_experts.emulate_marlin()
    _write(out, {}, {"half": decode_half.rank}, emulate())


def _run(folder: Path, jobs: Mapping[str, tuple[Callable[..., None], tuple[Any, ...]]]) -> Any:
    """Run functions at the same time, each in a process; return what they wrote."""
    fork = multiprocessing.get_context("fork")
    paths = {name: folder / f"{name}.json" for name in jobs}
    processes = {
        name: fork.Process(target=function, args=(*arguments, paths[name]))
        for name, (function, arguments) in jobs.items()
    }
    for one in processes.values():
        one.start()
    while running := [one for one in processes.values() if one.exitcode is None]:
        multiprocessing.connection.wait(one.sentinel for one in running)
        if failed := {name: one.exitcode for name, one in processes.items() if one.exitcode}:
            for one in running:
                one.kill()  # a rank waits for the other
            sys.exit(f"exit codes: {failed}")
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}


def main() -> None:
    """Read the questions, write the answers; a process for each device."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(sys.argv[2]).parent / "devices"
    folder.mkdir()
    # what ranks leave for /metrics is no other server's
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(folder / "cache")}
    answers: dict[str, Any] = {}
    for capability in asked["capabilities"]:
        answers |= _run(folder, {capability: (_selection, (capability, folder))})
    answers |= _run(folder, {"computed": (_compute, (asked, folder))})
    answers |= _run(folder, {f"rank {rank}": (_rank, (rank, folder)) for rank in range(2)})
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
