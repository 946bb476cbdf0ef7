"""Runs FlashInfer's own Python code, without a GPU or nvcc, and writes what it answers.

usage: python -m tests.patches.probes.probe_flashinfer QUESTION[,QUESTION...] OUT.json

Questions are autotuner, architectures, mxfp8_moe and loads; OUT gets an entry each.

The FlashInfer is the one first on the path. Of what it imports only pynvml is made up (nobody asks
it anything), and CUDA's version, which FlashInfer would ask of nvcc.
"""

import json
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CUDA_VERSION = "13.0"


def outcome(run: Callable[[], Any]) -> Any:
    """Return what a call returns, or the name of the error that it ends with."""
    try:
        return run()
    except Exception as error:
        return type(error).__name__


def autotuner() -> dict[str, Any]:
    """Match calls with profiles where inputs are left out, and where none is."""
    import torch
    from flashinfer.autotuner import (
        AutoTuner,
        ConstraintSpec,
        DynamicTensorSpec,
        TuningConfig,
        autotuner_initializer_zeros,
    )

    def spec(inputs: tuple[int, ...], dims: tuple[int, ...]) -> Any:
        return DynamicTensorSpec(inputs, dims, (1, 8, 64), lambda rows: 8 if rows >= 8 else 1)

    def rows(buckets: Callable[[int], tuple[int, ...]]) -> Any:
        return DynamicTensorSpec((1, 0), (1, 0), buckets, lambda rows: 8 if rows >= 8 else 1)

    plain = TuningConfig(
        dynamic_tensor_specs=(spec((0, 1), (0, 1)),),
        constraint_specs=(ConstraintSpec(2, 1, lambda shapes: shapes[0][0] * 2),),
    )
    # the first of the linked inputs gives the value that buckets are made of
    asked = TuningConfig(dynamic_tensor_specs=(rows(lambda value: (value, 2 * value)),))
    rows_of_both = TuningConfig(dynamic_tensor_specs=(spec((1, 0), (0, 0)),))
    initialized = TuningConfig(
        dynamic_tensor_specs=(spec((0,), (0,)),),
        tensor_initializers=((2, autotuner_initializer_zeros),),
    )
    a, b, c = torch.empty(16, 4), torch.empty(4, 16), torch.empty(3, 32)
    calls: dict[str, tuple[Any, list[Any]]] = {
        "all there": (plain, [a, b, c]),
        "linked input is None": (plain, [a, None, c]),
        "constrained input is None": (plain, [a, b, None]),
        "first linked input is None": (asked, [a, None]),
        "None has the linked dimension": (rows_of_both, [a, None]),
        "initialized input is missing": (initialized, [a, b]),
    }
    tuner = AutoTuner.get()
    result = {}
    for name, (config, inputs) in calls.items():
        shapes = tuner._get_input_sizes(inputs)

        def nearest(config: Any = config, shapes: Any = shapes) -> Any:
            return AutoTuner._find_nearest_profile(shapes, config)

        def profiles(config: Any = config, inputs: Any = inputs) -> Any:
            made = tuner._generate_optimization_profiles(config, inputs)
            for profile in made:
                # every profile that is tuned must be found again by its own shapes
                AutoTuner._find_nearest_profile(profile.get_opt_shapes(), config)
            return [profile.get_opt_shapes() for profile in made]

        result[name] = {"nearest": outcome(nearest), "profiles": outcome(profiles)}
    return result


def architectures() -> dict[str, Any]:
    """Ask, for lists of architectures, what is compiled and baked."""
    import os

    import flashinfer.aot
    import flashinfer.jit
    from flashinfer.compilation_context import CompilationContext
    from flashinfer.jit import cpp_ext
    from packaging.version import Version

    for module in (cpp_ext, flashinfer.aot):
        module.get_cuda_version = lambda: Version(CUDA_VERSION)
    result: dict[str, Any] = {}
    for listed in ("12.0", "12.0f", "12.1", "12.1a", "12.1f", "9.0"):
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = listed
        capabilities = flashinfer.aot.detect_sm_capabilities()
        result[listed] = {
            "flags": CompilationContext().get_nvcc_flags_list()[0],
            "capabilities": sorted(name for name, has in capabilities.items() if has),
        }
    result["named flags"] = {
        name: getattr(flashinfer.jit, name)[0]
        for name in dir(flashinfer.jit)
        if name.startswith("sm12") and name.endswith("_nvcc_flags")
    }
    return result


def mxfp8_moe() -> dict[str, Any]:
    """Ask each CUTLASS configuration of the fused MoE for its architectures."""
    import flashinfer.fused_moe as moe
    from flashinfer.fused_moe import runners

    asked = (80, 89, 90, 100, 103, 107, 110, 120, 121)
    answer: dict[str, Any] = {
        name: [arch for arch in asked if getattr(moe, name).supported(arch)]
        for name in dir(moe)
        if name.startswith("Cutlass") and name.endswith("Config")
    }
    for name in dir(runners):
        if name.startswith("Cutlass") and name.endswith("Runner"):
            archs = getattr(runners, name)._supported_archs
            answer[name] = [arch for arch in asked if arch in archs]
    return answer


def loads() -> dict[str, str]:
    """Load a module of the pack on the path, and one that it lacks: "loaded", or the error."""
    import torch

    vars(torch.version)["cuda"] = CUDA_VERSION
    from flashinfer.jit import cpp_ext
    from flashinfer.jit.sampling import gen_sampling_module
    from flashinfer.jit.xqa import gen_xqa_module
    from packaging.version import Version

    vars(cpp_ext)["get_cuda_version"] = lambda: Version(CUDA_VERSION)
    bf16 = torch.bfloat16

    def load(spec: Any, function: str) -> str:
        assert callable(getattr(spec.build_and_load(), function))
        return "loaded"

    return {
        spec.name: outcome(partial(load, spec, function))
        for spec, function in (
            (gen_xqa_module(bf16, bf16, 16, 64, 8, True, bf16), "xqa_wrapper"),
            (gen_sampling_module(), "softmax"),
        )
    }


def main() -> None:
    questions, out = sys.argv[1].split(","), Path(sys.argv[2])
    sys.modules["pynvml"] = types.ModuleType("pynvml")
    answer = {what: _QUESTIONS[what]() for what in questions}
    out.write_text(json.dumps(answer, indent=1), encoding="utf-8")


_QUESTIONS: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (autotuner, architectures, mxfp8_moe, loads)
}

if __name__ == "__main__":
    main()
