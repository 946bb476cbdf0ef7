"""Which parts of the plugin are in use: with all, with one switched off, on a vLLM that differs."""

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.patches.probes import decode_cache, decode_half, decode_metrics, decode_rotary
from tests.patches.probes.decode_device import (
    configured,
    forget,
    linear_layer,
    load,
    logged,
    mx_layer,
)
from tests.patches.probes.decode_experts import experts_layer


def parts(_: Any) -> dict[str, Any]:
    """What is in use, and what is said of the rest."""
    from vllm_sparkforge import options

    made = decode_half.make("off").model.layers[0], decode_rotary._make("off")[0]
    result: dict[str, Any] = {"off": {}, "broken": {}, "differs": {}}
    result["all"] = _in_use(made)
    for part in options.PARTS:
        with mock.patch.dict(os.environ, {options.VARIABLE: json.dumps({"off": [part]})}):
            result["off"][part] = _in_use(made)
    with mock.patch.dict(os.environ, {options.VARIABLE: ""}):
        _differences(made, result)
    result["registered"] = _registered()
    return result


def _differences(made: tuple[Any, Any], result: dict[str, Any]) -> None:
    """Add what becomes of each part where vLLM differs in what it needs."""
    from vllm_sparkforge import contract

    for part, used in contract.USED.items():
        for name, parameters in used.items():
            with _other(name, gone=parameters is None) as said:
                found = contract.broken(part)
            result["differs"][name] = [said, found]
        # the answer for the last of these is kept
        result["broken"][part] = _in_use(made) | {"registered": _registered()}
        contract.broken.cache_clear()


def _in_use(made: tuple[Any, Any]) -> dict[str, Any]:
    """Return the parts that are in use, and what the log says of the kernels as a whole."""
    import torch
    from vllm_sparkforge import graph_memory
    from vllm_sparkforge.decode import layer, rotary, selfcheck

    block, attention = made
    used = {}
    forget()
    with configured("auto", mxfp4_layers="qkv") as config, logged() as lines:
        norms = block.post_attention_layernorm, block.mlp.router, block.mlp.experts
        used["norms"] = layer.join(config, *norms, block.input_layernorm) is not None
        used["rotary"] = rotary.join(config, attention.rotary_emb, attention.attn) is not None
        marlin, experts, _ = experts_layer(192, 128, 6)
        load(marlin, experts)
        used["experts"] = getattr(marlin, "uses_decode_kernels", False)
        with decode_cache.marlin():
            used["layers"] = mx_layer("mxfp4").weight.dtype == torch.int32
    with configured("auto") as config, logged() as more:
        dense = linear_layer(2048, 2112, torch.bfloat16)
        load(dense.quant_method, dense)
        used["bf16"] = getattr(dense, "uses_decode_kernels", False)
        selfcheck.passes("a kind", (1,), False, lambda: 0.0)
        used["metrics"] = bool(decode_metrics._text(config, [0]))
        with mock.patch.object(graph_memory, "_wrap"):
            used["memory"] = graph_memory.measure(config)
    used["amx"] = _asks_for_amx()
    off = [line for line in (*lines, *more) if "off: " in line]
    return {"used": sorted(part for part, there in used.items() if there), "said": off}


def _asks_for_amx() -> bool:
    import torch
    import vllm_sparkforge

    with (
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True),
        mock.patch.object(torch.cpu, "_init_amx", return_value=True) as asked,
    ):
        vllm_sparkforge.register()
    return asked.called


def _registered() -> list[Any]:
    """Return whether the plugin puts a model of its own into the registry, and what it says."""
    import vllm_sparkforge
    from vllm.model_executor.models import ModelRegistry

    with mock.patch.object(ModelRegistry, "register_model") as register, logged() as lines:
        vllm_sparkforge.register()
    return [register.called, [line for line in lines if "sparkforge" in line]]


@contextmanager
def _other(name: str, *, gone: bool) -> Iterator[str]:
    """Put a function of other parameters in the place of one of vLLM's, or nothing; yield words."""
    from vllm_sparkforge import contract

    words = name.split(".")
    size = len(words) - 1
    while True:
        try:
            owner: Any = importlib.import_module(".".join(words[:size]))
            break
        except ModuleNotFoundError:
            size -= 1
    for word in words[size:-1]:
        owner = getattr(owner, word)
    contract.broken.cache_clear()
    with mock.patch.object(owner, words[-1], new=lambda self, something: None):
        if gone:
            delattr(owner, words[-1])
            inherited = hasattr(owner, words[-1])
            assert not inherited, name
            yield f"this vLLM has no {name}"
            setattr(owner, words[-1], None)  # for the patch to take away
        else:
            yield f"{name} of this vLLM takes self, something, not "
