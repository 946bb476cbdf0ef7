"""Runs inside the interpreter under test and writes what it saw as JSON (and arrays as .npy).

usage: python -m tests.patches.probes.probe_logits STEP[,STEP...] REQUEST.json OUT_FOLDER

Every step is a function below whose name it is; the steps of one call share a process, because
importing the engine takes longer than most of them. REQUEST holds checkpoints and prompts, OUT gets
`result.json` with one entry a step. The engine runs in this process, so that the probe can look at
the model and stand in for what the machine reports about itself.
"""

import functools
import gc
import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

# Before the engine is imported: in one process, small, offline.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

EXPERTS = "bf16_dequant"


@functools.cache
def engine_class() -> Any:
    """vLLM's class, once imported: its modules are never garbage, and vLLM collects garbage at
    many steps of each engine, 1 s of CPU each with them."""
    from vllm import LLM

    gc.freeze()
    return LLM


def small_engine(checkpoint: str, **options: Any) -> Any:
    """An engine for a few short prompts."""
    return engine_class()(
        checkpoint,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        num_gpu_blocks_override=64,  # of 128 tokens: a GiB of zeros is 1.5 s of CPU
        **options,
    )


def plugin(**ours: Any) -> dict[str, Any]:
    """Options of the engine with which the plugin gets its own; those that are empty left out."""
    given = {name: value for name, value in ours.items() if value}
    return {"additional_config": {"sparkforge": given} if given else {}}


def make_engine(
    checkpoint: str, *, experts: str = EXPERTS, mxfp4_layers: str = "", **options: Any
) -> Any:
    ours = plugin(experts=experts, mxfp4_layers=mxfp4_layers)
    return small_engine(checkpoint, **ours, **options)


def drop_engine() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def save_logits(engine: Any, prompt: list[int], path: Path) -> Any:
    """Write the logits of all positions of a prompt, and return them."""
    import numpy as np

    rows, _ = raw_logits(engine, prompt, 1)
    np.save(path, rows)
    return rows


def attempt(action: Callable[[], Any]) -> dict[str, Any]:
    """What `action` raises, or what it returns."""
    try:
        return {"type": None, "message": "", "value": action()}
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}


def failure(checkpoint: str, **options: Any) -> dict[str, Any]:
    """How starting an engine fails, and whether it got as far as reading weights."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    real = DefaultModelLoader.load_weights
    loads: list[bool] = []

    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(True)
        return real(self, *args, **kwargs)

    with mock.patch.object(DefaultModelLoader, "load_weights", load_weights):
        said = attempt(lambda: bool(make_engine(checkpoint, **options)))
    drop_engine()
    return said | {"loaded": bool(loads)}


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


def amx_is(there: bool) -> Any:
    """Selection as on a CPU with AMX, or without, whatever this one has. No kernel may run inside
    that is selected for AMX."""
    import torch

    return mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: there)


def auto(request: dict[str, Any], out: Path) -> Any:
    """Where no MXFP4 backend is usable."""
    with amx_is(False):
        return failure(request["checkpoint"], experts="")


def starved(request: dict[str, Any], out: Path) -> Any:
    """By name, on a machine that reports too little memory."""
    from vllm_sparkforge import bf16_experts as ours

    results = {}
    for available in request["available"]:
        info = ours.get_memory_node_info(0)
        info.available_memory = available
        with mock.patch.object(ours, "get_memory_node_info", return_value=info):
            results[str(available)] = failure(request["checkpoint"])
    return results


def damaged(request: dict[str, Any], out: Path) -> Any:
    return {name: failure(path) for name, path in request["damaged"].items()}


def by_name(request: dict[str, Any], out: Path) -> Any:
    """The real thing: logits, tokens, and what is left of the packed weights."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from vllm_sparkforge.bf16_experts import Bf16ExpertsMethod

    freed: list[bool] = []
    original = Bf16ExpertsMethod.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        packed = [
            StorageWeakRef(p.untyped_storage())
            for p in layer.parameters()
            if str(p.dtype) == "torch.uint8"
        ]
        assert len(packed) == 4, packed
        original(self, layer)
        freed.append(all(storage.expired() for storage in packed))

    with mock.patch.object(Bf16ExpertsMethod, "process_weights_after_loading", process):
        engine = make_engine(request["checkpoint"])
    (parameters,) = engine.apply_model(expert_parameters)
    save_logits(engine, request["prompt"], out / "logits.npy")
    _, tokens = raw_logits(engine, request["greedy_prompt"], request["greedy_count"])
    del engine
    drop_engine()
    return {"parameters": parameters, "freed": freed, "tokens": tokens}


