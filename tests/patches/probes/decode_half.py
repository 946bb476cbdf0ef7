"""A gpt-oss model whose halves of layers are one operator, with the contract as its kernels.

Real are the model, its
blocks, norms, routers, runners, experts and their loading; the attention, Marlin's CUDA operators,
the choice of experts and the kernels are not.
"""

import hashlib
import types
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

from tests.patches.probes.decode_device import (
    SPOILS,
    configured,
    error_of,
    forget,
    load,
    logged,
    right,
)

HIDDEN, INNER, EXPERTS, LAYERS, WORDS = 192, 64, 32, 3, 64
CLEAR = 0.1
"""Least distance of the fourth largest logit from the fifth, in rows that are compared: rounding
to BF16 in another place must not change which experts a row has."""


class Made(NamedTuple):
    """A model and what it was made with."""

    whole: Any
    model: Any
    """The layers, without the head."""
    config: Any
    weights: dict[str, Any]
    """The checkpoint, in its own layout."""
    said: list[str]


def prepare() -> None:
    """Give vLLM what a worker gives it before a model is made.

    Marlin's operators stay what ``decode_experts.experts`` put in their place.
    """
    import torch
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.v1.worker import workspace

    from tests.patches.probes.probe_marlin_padding import _swiglu

    def topk_softmax(
        shares: Any, ids: Any, _: Any, logits: Any, renormalize: bool, *, is_padding: Any
    ) -> None:
        assert renormalize
        largest, chosen = logits.float().topk(4)
        shares.copy_(largest.softmax(-1))
        ids.copy_(chosen)
        if is_padding is not None:
            ids[is_padding] = -1

    def embedding(words: Any, weight: Any, first: int, end: int, *_: int) -> Any:
        here = (words >= first) & (words < end)
        return weight[torch.where(here, words - first, 0)] * here[:, None]

    ops.topk_softmax, ops.vocab_parallel_embedding = topk_softmax, embedding
    marlin_moe.MarlinExperts.activation = lambda self, _, out, both, **__: out.copy_(_swiglu(both))
    torch.accelerator.empty_cache = lambda: None
    workspace.init_workspace_manager(torch.device("cpu"))


def make(option: str, weights: dict[str, Any] | None = None) -> Made:
    """Return a model as a loader makes it.

    Args:
        option: ``decode_kernels``.
        weights: the checkpoint; None: a random one.
    """
    import torch
    from vllm.config import CompilationMode
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models import ModelRegistry, gpt_oss

    class Attention(torch.nn.Module):  # type: ignore[misc]
        """Computes each row alone, so that rows can be left out."""

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()
            self.o_proj = RowParallelLinear(HIDDEN, HIDDEN, bias=False, input_is_parallel=False)

        def forward(self, x: Any, positions: Any) -> Any:
            return self.o_proj(x)[0] + positions[:, None].to(x.dtype) / 16

    with (
        configured(option) as config,
        logged() as lines,
        mock.patch.object(gpt_oss.TransformerBlock, "attention_cls", new=Attention),
    ):
        config.model_config.hf_config = types.SimpleNamespace(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_local_experts=EXPERTS,
            num_experts_per_tok=4,
            vocab_size=WORDS,
            num_hidden_layers=LAYERS,
            quantization_config={"quant_method": "mxfp4"},
        )
        parallel, ranks = config.parallel_config, get_tensor_model_parallel_world_size()
        parallel.tensor_parallel_size = parallel.world_size = ranks
        config.model_config.dtype = config.model_config.head_dtype = torch.bfloat16
        config.kernel_config.moe_backend = "marlin"
        config.compilation_config.mode = CompilationMode.NONE
        config.quant_config = get_quantization_config("gpt_oss_mxfp4")()
        kind = ModelRegistry.models["GptOssForCausalLM"].load_model_cls()
        torch.set_default_dtype(torch.bfloat16)
        try:
            whole = kind(vllm_config=config)
        finally:
            torch.set_default_dtype(torch.float32)
        model = whole.model
        if weights is None:
            weights = {
                name: _random(name, _whole(name, p.shape), p.dtype)
                for name, p in model.named_parameters()
            }
        # the loader may change what it is given
        model.load_weights((name, weight.clone()) for name, weight in weights.items())
        for block in model.layers:
            for layer in (block.mlp.router, block.mlp.experts.routed_experts):
                load(layer.quant_method, layer)
    said = [line for line in lines if "Decode kernels" in line]
    return Made(whole, model, config, weights, said)


