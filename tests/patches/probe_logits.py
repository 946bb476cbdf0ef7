"""Runs inside the interpreter under test and writes what it saw as JSON (and arrays as .npy).

usage: probe_logits.py STEP[,STEP...] REQUEST.json OUT_FOLDER

Every step is a function below whose name it is; the steps of one call share a process, because
importing the engine takes longer than most of them. REQUEST holds checkpoints and prompts, OUT gets
`result.json` with one entry a step. The engine runs in this process, so that the probe can look at
the model and stand in for what the machine reports about itself.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

# Before the engine is imported: in one process, small, offline.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

KIND = "bf16_dequant"


def make_engine(checkpoint: str, moe_backend: str = KIND, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        checkpoint,
        kernel_config={"moe_backend": moe_backend},
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        **options,
    )


def drop_engine() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def failure(checkpoint: str, moe_backend: str = KIND, **options: Any) -> dict[str, Any]:
    """How starting an engine fails, and whether it got as far as reading weights."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loads: list[bool] = []
    original = DefaultModelLoader.load_weights

    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(True)
        return original(self, *args, **kwargs)

    DefaultModelLoader.load_weights = load_weights
    try:
        make_engine(checkpoint, moe_backend, **options)
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "loaded": bool(loads)}
    finally:
        DefaultModelLoader.load_weights = original
        drop_engine()
    return {"type": None, "message": "", "loaded": bool(loads)}


def raw_logits(engine: Any, prompt: list[int], count: int) -> tuple[Any, list[int]]:
    """Logits [len(prompt), vocab] of all positions as the engine's own sampler reports them before
    any processing, and `count` greedy tokens after the prompt."""
    import numpy as np
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=count,
        ignore_eos=True,
        prompt_logprobs=-1,
        logprobs=-1,
        detokenize=False,
    )
    (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (completion,) = output.outputs
    # Nothing predicts entry 0 of the prompt; its last position predicts the first new token.
    rows = [*output.prompt_logprobs[1:], completion.logprobs[0]]
    logits = np.array([[row[i].logprob for i in range(len(row))] for row in rows], np.float32)
    return logits, list(completion.token_ids)


def expert_parameters(model: Any) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": str(p.dtype), "bytes": p.numel() * p.element_size()}
        for name, p in model.named_parameters()
        if ".experts." in name
    ]


def auto(request: dict[str, Any], out: Path) -> Any:
    return failure(request["checkpoint"], "auto")


def starved(request: dict[str, Any], out: Path) -> Any:
    """By name, on a machine that reports too little memory."""
    import vllm.model_executor.layers.fused_moe.oracle.mxfp4 as oracle

    results = {}
    original = oracle.get_memory_node_info
    for available in request["available"]:
        info = original(0)
        info.available_memory = available
        oracle.get_memory_node_info = lambda node_id=0, info=info: info
        try:
            results[str(available)] = failure(request["checkpoint"], KIND)
        finally:
            oracle.get_memory_node_info = original
    return results


def damaged(request: dict[str, Any], out: Path) -> Any:
    return {name: failure(path, KIND) for name, path in request["damaged"].items()}


def by_name(request: dict[str, Any], out: Path) -> Any:
    """The real thing: logits, tokens, and what is left of the packed weights."""
    import numpy as np
    from torch.multiprocessing.reductions import StorageWeakRef
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    freed: list[bool] = []
    original = GptOssMxfp4MoEMethod.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        packed = [
            StorageWeakRef(p.untyped_storage())
            for p in layer.parameters()
            if str(p.dtype) == "torch.uint8"
        ]
        assert len(packed) == 4, packed
        original(self, layer)
        freed.append(all(storage.expired() for storage in packed))

    GptOssMxfp4MoEMethod.process_weights_after_loading = process
    try:
        engine = make_engine(request["checkpoint"], KIND)
    finally:
        GptOssMxfp4MoEMethod.process_weights_after_loading = original
    (parameters,) = engine.apply_model(expert_parameters)
    logits, _ = raw_logits(engine, request["prompt"], 1)
    np.save(out / "logits.npy", logits)
    _, tokens = raw_logits(engine, request["greedy_prompt"], request["greedy_count"])
    del engine
    drop_engine()
    return {
        "parameters": parameters,
        "freed": freed,
        "tokens": tokens,
    }


def streamed(request: dict[str, Any], out: Path) -> Any:
    """The same model from a checkpoint that holds one tensor an expert."""
    import numpy as np

    engine = make_engine(request["streamed"], KIND)
    logits, _ = raw_logits(engine, request["prompt"], 1)
    np.save(out / "streamed.npy", logits)
    del engine
    drop_engine()
    return {}


def every_value(request: dict[str, Any], out: Path) -> Any:
    """Bits of all 256 bytes under all 256 scales: [scale, byte, low or high nibble]."""
    import numpy as np
    import torch
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import dequant_mxfp4_to_bf16

    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].expand(256, 16)
    blocks = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(256, 256)
    values = dequant_mxfp4_to_bf16(blocks.contiguous(), scales.contiguous())
    bits = values.view(torch.int16).numpy().view(np.uint16)
    np.save(out / "values.npy", bits.reshape(256, 256, 2))
    return {}