def experts_of(model: Any) -> list[str]:
    """Names of the classes that run the experts."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    kernels = (getattr(method, "moe_kernel", None) for method in methods)
    return sorted({type(k.fused_experts).__name__ for k in kernels if k is not None})


def isa(request: dict[str, Any], out: Path) -> Any:
    """A first request of one token, then logits, on the instruction set that is shown; and when AMX
    tiles are requested of the system."""
    import torch
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    order: list[str] = []
    forward, supported = GptOssForCausalLM.forward, torch.cpu._is_amx_tile_supported
    init_amx = torch.cpu._init_amx

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        order.append("forward")
        return forward(self, *args, **kwargs)

    def plugin_has_amx() -> bool:
        # For the plugin alone: what is selected elsewhere must run on this machine.
        asking: str = sys._getframe(1).f_globals["__name__"]
        return asking == "vllm_sparkforge" or supported()

    def request_tiles() -> bool:
        order.append("tiles")
        return init_amx() if supported() else True

    with (
        mock.patch.object(GptOssForCausalLM, "forward", recorded),
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", plugin_has_amx),
        mock.patch.object(torch.cpu, "_init_amx", request_tiles),
    ):
        engine = make_engine(request["checkpoint"], experts=request["experts"])
        _, first = raw_logits(engine, [5], 1)
    (experts,) = engine.apply_model(experts_of)
    save_logits(engine, request["prompt"], out / "isa.npy")
    del engine
    drop_engine()
    loaded = re.findall(r"/vllm/(_C\w*)\.abi3\.so", Path("/proc/self/maps").read_text())
    return {
        "order": order,
        "first": first,
        "experts": experts,
        "extensions": sorted(set(loaded)),
    }


def tiles_denied(request: dict[str, Any], out: Path) -> Any:
    """The plugin's start where the system refuses AMX tiles, which the log warns of; and once more
    where it does not ask for them."""
    import torch
    import vllm_sparkforge

    with amx_is(True), mock.patch.object(torch.cpu, "_init_amx", return_value=False):
        vllm_sparkforge.register()
        with mock.patch.dict(os.environ, {"VLLM_SPARKFORGE": '{"off": ["amx"]}'}):
            vllm_sparkforge.register()
    return {}


def every_value(request: dict[str, Any], out: Path) -> Any:
    """Bits of all 256 bytes under all 256 scales: [scale, byte, low or high nibble]."""
    import numpy as np
    import torch
    from vllm_sparkforge.mx.formats import mxfp4_dequantize

    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].expand(256, 16)
    blocks = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(256, 256)
    values = mxfp4_dequantize(blocks.contiguous(), scales.contiguous())
    bits = values.view(torch.int16).numpy().view(np.uint16)
    np.save(out / "values.npy", bits.reshape(256, 256, 2))
    return {}


def select(experts: str, **changes: Any) -> dict[str, Any]:
    """What the plugin answers for one layer of a 24-layer model, like gpt-oss-20b's."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_sparkforge import bf16_experts as ours
    from vllm_sparkforge.quant import GptOssConfig

    from tests.patches.probes.moe_layers import moe_config

    config = VllmConfig(**plugin(experts=experts))
    # Of the model configuration these two are read.
    config.model_config = types.SimpleNamespace(
        quantization_config=None, get_num_layers=lambda parallel_config: 24
    )

    def make() -> Any:
        moe = moe_config(32, 2880, 2880, **changes)
        return moe, GptOssConfig()._make_moe_method(moe)

    with (
        mock.patch.object(ours, "logger") as logger,
        mock.patch.object(ours, "_available_memory_per_rank", return_value=1 << 50),
        set_current_vllm_config(config),
    ):
        made = attempt(make)
    if made["type"]:
        return made
    moe, method = made["value"]
    cost = ours.cost(moe, config)
    said = [call.args for call in logger.warning_once.call_args_list]
    return {
        "type": None,
        "method": type(method).__name__,
        "backend": method.mxfp4_backend.value,
        "experts": method.experts_cls.__name__,
        "warnings": [text % tuple(values) for text, *values in said],
        "cost": {"packed": cost.packed, "bf16": cost.dequantized, "peak": cost.peak},
    }