def _whole(name: str, shape: Any) -> tuple[int, ...]:
    """Return the shape that a checkpoint's tensor has: not padded, and that of all ranks."""
    known = {
        "w13_weight": (EXPERTS, 2 * INNER, HIDDEN // 2),
        "w13_weight_scale": (EXPERTS, 2 * INNER, HIDDEN // 32),
        "w13_bias": (EXPERTS, 2 * INNER),
        "w2_weight": (EXPERTS, HIDDEN, INNER // 2),
        "w2_weight_scale": (EXPERTS, HIDDEN, INNER // 32),
        "w2_bias": (EXPERTS, HIDDEN),
        "o_proj.weight": (HIDDEN, HIDDEN),
        "embedding.weight": (WORDS, HIDDEN),
    }
    return next((known[end] for end in known if name.endswith(end)), tuple(shape))


def _random(name: str, shape: Any, dtype: Any) -> Any:
    import torch

    if dtype == torch.uint8:
        low, high = (115, 121) if name.endswith("_scale") else (0, 256)
        return torch.randint(low, high, shape, dtype=dtype)
    values = torch.randn(shape)
    if "norm" in name:
        values = 1 + 0.3 * values
    elif name.endswith(("o_proj.weight", "router.weight")):
        values *= 3 / shape[-1] ** 0.5
    return values.to(dtype)


def _norm(rows: Any, weight: Any) -> Any:
    return rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def _chosen(made: Made, layer: int, x: Any, residual: Any) -> tuple[Any, Any, Any]:
    """What a layer's router gets and chooses, in float64: the sum, normalized, the five best."""
    own = f"layers.{layer}."
    total = x.double() + residual.double()
    normed = _norm(total, made.weights[f"{own}post_attention_layernorm.weight"])
    weight, bias = (made.weights[f"{own}mlp.router.{name}"] for name in ("weight", "bias"))
    return total, normed, (normed @ weight.double().T + bias.double()).topk(5)


def _wanted(made: Made, layer: int, x: Any, residual: Any, real: Any) -> tuple[Any, Any]:
    """What half a layer has to give, in float64: normed and sum."""
    from tests.patches.probes.probe_marlin_padding import _reference

    names = [f"layers.{layer + 1}.input_layernorm.weight", "norm.weight"]
    following = next(made.weights[name] for name in names if name in made.weights)
    total, normed, best = _chosen(made, layer, x, residual)
    experts = f"layers.{layer}.mlp.experts.routed_experts."
    data = {name.removeprefix(experts): value for name, value in made.weights.items()}
    data |= {"x": normed, "topk_ids": best.indices[:, :4]}
    data["topk_weights"] = best.values[:, :4].softmax(-1) * real[:, None]
    total = total + _reference(data)
    return _norm(total, following), total


def _clear_rows(made: Made, count: int) -> tuple[Any, Any]:
    """Return rows of which each layer's router chooses clearly."""
    import torch

    shape = 12 * count, HIDDEN
    x, residual = (torch.randn(shape).to(torch.bfloat16) for _ in range(2))
    clear = torch.ones(shape[0], dtype=torch.bool)
    for layer in range(LAYERS):
        best = _chosen(made, layer, x, residual)[2].values
        clear &= best[:, 3] - best[:, 4] > CLEAR
    x, residual = x[clear][:count].clone(), residual[clear][:count].clone()
    assert x.shape[0] == count
    return x, residual


def compute(launches: Any, made: Made) -> dict[str, Any]:
    """The operator's results and launches by number of rows, and where it must not be used."""
    import torch

    half = made.model.layers[0].moe_half
    x, residual = _clear_rows(made, 18)
    result: dict[str, Any] = {}

    def call(rows: int, padding: Any = None, layer: int = 0) -> dict[str, Any]:
        return _call(launches, made, (x[:rows], residual[:rows]), padding, layer)

    result["rows"] = {rows: call(rows) for rows in (0, 1, 2, 3, 5, 8, 9, 16, 17, 18)}
    result["the last layer"] = call(3, layer=LAYERS - 1)
    # the mask has a place for each row that a CUDA graph may have
    padding = torch.tensor([False, True, False, True, True, False, True, True])
    result["padding"] = {rows: call(rows, padding) for rows in (1, 5, 8)}
    given = x[:5].clone(), residual[:5].clone()
    with torch._subclasses.FakeTensorMode() as mode:
        found = half(*map(mode.from_tensor, given))
    result["fake"] = [[list(out.shape), str(out.dtype), out.stride()] for out in found]

    marlin = half.runner.routed_experts.quant_method.moe_kernel.fused_experts
    with mock.patch.object(marlin, "uses_decode_kernels", new=False):
        half.prepare(marlin)
        result["Marlin's experts"] = {rows: call(rows) for rows in (3, 17)}
    half.prepare(marlin)
    with mock.patch.object(marlin, "hooked", return_value=True):
        result["a hook"] = {rows: call(rows) for rows in (3, 17)}
    forget()
    launches.spoil = SPOILS["3 % too large"]
    half.prepare(marlin)
    launches.spoil = right
    result["failed self-check"] = {rows: call(rows) for rows in (0, 3, 17)}
    forget()
    half.prepare(marlin)
    result["prepared again"] = call(3)
    return result


def _call(
    launches: Any, made: Made, rows: tuple[Any, Any], padding: Any = None, layer: int = 0
) -> dict[str, Any]:
    """What half a layer gives for some rows, and the error against float64."""
    import torch
    from vllm.forward_context import set_forward_context

    launches.names.clear()
    given = rows[0].clone(), rows[1].clone()
    with set_forward_context(None, made.config, is_padding=padding):
        found = made.model.layers[layer].moe_half(*given)
    count = len(given[0])
    real = torch.ones(count) if padding is None else (~padding[:count]).float()
    wanted = _wanted(made, layer, *given, real)
    return {
        "launches": list(launches.names),
        "errors": [error_of(*pair) for pair in zip(found, wanted, strict=True) if count],
        "shapes": [list(out.shape) for out in found],
        "kept": all(torch.equal(*pair) for pair in zip(given, rows, strict=True)),
        "bytes": [hashlib.sha256(out.view(torch.uint8).numpy()).hexdigest() for out in found],
    }


def whole(launches: Any, made: Made) -> dict[str, Any]:
    """Hidden states of the model, against one with the same weights and without the operator."""
    import torch
    from vllm.forward_context import set_forward_context

    off = make("off", made.weights)
    words = torch.randint(0, WORDS, (90,))
    clear = torch.ones(90, dtype=torch.bool)

    def note(_: Any, __: Any, logits: Any) -> None:
        best = logits.float().topk(5).values
        clear.logical_and_(best[:, 3] - best[:, 4] > CLEAR)

    def run(one: Made, words: Any, aux: tuple[int, ...]) -> list[Any]:
        one.model._set_aux_hidden_state_layers(aux)
        launches.names.clear()
        with set_forward_context(None, one.config):
            found = one.model(words, words)
        return [found[0], *found[1]] if aux else [found]

    with ExitStack() as stack:
        for block in off.model.layers:
            stack.callback(block.mlp.router.register_forward_hook(note).remove)
        run(off, words, ())
    words = words[clear]
    assert words.numel() > 17, words.numel()
    blocks = made.model.layers
    norms = [*(block.input_layernorm for block in blocks), made.model.norm]
    joined: dict[str, Any] = {
        "said": made.said,
        "classes": [type(block).__name__ for block in blocks],
        "norms": [type(norm).__name__ for norm in norms],
        "halves": [_known(block) for block in blocks],
        "head": type(made.whole.lm_head.quant_method).__name__,
        "key": made.config.compute_hash(),
    }
    for rows in (4, 17):
        for aux in ((), (0, 1, 2, 3)):
            wanted = run(off, words[:rows], aux)
            assert not any(n.startswith(("route", "add_norm")) for n in launches.names)
            found = run(made, words[:rows], aux)
            errors = [error_of(*p) for p in zip(found, wanted, strict=True)]
            joined[f"{rows} rows, {len(aux)} more"] = errors
        joined[f"launches with {rows} rows"] = list(launches.names)
    return {"off": {"said": off.said, "key": off.config.compute_hash()}, "joined": joined}


def _known(block: Any) -> bool:
    """Whether a layer has a half of its own, which its experts and its operator find."""
    half = getattr(block, "moe_half", None)
    runner = block.mlp.experts
    others = {id(getattr(each, "decode_half", None)) for each in (runner, runner.routed_experts)}
    assert others == {id(half)}
    return half is not None and half.runner is runner


def half(launches: Any) -> dict[str, Any]:
    """Everything about the operator."""
    from tests.patches.probes import decode_half_choice

    prepare()
    made = make("auto")
    return {
        "model": whole(launches, made),
        "compute": compute(launches, made),
        "choice": decode_half_choice.choice(launches, made),
    }


def rank(launches: Any) -> dict[str, Any]:
    """The same on one of two ranks; all-reduces stand among the launches."""
    from vllm.distributed import get_tp_group
    from vllm_sparkforge.model import _join_halves

    from tests.patches.probes.decode_half_choice import _separate

    second, communicator = get_tp_group().rank_in_group == 1, get_tp_group().device_communicator
    usual = communicator.all_reduce

    def all_reduce(x: Any) -> Any:
        launches.names.append("all_reduce")
        return usual(x)

    communicator.all_reduce = all_reduce
    prepare()
    made = make("auto")
    result = {"model": whole(launches, made), "compute": compute(launches, made)}
    half, rows = made.model.layers[0].moe_half, _clear_rows(made, 3)
    forget()
    launches.spoil = SPOILS["3 % too large"] if second else right
    with logged() as lines:
        half.prepare(half.runner.routed_experts.quant_method.moe_kernel.fused_experts)
    launches.spoil = right
    result["wrong on the second"] = {"said": lines, **_call(launches, made, rows)}
    _separate(made.model)
    with configured("off" if second else "auto") as config, logged() as lines:
        _join_halves(config, made.model)
    result["off on the second"] = {"said": lines, "joined": len(_separate(made.model))}
    return result
