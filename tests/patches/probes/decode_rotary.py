"""gpt-oss's attention whose rotary embedding and cache update are one operator, on the CPU.

Real are the layer, its
embedding and the backends' cache updates; the kernel is the contract, and
so are the kernels that the backends write with. The attention itself returns its queries.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.patches.probes.decode_contract import stored
from tests.patches.probes.decode_device import (
    SPOILS,
    configured,
    error_of,
    forget,
    logged,
    right,
)

HIDDEN, HEADS, KV_HEADS, SIZE = 128, 4, 2, 64
BLOCKS, BLOCK = 6, 16
BACKENDS = {
    "triton_attn": "TritonAttentionImpl",
    "flashinfer": "FlashInferImpl",
    "flash_attn": "FlashAttentionImpl",
}


def _write(
    keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Any, dtype: str, *scales: Any
) -> None:
    """What the kernels that the backends call do: rows beyond the slots only pad."""
    import torch

    form = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = divmod(slot, key_cache.shape[1])
            for cache, given, scale in zip(
                (key_cache, value_cache), (keys, values), scales, strict=True
            ):
                cache.view(form)[at] = stored(given[row], form, scale)


@contextmanager
def _writers(write: Callable[..., None] = _write) -> Iterator[None]:
    """Put a function in place of the kernels that the backends write with."""
    import torch
    from vllm.v1.attention.backends import flash_attn, flashinfer, triton_attn

    assert flashinfer
    with ExitStack() as stack:
        for module, name in (
            (triton_attn, "triton_reshape_and_cache_flash"),
            (flash_attn, "reshape_and_cache_flash"),
            (torch.ops._C_cache_ops, "reshape_and_cache_flash"),
        ):
            stack.enter_context(mock.patch.object(module, name, new=write, create=True))
        yield


def _cache(order: str, dtype: str = "auto") -> Any:
    import torch

    if order == "heads first":
        cache = torch.randn(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
    else:
        cache = torch.randn(BLOCKS, BLOCK, KV_HEADS, 2 * SIZE).transpose(1, 2)
    cache = cache.to(torch.bfloat16)
    return cache.to(torch.float8_e4m3fn).view(torch.uint8) if dtype == "fp8" else cache


def places(asked: Any) -> dict[str, bool]:
    """Whether each backend writes keys and values where the CUDA sources say, by order."""
    import torch

    result = {}
    seen: list[Any] = []
    keys = torch.zeros(1, KV_HEADS, SIZE, dtype=torch.bfloat16)
    with _writers(lambda *given: seen.append(given[2:4])):
        for name, kind in BACKENDS.items():
            impl_class = getattr(sys.modules[f"vllm.v1.attention.backends.{name}"], kind)
            impl = types.SimpleNamespace(
                _set_kv_ptr_range=False,
                nvfp4_fa2=False,
                attn_type="decoder",
                head_size=SIZE,
                kv_cache_dtype="auto",
                cache_dtype="auto",
                kv_sharing_target_layer_name=None,
                is_kvcache_nvfp4=False,
                _is_per_token_head_quant=False,
            )
            layer = types.SimpleNamespace(_k_scale=None, _v_scale=None)
            for order, wanted in asked.items():
                cache = _cache(order)
                assert list(cache.stride()[:3]) == wanted["strides"]
                impl_class.do_kv_cache_update(impl, layer, keys, keys, cache, torch.tensor([0]))
                found = [
                    [
                        (view[divmod(slot, BLOCK)][head].data_ptr() - cache.data_ptr()) // 2
                        for slot in range(BLOCKS * BLOCK)
                        for head in range(KV_HEADS)
                    ]
                    for view in seen.pop()
                ]
                values = [at + SIZE for at in wanted["places"]]
                result[f"{name}, {order}"] = found == [wanted["places"], values]
    return result


def _model(*layers: Any) -> Any:
    """Return what stands for a model that has these layers' attentions."""
    import torch
    from vllm.model_executor.models.gpt_oss import TransformerBlock

    blocks = []
    for layer in layers:
        block = TransformerBlock.__new__(TransformerBlock)
        torch.nn.Module.__init__(block)
        block.attn = layer
        blocks.append(block)
    return types.SimpleNamespace(layers=blocks, start_layer=0, end_layer=len(blocks))