def amx(request: dict[str, Any], out: Path) -> Any:
    """The selector on a CPU with AMX, where MXFP4 runs as it is."""
    with amx_is(True):
        return {name: select(name) for name in ("", EXPERTS)}


def shapes(request: dict[str, Any], out: Path) -> Any:
    """The selector without AMX, for ways to cut the model."""
    with amx_is(False):
        return {
            "auto": select(""),
            "whole": select(EXPERTS),
            "two ranks": select(EXPERTS, tp_size=2),
            "four ranks": select(EXPERTS, tp_size=4),
            "expert parallel": select(EXPERTS, ep_size=2, use_ep=True, num_local_experts=16),
            "odd intermediate": select(EXPERTS, intermediate_size=2896),
            "lora": select(EXPERTS, is_lora_enabled=True),
        }


def memory(request: dict[str, Any], out: Path) -> Any:
    """What a rank may take, on made-up machines: memory of a node and cgroup in bytes; nodes that
    the rank may allocate on, of those there are."""
    from vllm.utils.cpu_resource_utils import MemoryNodeInfo
    from vllm_sparkforge import bf16_experts as ours

    def available(
        total: int,
        free: int,
        limit: int | None = None,
        usage: int | None = None,
        *,
        ranks: int,
        nodes: int,
        bound: int | None = None,
    ) -> int:
        info = MemoryNodeInfo(total_memory=total, available_memory=free)
        parallel = types.SimpleNamespace(local_world_size=ranks, data_parallel_size_local=1)
        config = types.SimpleNamespace(parallel_config=parallel)
        with mock.patch.multiple(
            ours,
            get_allocation_nodes=lambda: list(range(nodes if bound is None else bound)),
            get_memory_node_info=lambda node_id=0: info,
            get_cgroup_memory_limit=lambda: limit,
            get_cgroup_memory_usage=lambda: usage,
            get_cgroup_reclaimable_memory=lambda: 50,
            get_visible_memory_node=lambda: list(range(nodes)),
        ):
            return int(ours._available_memory_per_rank(config))

    return {
        "tight cgroup": available(100, 10, 100, 90, ranks=1, nodes=1),
        "two ranks, one node": available(100, 10, ranks=2, nodes=1),
        "bound, three ranks, two nodes": available(100, 10, ranks=3, nodes=2, bound=1),
        "unbound, two ranks, two nodes": available(100, 10, ranks=2, nodes=2),
        "unbound, cgroup wider than a node": available(150, 100, 200, 120, ranks=1, nodes=2),
    }


def policies(request: dict[str, Any], out: Path) -> Any:
    """Nodes that a process may allocate on, by the first line of its numa_maps; allowed: 0 to 3."""
    import io

    from vllm_sparkforge import memory_nodes as ours

    def nodes(line: str | None) -> list[int]:
        def read(path: Path) -> io.StringIO:
            assert str(path) == "/proc/self/numa_maps"
            if line is None:
                raise FileNotFoundError(path)
            return io.StringIO(line)

        affinity = mock.patch.object(ours, "get_memory_affinity", lambda: [0, 1, 2, 3])
        with affinity, mock.patch.object(Path, "open", read):
            answer: list[int] = ours.get_allocation_nodes()
            return answer

    mapping = "file=/usr/bin/python3 mapped=2 N0=2 kernelpagesize_kB=4\n"
    return {
        policy: nodes(None if policy == "no NUMA" else f"5654f29a3000 {policy} {mapping}")
        for policy in request["policies"]
    }


def main(known: dict[str, Any]) -> None:
    """Run the steps that are asked for, which are functions of these names."""
    steps, request_path, out = sys.argv[1].split(","), Path(sys.argv[2]), Path(sys.argv[3])
    request = json.loads(request_path.read_text(encoding="utf-8"))
    result = {step: known[step](request, out) for step in steps}
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(globals())
