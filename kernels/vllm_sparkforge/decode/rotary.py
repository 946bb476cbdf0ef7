# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys, and keys and values put into the paged cache, as
one operator of gpt-oss's attention.

It is one launch for any number of rows. Whether the kernel computes is decided inside the
operator, as in ``layer``.
"""

from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
)
from vllm.v1.attention.backend import AttentionType

from vllm_sparkforge import ops
from vllm_sparkforge.decode import module, selfcheck
from vllm_sparkforge.decode.dense import rows_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

logger = init_logger(f"vllm.{__name__}")

KIND, FP8_KIND = "rotary embedding and KV cache", "rotary embedding and FP8 KV cache"
HEAD = 64
BACKENDS = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN")
"""Attention backends that have a key beside its value in the cache, and read keys and
values from there only."""
CACHES = ("auto", "bfloat16", "fp8", "fp8_e4m3")
"""Names of a KV cache in BF16 or E4M3; vLLM has E4M3 as uint8."""
_THREADS = 128
_THREADS_A_HEAD = 4


def rotate_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    heads: int,
    cache: torch.Tensor,
    slots: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Rotate queries and keys, and put keys and values into the cache.

    Args:
        qkv: bfloat16 [M, (heads + 2 * G) * HEAD], M at least 1: queries, keys, values.
        positions: int64 [M], not written by a kernel that may still run.
        cos_sin: float32 [P, HEAD], cosines and then sines of each position.
        heads: of the queries.
        cache: bfloat16, or uint8 for E4M3, [B, G, S, 2 * HEAD]: a key and its value in each
            slot of a block. Dimensions may lie in memory in any order, but for the last.
        slots: int64 [at most M], like ``positions``: block * S + slot for the first rows,
            negative where a row only pads. None: nothing goes into the cache.
        scales: float32, one number each: what keys and values are divided by in E4M3.

    Returns:
        The queries, rotated: bfloat16 [M, heads, HEAD].

    Raises:
        ValueError: the cache lies in memory in another way, or has a scale for each head.

    """
    qkv = rows_of(qkv)
    rows, columns = qkv.shape
    queries = qkv.new_empty(rows, heads, HEAD)
    block_stride = head_stride = slot_stride = written = 0
    name, k_scale, v_scale = "rotate_and_cache", None, None
    if slots is not None:
        *strides, last = cache.stride()
        alignment = 8 * cache.element_size()
        if last != 1 or any(stride % 8 for stride in strides) or cache.data_ptr() % alignment:
            raise ValueError(f"a KV cache with strides {cache.stride()}")
        block_stride, head_stride, slot_stride = strides
        written = min(rows, slots.shape[0])
        if cache.dtype == torch.uint8:
            name, (k_scale, v_scale) = "rotate_and_cache_fp8", scales
            if k_scale.numel() != 1 or v_scale.numel() != 1:
                raise ValueError(f"a KV cache with {k_scale.numel()} scales")
    operands = module.RotaryOperands(
        qkv=module.pointer(qkv),
        cos_sin=module.pointer(cos_sin),
        positions=module.pointer(positions),
        slots=module.pointer(slots),
        queries=module.pointer(queries),
        cache=module.pointer(cache) if written else None,
        k_scale=module.pointer(k_scale),
        v_scale=module.pointer(v_scale),
        block_stride=block_stride,
        head_stride=head_stride,
        slot_stride=slot_stride,
        heads=heads,
        kv_heads=(columns // HEAD - heads) // 2,
        block_size=cache.shape[2] if written else 1,
        written=written,
    )
    threads = columns // HEAD * _THREADS_A_HEAD
    grid = (rows, -(-threads // _THREADS))
    module.launch(name, grid, _THREADS, 0, operands, qkv.device)
    return queries


class RotaryAndCache:
    """What lies between a layer's qkv projection and its attention.

    Args:
        rotary: of the layer.
        attention: of the layer.
        strict: whether a failed self-check is an error.

    """

    def __init__(self, rotary: "RotaryEmbedding", attention: "Attention", strict: bool) -> None:
        self.rotary, self.attention, self.strict = rotary, attention, strict
        # In eager mode the embedding replaces its own by one in BF16. As a buffer of the
        # attention it comes back from sleep, as the scales beside it do.
        attention.register_buffer("decode_cos_sin", rotary.cos_sin_cache, persistent=False)
        self._checked = False

    @property
    def _scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attention._k_scale, self.attention._v_scale

    def prepare(self) -> None:
        """Compare the kernel with the usual path, once the attention is ready."""
        attention = self.attention
        self._checked = selfcheck.passes(
            KIND if attention.kv_cache_torch_dtype == torch.bfloat16 else FP8_KIND,
            (attention.num_heads, attention.num_kv_heads),
            self.strict,
            lambda: selfcheck.compare_rotary(
                self.rotary.forward_static,
                attention.decode_cos_sin,
                attention.num_heads,
                attention.num_kv_heads,
                self._usual_update,
                attention.kv_cache_torch_dtype,
                self._scales,
            ),
        )

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute a layer's attention.

        Args:
            qkv: bfloat16 [M, (heads + 2 * kv_heads) * HEAD].
            positions: int64 [M].

        Returns:
            bfloat16 [M, heads * HEAD].

        """
        attention = self.attention
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        # What the backends do not read, but take: not rotated.
        _, keys, values = qkv.split([n * HEAD for n in (heads, kv_heads, kv_heads)], -1)
        keys = keys.view(-1, kv_heads, HEAD)
        values = values.view(-1, kv_heads, HEAD)
        output = qkv.new_empty(qkv.shape[0], heads, HEAD)
        name = _encode_layer_name(attention.layer_name)
        # Nothing else between the two operators: the graph is split at both.
        queries = torch.ops.sparkforge.rotate_and_cache(qkv, positions, heads, name)
        if attention.query_quant is not None:  # as the attention would, before its operator
            queries, _ = attention.query_quant(queries.flatten(1), attention._q_scale)
            queries = queries.view(-1, heads, HEAD)
        torch.ops.vllm.unified_attention_with_output(queries, keys, values, output, name)
        return output.view(-1, heads * HEAD)

    def compute(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute what the operator returns: the queries, rotated."""
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        if qkv.shape[0] == 0:
            return qkv.new_empty(0, heads, HEAD)
        if self._checked:
            table = self.attention.decode_cos_sin
            return rotate_and_cache(qkv, positions, table, heads, cache, slots, self._scales)
        queries, keys, values = qkv.split([n * HEAD for n in (heads, kv_heads, kv_heads)], -1)
        queries, keys = self.rotary.forward_static(
            positions, queries, keys, HEAD, HEAD, self.attention.decode_cos_sin, True
        )
        if slots is not None:
            keys, values = (t.view(-1, kv_heads, HEAD) for t in (keys, values))
            self._usual_update(keys, values, cache, slots)
        return queries.view(-1, heads, HEAD)

    def _usual_update(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self.attention.impl.do_kv_cache_update(self.attention, keys, values, cache, slots)


def refused(config: VllmConfig, rotary: "RotaryEmbedding", attention: "Attention") -> str | None:
    """Return why a layer cannot be computed so, None if it can."""
    dtype = config.model_config.dtype
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not bfloat16"
    if attention.kv_cache_dtype not in CACHES:
        return f"the KV cache is {attention.kv_cache_dtype}, neither bfloat16 nor E4M3"
    backend = attention.attn_backend.get_name()
    if backend not in BACKENDS or attention.use_direct_call:
        return f"the attention backend {backend}"
    if (
        attention.attn_type != AttentionType.DECODER
        or attention.kv_sharing_target_layer_name is not None
    ):
        return "the attention has no cache of its own"
    if config.parallel_config.decode_context_parallel_size > 1:
        return "the cache is spread over devices"
    if {attention.head_size, attention.head_size_v, rotary.rotary_dim} != {HEAD}:
        return f"heads of {attention.head_size}, {rotary.rotary_dim} of them rotated"
    if not rotary.is_neox_style or rotary.cos_sin_cache.dtype != torch.float32:
        return "another kind of rotary embedding"
    return None


def join(
    config: VllmConfig, rotary: "RotaryEmbedding", attention: "Attention"
) -> RotaryAndCache | None:
    """Return rotary embedding, cache and attention as one, None if they stay apart.

    Args:
        config: of the model.
        rotary: see ``RotaryAndCache``, also for the next.
        attention: ...

    """
    if not module.enabled(config, "rotary"):
        return None
    reason = refused(config, rotary, attention)
    if reason is not None:
        logger.info_once("Decode kernels are not used for %s: %s.", KIND, reason)
        return None
    return RotaryAndCache(rotary, attention, module.is_required(config))


def _decode_rotate_and_cache(
    qkv: torch.Tensor, positions: torch.Tensor, heads: int, layer_name: LayerNameType
) -> torch.Tensor:
    from vllm.model_executor.layers.attention.attention import get_attention_context

    name = _resolve_layer_name(layer_name)
    _, attention, cache, slots = get_attention_context(name)
    return attention.decode_rotary.compute(qkv, positions, cache, slots)


def _decode_rotate_and_cache_fake(
    qkv: torch.Tensor, positions: torch.Tensor, heads: int, layer_name: LayerNameType
) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], heads, HEAD)


ops.register(
    "rotate_and_cache",
    _decode_rotate_and_cache,
    _decode_rotate_and_cache_fake,
    tags=(torch.Tag.needs_fixed_stride_order,),
)
