"""Makes the calls of FlashInfer that vLLM makes for gpt-oss, and writes the modules they load.

usage: python -m tests.patches.probes.probe_packs 12.1 OUT.json

The FlashInfer is the tree first on the path, and the code that chooses modules is its own. Made up
are the device (its capability, its number of SMs), pynvml, CUDA's version, and the loading of a
module: its name is noted, and a stand-in takes its place. OUT gets the names by what vLLM was
started with.
"""

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS = ((64, 8), (32, 4))
"""Query and KV heads of gpt-oss, on one rank and on each of two."""
WINDOWS = (127, -1)
"""``window_left`` of the layers with a sliding window of 128, and of those without."""
HEAD_SIZE = 64
SMS = 48


class _Module:
    """In place of a loaded library: its functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return lambda *_, **__: torch.zeros(4)


def _pretend(capability: tuple[int, int], loaded: list[str]) -> None:
    """Stand in for the device, and note names in place of loading."""
    import torch
    from flashinfer import utils
    from flashinfer.jit import core

    def load(spec: Any) -> _Module:
        loaded.append(spec.name)
        return _Module()

    vars(core)["JitSpecNvcc"].build_and_load = load
    answers: dict[str, Callable[..., Any]] = {
        "get_compute_capability": lambda *_: capability,
        "get_device_sm_count": lambda *_: SMS,
        "device_support_pdl": lambda *_: True,
        "get_seed_and_offset": lambda *_, **__: (0, 0),
    }
    modules = [one for name, one in sys.modules.items() if name.startswith("flashinfer")]
    for module in (utils, *modules):
        for name in answers.keys() & vars(module).keys():
            setattr(module, name, answers[name])
    empty = torch.empty

    def unpinned(*sizes: Any, **more: Any) -> Any:
        more.pop("pin_memory", None)  # which needs a device
        return empty(*sizes, **more)

    vars(torch)["empty"] = unpinned
    vars(torch.cuda)["get_device_capability"] = lambda *_: capability


def _calls(capability: tuple[int, int]) -> dict[str, Callable[[], None]]:
    import flashinfer
    import torch
    from flashinfer import decode, sampling

    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    workspace = torch.zeros(32 << 20, dtype=torch.uint8)

    def prefill(kv: Any) -> None:
        for window in WINDOWS:
            flashinfer.BatchAttentionWithAttentionSinkWrapper(
                workspace,
                "HND",
                backend="auto",
                q_data_type=bf16,
                kv_data_type=kv,
                head_dim_qk=HEAD_SIZE,
                head_dim_vo=HEAD_SIZE,
                window_left=window,
            )

    def steps(kv: Any, page: int = 16) -> None:
        for queries, pairs in HEADS:
            for window in WINDOWS:
                query = torch.zeros(2, queries, HEAD_SIZE, dtype=bf16)
                cache = torch.zeros(4, pairs, page, HEAD_SIZE, dtype=kv)
                decode.xqa_batch_decode_with_kv_cache(
                    query=query,
                    kv_cache=(cache, cache),
                    workspace_buffer=workspace,
                    block_tables=torch.zeros(2, 4, dtype=torch.int32),
                    seq_lens=torch.ones(2, dtype=torch.int32),
                    max_seq_len=64,
                    window_left=window,
                    out=torch.empty_like(query),
                    sinks=torch.zeros(queries),
                    kv_layout="HND",
                    q_len_per_req=1,
                    mask=None,
                    q_cu_seq_lens=None,
                )

    def samples() -> None:
        probs = torch.rand(4, 201088)
        many = torch.full((4,), 50, dtype=torch.int32)
        mass = torch.full((4,), 0.9)
        sampling.top_p_sampling_from_probs(probs, mass, deterministic=True)
        sampling.top_k_sampling_from_probs(probs, many, deterministic=True)
        sampling.top_k_top_p_sampling_from_logits(probs, many, mass, deterministic=True)

    def fp8() -> None:
        prefill(e4m3)
        steps(e4m3)

    def default() -> None:
        prefill(bf16)
        steps(bf16)
        samples()

    def cutlass() -> None:
        from flashinfer.fused_moe.core import get_cutlass_fused_moe_module

        flashinfer.mxfp8_quantize(torch.zeros(16, 2944, dtype=bf16), is_sf_swizzled_layout=True)
        get_cutlass_fused_moe_module("".join(map(str, capability)))

    def other_heads() -> None:
        flashinfer.BatchAttentionWithAttentionSinkWrapper(
            workspace, "HND", backend="fa2", head_dim_qk=128, head_dim_vo=128
        )

    return {
        "": default,
        "--block-size 32": lambda: steps(bf16, 32),
        "--block-size 64": lambda: steps(bf16, 64),
        "--kv-cache-dtype fp8": fp8,
        "--moe-backend flashinfer_cutlass": cutlass,
        "prefill, head size 128": other_heads,
    }


def main(version: str, out: Path) -> None:
    """Write the names of the modules that each start loads."""
    major, minor = (int(part) for part in version.split("."))
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = f"{version}f"
    sys.modules["pynvml"] = types.ModuleType("pynvml")
    import torch

    vars(torch.version)["cuda"] = "13.0"
    import flashinfer.jit.cpp_ext as flags
    from packaging.version import Version

    vars(flags)["get_cuda_version"] = lambda: Version("13.0")
    import flashinfer
    from flashinfer.jit import env

    tree = Path(flashinfer.__file__).parents[1]  # a checkout, not an installed package
    vars(env)["FLASHINFER_CSRC_DIR"] = tree / "csrc"
    loaded: list[str] = []
    _pretend((major, minor), loaded)
    found: dict[str, list[str]] = {}
    for label, call in _calls((major, minor)).items():
        loaded.clear()
        forget()
        call()
        found[label] = sorted(set(loaded))
    out.write_text(json.dumps(found), encoding="utf-8")


def forget() -> None:
    """Empty FlashInfer's caches of loaded modules."""
    from flashinfer import fused_moe, prefill, quantization, sampling, xqa

    for module in (fused_moe, prefill, quantization, sampling, xqa):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