def _make(option: str, dtype: str = "auto") -> tuple[Any, Any, list[str]]:
    """Return gpt-oss's attention layer as a loader makes it, its configuration, and the log.

    ``dtype`` is the cache's; in FP8 its scales are not one, as calibration may leave them.
    """
    import torch
    from vllm.config import CompilationMode
    from vllm.model_executor.models.gpt_oss import OAIAttention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm_sparkforge.model import _join_rotary

    parameters = {
        "rope_theta": 150000,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    shape = types.SimpleNamespace(
        head_dim=SIZE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        hidden_size=HIDDEN,
        max_position_embeddings=131072,
        rope_parameters=parameters,
        sliding_window=128,
    )
    with configured(option) as config, logged() as lines:
        config.model_config.dtype = torch.bfloat16
        config.model_config.is_mm_prefix_lm = False
        config.model_config.rswa_window = None
        config.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
        config.cache_config.cache_dtype = dtype
        # as it is by default; nothing is compiled
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        config.compilation_config.splitting_ops = None
        config.compilation_config.set_splitting_ops_for_v1("")
        config.compilation_config.mode = CompilationMode.NONE
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer = OAIAttention(shape, None, config.cache_config, prefix="model.layers.1.attn")
            _join_rotary(config, _model(layer))
            for parameter in layer.parameters():
                parameter.requires_grad_(requires_grad=False).copy_(torch.randn(parameter.shape))
            layer.attn.process_weights_after_loading(torch.bfloat16)
            if dtype == "fp8":
                layer.attn._q_scale.fill_(0.03)
                layer.attn._k_scale.fill_(0.02)
                layer.attn._v_scale.fill_(0.05)
                quant = layer.attn.query_quant
                quant._forward_method = quant.forward_native  # vLLM's operator is not here
        finally:
            torch.set_default_dtype(torch.float32)
    return layer, config, [line for line in lines if "Decode kernels" in line]


def _attend(*given: Any, output: Any, **_: Any) -> None:
    output.copy_(given[1].to(output.dtype))


def _run(layer: Any, config: Any, x: Any, positions: Any, cache: Any, slots: Any) -> Any:
    from vllm.forward_context import set_forward_context

    layer.attn.kv_cache = cache
    names = {} if slots is None else {layer.attn.layer_name: slots}
    layer.attn.impl.forward = _attend
    with set_forward_context(None, config, slot_mapping=names):
        return layer(x, positions)


def compute(launches: Any) -> dict[str, Any]:
    """Results and launches of a layer by number of rows, against the layer without the operator."""
    import torch
    from vllm_sparkforge.decode import rotary as ours

    def pair(dtype: str) -> tuple[Any, Any, Any, Any, list[list[str]]]:
        layer, config, said = _make("auto", dtype)
        usual, off, nothing = _make("off", dtype)
        usual.load_state_dict(layer.state_dict())
        # what torch.compile traces; vLLM's CUDA operator is not here
        embedding = usual.rotary_emb
        embedding._forward_method = lambda positions, queries, keys: embedding.forward_static(
            positions, queries, keys, SIZE, SIZE, embedding.cos_sin_cache, True
        )
        return layer, config, usual, off, [said, nothing]

    pairs = {dtype: pair(dtype) for dtype in ("auto", "fp8")}
    result: dict[str, Any] = {"said": {dtype: made[-1] for dtype, made in pairs.items()}}
    layer = pairs["auto"][0]

    def call(rows: int, order: str, given: str = "all", dtype: str = "auto") -> dict[str, Any]:
        layer, config, usual, off, _ = pairs[dtype]
        x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
        positions = torch.randint(0, 131072, (rows,))
        slots = torch.randperm(BLOCKS * BLOCK)[:rows]
        slots[1:2] = -1
        slots = {"all": slots, "fewer": slots[: rows - 1], "none": None}[given]
        before = _cache(order, dtype)
        caches = before.clone(), before.clone()
        launches.names.clear()
        found = _run(layer, config, x, positions, caches[0], slots)
        names = list(launches.names)
        wanted = _run(usual, off, x, positions, caches[1], slots) if rows else found
        assert launches.names == names  # the usual layer has no such launch
        written = (caches[1] != before).any(-1)
        values = [each[..., SIZE:] for each in caches]
        form = torch.bfloat16 if dtype == "auto" else torch.float8_e4m3fn
        read = [each.view(form).to(torch.float64) for each in caches]
        return {
            "launches": names,
            "errors": [error_of(*pair) for pair in ((found, wanted), read)] if rows else [],
            "values": bool(torch.equal(*values)),
            "others": bool(torch.equal(caches[0][~written], before[~written])),
            "written": int(written.sum()),
        }

    counts = (0, 1, 2, 5, 8, 9, 40)
    for order in ("heads first", "slots first"):
        result[order] = {rows: call(rows, order) for rows in counts}
    result["fp8"] = {
        f"{rows}, {order}": call(rows, order, dtype="fp8")
        for rows in (1, 5, 9)
        for order in ("heads first", "slots first")
    }
    result["rows without slots"] = {rows: call(rows, "heads first", "fewer") for rows in (1, 3, 9)}
    result["no cache yet"] = call(3, "heads first", "none")

    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * SIZE).to(torch.bfloat16)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ours._decode_rotate_and_cache_fake(mode.from_tensor(qkv), None, HEADS, "")
    result["fake"] = [list(fake.shape), str(fake.dtype), fake.stride()]
    slots, table, scales = torch.arange(5), layer.rotary_emb.cos_sin_cache, (torch.ones(2),) * 2
    for name, wrong in {
        "the last dimension": _cache("heads first").transpose(2, 3),
        "an odd stride": torch.zeros(2, 2, 16, 132, dtype=torch.bfloat16)[..., :128],
        "an odd address": torch.zeros(2, 2, 16, 136, dtype=torch.bfloat16)[..., 1:129],
        "a scale a head": _cache("heads first", "fp8"),
    }.items():
        try:
            ours.rotate_and_cache(qkv, slots, table, HEADS, wrong, slots, scales)
        except ValueError as error:
            result[name] = str(error)

    # In eager mode the embedding's table is replaced. Sleep (level 2) keeps no memory but what
    # named buffers have.
    layer.rotary_emb.cos_sin_cache = table.bfloat16()
    saved = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    table.zero_()
    for name, buffer in layer.named_buffers():
        buffer.data.copy_(saved[name])
    result["after sleep"] = call(5, "heads first")
    layer.rotary_emb.cos_sin_cache = table

    forget()
    launches.spoil = SPOILS["3 % too large"]
    layer.attn.decode_rotary.prepare()
    launches.spoil = right
    forget()
    result["failed self-check"] = {rows: call(rows, "slots first") for rows in (0, 1, 5, 9)}
    result["failed self-check, no cache yet"] = call(3, "heads first", "none")
    return result