def moe_config(moe_backend: str, **changes: Any) -> Any:
    """A layer of gpt-oss-20b in the engine's words."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    parallel = FusedMoEParallelConfig.make_no_parallel()
    for name in ("tp_size", "ep_size", "use_ep"):
        if name in changes:
            setattr(parallel, name, changes.pop(name))
    arguments = {
        "num_experts": 32,
        "experts_per_token": 4,
        "hidden_dim": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_logical_experts": 32,
        "activation": MoEActivation.SWIGLUOAI,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "has_bias": True,
        "moe_backend": moe_backend,
    }
    return FusedMoEConfig(**{**arguments, **changes})


def select(moe_backend: str, **changes: Any) -> dict[str, Any]:
    """What the selector for gpt-oss answers for one layer of a 24-layer model."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

    config = VllmConfig()
    # Of the model configuration the selector reads these two.
    config.model_config = types.SimpleNamespace(
        quantization_config=None, get_num_layers=lambda parallel_config: 24
    )
    with set_current_vllm_config(config):
        try:
            moe = moe_config(moe_backend, **changes)
            backend, experts = oracle.select_gpt_oss_mxfp4_moe_backend(moe)
        except Exception as error:
            return {"type": type(error).__name__, "message": str(error)}
        cost = oracle.bf16_dequant_cost(moe, config)
    return {
        "type": None,
        "backend": backend.value,
        "experts": experts.__name__,
        "cost": {"packed": cost.packed, "bf16": cost.dequantized, "peak": cost.peak},
    }


def amx(request: dict[str, Any], out: Path) -> Any:
    """The selector on a CPU with AMX, where MXFP4 runs as it is."""
    import torch

    original = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: True
    try:
        return {name: select(name) for name in ("auto", KIND)}
    finally:
        torch.cpu._is_amx_tile_supported = original


def shapes(request: dict[str, Any], out: Path) -> Any:
    """The selector without AMX, for ways to cut the model."""
    import torch

    original = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: False
    try:
        return {
            "auto": select("auto"),
            "whole": select(KIND),
            "two ranks": select(KIND, tp_size=2),
            "four ranks": select(KIND, tp_size=4),
            "expert parallel": select(KIND, ep_size=2, use_ep=True, num_local_experts=16),
            "odd intermediate": select(KIND, intermediate_size=2896),
            "lora": select(KIND, is_lora_enabled=True),
        }
    finally:
        torch.cpu._is_amx_tile_supported = original


def memory(request: dict[str, Any], out: Path) -> Any:
    """What a rank may take, on made-up machines: node memory in bytes, cgroup limit, page cache."""
    import vllm.model_executor.layers.fused_moe.oracle.mxfp4 as oracle
    from vllm.utils.cpu_resource_utils import MemoryNodeInfo

    names = ("get_memory_node_info", "get_cgroup_memory_limit", "get_cgroup_reclaimable_memory")
    originals = {name: getattr(oracle, name) for name in (*names, "get_visible_memory_node")}

    def available(total: int, free: int, limit: int | None, *, ranks: int, nodes: int) -> int:
        info = MemoryNodeInfo(total_memory=total, available_memory=free)
        oracle.get_memory_node_info = lambda node_id=0: info
        oracle.get_cgroup_memory_limit = lambda: limit
        oracle.get_cgroup_reclaimable_memory = lambda: 50
        oracle.get_visible_memory_node = lambda: list(range(nodes))
        parallel = types.SimpleNamespace(local_world_size=ranks, data_parallel_size_local=1)
        answer: int = oracle._available_memory_per_rank(
            types.SimpleNamespace(parallel_config=parallel)
        )
        return answer

    try:
        return {
            "bare": available(100, 10, None, ranks=1, nodes=1),
            "wide cgroup": available(100, 10, 200, ranks=1, nodes=1),
            "tight cgroup": available(100, 10, 100, ranks=1, nodes=1),
            "two ranks, one node": available(100, 10, None, ranks=2, nodes=1),
            "two ranks, two nodes": available(100, 10, None, ranks=2, nodes=2),
            "three ranks, two nodes": available(100, 10, None, ranks=3, nodes=2),
        }
    finally:
        for name, original in originals.items():
            setattr(oracle, name, original)


def cuda(request: dict[str, Any], out: Path) -> Any:
    """The selector on a GB10 that is not there: only the platform's answers are made up."""
    import fake_cuda  # type: ignore[import-not-found]  # beside this file when it runs

    fake_cuda.install(fake_cuda.Capability(12, 1))
    return {name: select(name) for name in ("auto", "marlin", KIND)}


def main() -> None:
    steps, request_path, out = sys.argv[1].split(","), Path(sys.argv[2]), Path(sys.argv[3])
    request = json.loads(request_path.read_text(encoding="utf-8"))
    result = {step: globals()[step](request, out) for step in steps}
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
