"""Which halves of layers are one operator, and what becomes of it where its kernels are wrong.

Runs inside the interpreter under test; used by decode_half.py.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import configured, logged


def choice(launches: Any, made: Any) -> dict[str, Any]:
    """What ``join`` says of layers, and the self-check of kernels."""
    return {"refused": _refused(made), "self_check": _self_check(launches, made)}


def _refused(made: Any) -> dict[str, Any]:
    import torch
    from vllm.model_executor.kernels.decode import layer
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    block = made.model.layers[0]
    runner = block.mlp.experts
    method, moe = runner.routed_experts.quant_method, runner.moe_config

    def weight(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return types.SimpleNamespace(weight=torch.empty(*shape, dtype=dtype))

    def join(config: Any, norm: Any = None, router: Any = None, hidden: int = 0) -> Any:
        norm = norm or block.post_attention_layernorm
        with mock.patch.object(moe, "hidden_dim", new=hidden or moe.hidden_dim):
            return layer.join(
                config,
                norm,
                router or block.mlp.router,
                runner,
                made.model.layers[1].input_layernorm,
            )

    # an attribute that is set to a value
    changed: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
        "fits": lambda _: (moe, "in_dtype", torch.bfloat16),
        "another backend": lambda _: (method, "mxfp4_backend", Mxfp4MoeBackend.TRITON),
        "no MXFP4": lambda _: (method, "mxfp4_backend", None),
        "LoRA": lambda _: (moe, "is_lora_enabled", True),
        "float16": lambda _: (moe, "in_dtype", torch.float16),
        "two devices": lambda c: (c.parallel_config, "data_parallel_size", 2),
        "returned experts": lambda c: (c.aux_output_config, "enable_return_routed_experts", True),
        "offloaded": lambda c: (c.offload_config.uva, "cpu_offload_gb", 1.0),
        "prefetched": lambda c: (c.offload_config.prefetch, "offload_group_size", 2),
        "padded": lambda _: (moe, "hidden_dim", 256),
    }
    others: dict[str, dict[str, Any]] = {
        "k = 96": {"router": weight(32, 96), "hidden": 96},
        "k = 3136": {"router": weight(32, 3136), "hidden": 3136},
        "the largest": {"router": weight(128, 3072), "hidden": 3072},
        "24 experts": {"router": weight(24, 128)},
        "144 experts": {"router": weight(144, 128)},
        "float16 norm": {"norm": weight(128, dtype=torch.float16)},
        "float32 router": {"router": weight(32, 128, dtype=torch.float32)},
    }
    result: dict[str, Any] = {}

    def note(name: str, half: Any, said: list[str]) -> None:
        known = {
            id(each.__dict__.pop("decode_half", None)) for each in (runner, runner.routed_experts)
        }
        result[name] = {"joined": half is not None, "known": known == {id(half)}, "said": said}

    for option in ("auto", "off"):
        for name, change in changed.items():
            with configured(option) as config, logged() as lines:
                target, attribute, value = change(config)
                with mock.patch.object(target, attribute, new=value):
                    note(f"{name}, {option}", join(config), lines)
        for name, parts in others.items():
            with configured(option) as config, logged() as lines:
                note(f"{name}, {option}", join(config, **parts), lines)
    runner.decode_half = runner.routed_experts.decode_half = block.moe_half
    return result


def _self_check(launches: Any, made: Any) -> dict[str, Any]:
    import torch
    from vllm.model_executor.kernels.decode import layer, selfcheck

    block = made.model.layers[0]
    marlin = block.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts

    def fail(_: Any) -> Any:
        raise RuntimeError("CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS")

    def only(kernel: str) -> Callable[[Any], Any]:
        return lambda x: x * (1.03 if launches.names[-1].startswith(kernel) else 1)

    def twice(ids: Any) -> Any:
        return torch.where(ids < 0, ids, ids[:, :1])

    spoils: dict[str, Callable[[Any], Any]] = {
        "3 % too large": lambda x: x * 1.03,
        "1 % too large": lambda x: x * 1.01,
        "NaN": lambda x: x * torch.nan,
        "an error": fail,
        "add_norm 3 % too large": only("add_norm"),
        "route 3 % too large": only("route"),
        "experts_combine 3 % too large": only("experts_combine"),
        "the rows of 8 NaN": lambda x: x * torch.nan if launches.names[-1] == "route_8" else x,
    }
    choices: dict[str, Callable[[Any], Any]] = {
        "an expert twice": twice,
        "experts beside those chosen": lambda ids: torch.where(ids < 0, ids, (ids + 1) % 32),
        "padding that has experts": lambda ids: torch.where(ids < 0, torch.arange(4), ids),
        "rows without experts": lambda ids: torch.full_like(ids, -1),
    }
    right = lambda x: x  # noqa: E731
    # with large logits, of which BF16 keeps little
    cases = {"right": (right, right), "large logits": (right, right)}
    cases |= {name: (spoil, right) for name, spoil in spoils.items()}
    cases |= {name: (right, choose) for name, choose in choices.items()}
    result: dict[str, Any] = {}
    for name, (launches.spoil, launches.choose) in cases.items():
        for option in ("auto", "on"):
            selfcheck._passed.clear()
            selfcheck._switched_off.clear()
            router, norm = block.mlp.router, block.post_attention_layernorm
            router.weight.data *= 64 if name == "large logits" else 1
            found: dict[str, Any] = {}
            with configured(option) as config, logged() as lines:
                try:
                    half = layer.join(config, norm, router, block.mlp.experts, made.model.norm)
                    half.prepare(marlin)
                    # another layer of this shape asks for the answer, not for a comparison
                    launches.names.clear()
                    half.prepare(marlin)
                    found["used"] = half._checked
                    found["compared again"] = bool(launches.names)
                except RuntimeError as error:
                    found["raised"] = str(error)
            router.weight.data /= 64 if name == "large logits" else 1
            result[f"{name}, {option}"] = found | {"said": lines}
    launches.spoil = launches.choose = right
    selfcheck._passed.clear()
    selfcheck._switched_off.clear()
    return result
