"""Which halves of layers are one operator, and what becomes of it where its kernels are wrong."""

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import SPOILS, configured, forget, logged, right


def choice(launches: Any, made: Any) -> dict[str, Any]:
    """Which layers are joined, and the self-check of kernels."""
    return {"refused": _refused(made), "self_check": _self_check(launches, made)}


def _refused(made: Any) -> dict[str, Any]:
    import torch
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.models.gpt_oss import TransformerBlock
    from vllm_sparkforge.model import JoinedBlock, _join_halves

    from tests.patches.probes.decode_half import HIDDEN

    blocks = made.model.layers
    block = blocks[0]
    router, norm = block.mlp.router, block.post_attention_layernorm
    runner = block.mlp.experts
    method, moe = runner.routed_experts.quant_method, runner.moe_config

    class OtherRouter:
        pass

    def weight(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.nn.Parameter(torch.empty(*shape, dtype=dtype))

    # an attribute that is set to a value, in the first of three layers
    changed: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
        "padded": lambda _: (moe, "in_dtype", torch.bfloat16),
        "another backend": lambda _: (method, "mxfp4_backend", Mxfp4MoeBackend.TRITON),
        "LoRA": lambda _: (moe, "is_lora_enabled", True),
        "another router": lambda _: (runner, "router", OtherRouter()),
        "float16": lambda _: (moe, "in_dtype", torch.float16),
        "two devices": lambda c: (c.parallel_config, "data_parallel_size", 2),
        "spread rows": lambda c: (
            c.compilation_config,
            "pass_config",
            types.SimpleNamespace(enable_sp=True),
        ),
        "offloaded": lambda c: (c.offload_config.uva, "cpu_offload_gb", 1.0),
        "k = 96": lambda _: (router, "weight", weight(32, 96)),
        "the largest": lambda _: (router, "weight", weight(128, 3072)),
        "20 experts": lambda _: (router, "weight", weight(20, HIDDEN)),
        "float16 norm": lambda _: (norm, "weight", weight(HIDDEN, dtype=torch.float16)),
        "a pipeline": lambda _: (parallel_state.get_pp_group(), "world_size", 2),
    }
    _separate(made.model)
    result: dict[str, Any] = {}
    for option in ("auto", "off"):
        for name, change in changed.items():
            with configured(option) as config, logged() as lines:
                target, attribute, value = change(config)
                with mock.patch.object(target, attribute, new=value):
                    _join_halves(config, made.model)
                    kinds = {type(each) for each in blocks}
            joined = _separate(made.model)
            assert kinds == ({JoinedBlock} if joined else {TransformerBlock})
            result[f"{name}, {option}"] = {"joined": len(joined), "said": list(lines)}
    return result


def _separate(model: Any) -> list[Any]:
    """Make layers what they were before they were joined; return the halves."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.gpt_oss import TransformerBlock

    halves = []
    for block in model.layers:
        runner = block.mlp.experts
        owners = (block, runner, runner.routed_experts)
        names = ("moe_half", "decode_half", "decode_half")
        found = [each.__dict__.pop(name, None) for each, name in zip(owners, names, strict=True)]
        assert found == found[:1] * 3
        halves += [half for half in found[:1] if half is not None]
        block.__class__ = TransformerBlock
        block.input_layernorm.__class__ = RMSNorm
    model.norm.__class__ = RMSNorm
    wrapped = model.__dict__.pop("_maybe_add_hidden_state", None)
    assert (wrapped is not None) == bool(halves)
    return halves


def _self_check(launches: Any, made: Any) -> dict[str, Any]:
    import torch
    from vllm_sparkforge.decode import layer

    block = made.model.layers[0]
    marlin = block.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts

    def only(kernel: str) -> Callable[[Any], Any]:
        return lambda x: x * (1.03 if launches.names[-1].startswith(kernel) else 1)

    spoils: dict[str, Callable[[Any], Any]] = {
        **SPOILS,
        "large logits": right,  # of which BF16 keeps little
        "add_norm 3 % too large": only("add_norm"),
        "experts_combine 3 % too large": only("experts_combine"),
        "route NaN": lambda x: x * torch.nan if launches.names[-1] == "route" else x,
    }
    choices: dict[str, Callable[[Any], Any]] = {
        "an expert twice": lambda ids: torch.where(ids < 0, ids, ids[:, :1]),
        "experts beside those chosen": lambda ids: torch.where(ids < 0, ids, (ids + 1) % 32),
        "padding that has experts": lambda ids: torch.where(ids < 0, torch.arange(4), ids),
    }
    cases: dict[str, tuple[Any, Any]] = {n: (spoil, right) for n, spoil in spoils.items()}
    cases |= {name: (right, choose) for name, choose in choices.items()}
    result: dict[str, Any] = {}
    for name, (launches.spoil, launches.choose) in cases.items():
        for option in ("auto", "on"):
            forget()
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
    forget()
    return result