def refused() -> dict[str, Any]:
    """Which layers are joined."""
    import torch
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.gpt_oss import OAIAttention
    from vllm_sparkforge.model import CheckedAttention, JoinedAttention, _join_rotary

    (other, _, _), (layer, _, _) = _make("off"), _make("off")
    model = _model(other, layer)
    attention, embedding = layer.attn, layer.rotary_emb
    backend = types.SimpleNamespace(get_name=lambda: "FLEX_ATTENTION")
    # an attribute that is set to a value, in the second of two layers
    changed: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
        "fits": lambda _: (attention, "num_heads", 8),
        "float16": lambda c: (c.model_config, "dtype", torch.float16),
        "a cache in E5M2": lambda _: (attention, "kv_cache_dtype", "fp8_e5m2"),
        "another backend": lambda _: (attention, "attn_backend", backend),
        "an encoder": lambda _: (attention, "attn_type", "encoder_only"),
        "another layer's cache": lambda _: (attention, "kv_sharing_target_layer_name", "x"),
        "heads of 128": lambda _: (attention, "head_size", 128),
        "half rotated": lambda _: (embedding, "rotary_dim", 32),
        "BF16 cosines": lambda _: (embedding, "cos_sin_cache", torch.zeros(1, 64).bfloat16()),
    }
    result: dict[str, Any] = {}
    for option in ("auto", "off"):
        for name, change in changed.items():
            with configured(option) as config, logged() as lines:
                config.model_config.dtype = torch.bfloat16
                target, attribute, value = change(config)
                with mock.patch.object(target, attribute, new=value):
                    _join_rotary(config, model)
            classes = [(type(each), type(each.attn)) for each in (other, layer)]
            joined = classes == [(JoinedAttention, CheckedAttention)] * 2
            assert joined or classes == [(OAIAttention, Attention)] * 2
            for each in (other, layer):
                both = [each.__dict__.pop("joined", None)]
                both.append(each.attn.__dict__.pop("decode_rotary", None))
                assert both[0] is both[1]
                assert (both[0] is not None) == joined
                assert not joined or both[0].attention is each.attn
                each.__class__, each.attn.__class__ = OAIAttention, Attention
            result[f"{name}, {option}"] = {"joined": joined, "said": list(lines)}
    return result


def self_check(launches: Any) -> dict[str, Any]:
    """What becomes of wrong kernels."""
    import torch

    size = BLOCK * 4  # slots of the cache that the check makes
    cases: dict[str, tuple[Any, Any]] = {
        **{name: (spoil, right) for name, spoil in SPOILS.items() if name != "1 % too large"},
        "rotated the other way": (lambda x: x.flip(-1), right),
        "another slot": (right, lambda slots: torch.where(slots < 0, slots, (slots + 1) % size)),
        "padding that is written": (right, lambda slots: slots.where(slots >= 0, slots.max() ^ 1)),
        "nothing written": (right, lambda slots: torch.full_like(slots, -1)),
    }
    result: dict[str, Any] = {}
    for name, (launches.spoil, launches.move) in cases.items():
        for option in ("auto", "on"):
            forget()
            try:
                layer, _, said = _make(option)
                launches.names.clear()
                layer.attn.decode_rotary.prepare()
                result[f"{name}, {option}"] = {
                    "used": layer.attn.decode_rotary._checked,
                    "compared again": bool(launches.names),
                    "said": said,
                }
            except RuntimeError as error:
                result[f"{name}, {option}"] = {"raised": str(error)}
    launches.spoil = launches.move = right
    forget()
    return result


def rotary(launches: Any, asked: Any) -> dict[str, Any]:
    """Everything about the operator; ``asked`` is what the CUDA sources say of places, or None."""
    with _writers():
        return {
            "places": None if asked is None else places(asked),
            "compute": compute(launches),
            "refused": refused(),
            "self_check": self_check(launches),
        }
