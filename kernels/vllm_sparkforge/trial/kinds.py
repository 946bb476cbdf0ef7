# SPDX-License-Identifier: Apache-2.0
"""What a trial runs: made-up layers in the real sizes, each against torch.

Every kernel is called, and then replayed from a CUDA graph; what follows the attention is also
replayed as one graph, with the product that comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from vllm.platforms import current_platform

from vllm_sparkforge import contract, options
from vllm_sparkforge.decode import dense, expertcheck, experts, layer, module, rotary, selfcheck
from vllm_sparkforge.mx.table import EVERY
from vllm_sparkforge.trial import prompts

_ORDERS = {
    "auto": experts.KIND,
    "marlin": experts.KIND,
    "flashinfer_cutlass": experts.ROW_MAJOR_KIND,
}
_EPSILON = 1e-5
_POSITIONS = 131072


@dataclass(frozen=True)
class Sizes:
    """Of the layers: gpt-oss-120b's, on one device."""

    hidden: int = 2880
    inner: int = 2880
    experts: int = 128
    heads: int = 64
    kv_heads: int = 8
    vocabulary: int = 201088

    @classmethod
    def on(cls, ranks: int) -> Sizes:
        """Return those of one of the ranks of tensor parallelism."""
        heads, kv_heads, inner, vocabulary = (
            -(-whole // ranks) for whole in (cls.heads, cls.kv_heads, cls.inner, cls.vocabulary)
        )
        return cls(inner=inner, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary)

    @property
    def dense(self) -> dict[str, tuple[int, int]]:
        """N and K by kind of layer."""
        columns = self.heads * rotary.HEAD
        qkv = columns + 2 * self.kv_heads * rotary.HEAD
        return {
            "qkv": (qkv, self.hidden),
            "o": (self.hidden, columns),
            "lm_head": (self.vocabulary, self.hidden),
        }


class Kind(NamedTuple):
    """What is tried at once.

    Attributes:
        name: as the self-check has it.
        part: of ``options.PARTS``, or ``prompts``.
        run: returns ``difference``, ``text`` and what else is to be told.
    """

    name: str
    part: str
    run: Callable[[], dict[str, Any]]


def replayed(compute: Callable[[], Any]) -> Any:
    """Return what a CUDA graph of some kernels gives when it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = compute()
    for one in (results,) if isinstance(results, torch.Tensor) else results or ():
        one.fill_(-1)  # what no replay has written
    for _ in range(2):
        graph.replay()
    return results


class Trial:
    """The kinds of a plan.

    Args:
        plan: see ``__main__``, and ``found``: what is known of kinds.
    """

    def __init__(self, plan: dict[str, Any], sizes: Sizes | None = None) -> None:
        self.sizes, self.found = sizes or Sizes.on(plan["ranks"]), plan["found"]
        self.device = torch.device(current_platform.device_type)
        self._config: Any = SimpleNamespace(additional_config={options.KEY: plan["options"]})
        self._options = options.of(self._config)
        self._backend, self._choose = plan["moe_backend"], plan["choose"]
        self._cache = plan["kv_cache_dtype"]
        self._experts: dict[str, tuple[expertcheck.Checkpoint, experts.Weights]] = {}
        if replayed not in selfcheck.RUNS:
            selfcheck.RUNS.append(replayed)

    def right(self, kind: str) -> bool:
        """Whether a kind was tried, and is right."""
        return kind in self.found and not self.found[kind]["problem"]

    def kinds(self) -> Iterator[Kind]:
        """Yield one after the other; what is yielded depends on what was found of those before."""
        if module.unavailable() or contract.broken(""):
            return
        every = list(self._kinds())
        for name, part, compare in every:
            if module.enabled(self._config, part):
                yield Kind(name, part, partial(_judged, compare))
        off = self._options.off
        if self._choose and "experts" not in off and _ORDERS.get(self._backend) == experts.KIND:
            try:
                yield from prompts.Prompts(self).kinds(self.found)
            except Exception as error:  # another FlashInfer: prompts keep Marlin, ours stay right
                yield Kind(prompts.PART, prompts.PART, partial(_fail, error))

    def _kinds(self) -> Iterator[tuple[str, str, Callable[[], float]]]:
        if self._cache in rotary.CACHES:
            fp8 = self._cache.startswith("fp8")
            kind = rotary.FP8_KIND if fp8 else rotary.KIND
            yield kind, "rotary", partial(self._rotary, torch.uint8 if fp8 else torch.bfloat16)
        given = self._options.mxfp4_layers
        by_format: dict[str | None, list[str]] = {}
        for name in options.LAYERS:
            by_format.setdefault(given.get(name), []).append(name)
        for form, names in by_format.items():
            kind, part = (EVERY[form].label, "layers") if form else ("BF16", "bf16")
            yield kind, part, partial(self._dense, form, names)
        if (order := _ORDERS.get(self._backend)) is not None:
            yield order, "experts", partial(self.compare_experts, order)
            yield layer.KIND, "norms", partial(self._half, order)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return normal numbers."""
        return torch.randn(*shape, device=self.device, dtype=dtype)

    # -- dense layers ----------------------------------------------------------------------

    def _dense(self, form: str | None, names: Iterable[str]) -> float:
        found = []
        for name in names:
            n, k = self.sizes.dense[name]
            weight = self.random(n, k)
            bias = None if name == "lm_head" else self.random(n)
            if form is None:
                found.append(selfcheck.compare_bf16(weight, bias))
                continue
            tensors = EVERY[form].quantise(weight)
            packed = EVERY[form].pack(*tensors)
            found.append(selfcheck.compare_mx(EVERY[form], tensors, bias, packed, k))
        return selfcheck.worst(found)

    # -- experts ---------------------------------------------------------------------------

    def checkpoint(self, order: str) -> expertcheck.Checkpoint:
        """Return random experts as a checkpoint has them, with zeros as padding."""
        count, hidden, inner = self.sizes.experts, self.sizes.hidden, self.sizes.inner
        multiple, of_inner = experts.PADDED[order]
        k, i = -(-hidden // multiple) * multiple, -(-inner // of_inner) * of_inner

        def made(rows: int, columns: int, n: int, size: int, low: int, high: int) -> torch.Tensor:
            one = torch.zeros(count, rows, columns, dtype=torch.uint8, device=self.device)
            one[:, :n, :size].random_(low, high)
            return one

        biases = [
            F.pad(self.random(count, n), (0, pad))
            for n, pad in (
                (2 * inner, 2 * (i - inner)),
                (hidden, k - hidden),
            )
        ]
        return expertcheck.Checkpoint(
            made(2 * i, k // 2, 2 * inner, hidden // 2, 0, 256),
            made(k, i // 2, hidden, inner // 2, 0, 256),
            made(2 * i, k // 32, 2 * inner, hidden // 32, 117, 123),
            made(k, i // 32, hidden, inner // 32, 117, 123),
            *biases,
        )

    def weights(self, order: str, made: expertcheck.Checkpoint) -> experts.Weights:
        """Return experts as vLLM puts them into a backend's order."""
        from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

        row_major = order == experts.ROW_MAJOR_KIND
        backends = oracle.Mxfp4MoeBackend
        owner = torch.nn.Module()
        owner.params_dtype = torch.bfloat16
        w13, w2, w13_scale, w2_scale, w13_bias, w2_bias = (
            oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
                backends.FLASHINFER_CUTLASS_MXFP4_MXFP8 if row_major else backends.MARLIN,
                owner,
                *made,
                _cache_permute_indices={},
            )
        )
        inner = self.sizes.inner if row_major else None
        return experts.Weights(w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, inner)

    def experts_of(self, order: str) -> tuple[expertcheck.Checkpoint, experts.Weights]:
        """Return random experts, both as a checkpoint and as a backend has them."""
        if order not in self._experts:
            made = self.checkpoint(order)
            self._experts[order] = made, self.weights(order, made)
        return self._experts[order]

    def compare_experts(self, order: str) -> float:
        """Compare the kernels with torch on the checkpoint's bytes: wrong orders differ, too."""
        made, weights = self.experts_of(order)
        return expertcheck.compare_experts(
            weights, lambda x, _, ids, shares: expertcheck.checkpoint_experts(x, made, ids, shares)
        )

    # -- what follows the attention ----------------------------------------------------------

    def _half(self, order: str) -> float:
        sizes = self.sizes
        norm = self.random(sizes.hidden)
        router = self.random(sizes.experts, sizes.hidden) / sizes.hidden**0.5
        bias = self.random(sizes.experts)
        weights = self.experts_of(order)[1] if self.right(order) else None
        found = [selfcheck.compare_half(norm, _EPSILON, router, bias, weights)]
        form = self._options.mxfp4_layers.get("qkv")
        product = EVERY[form].label if form else "BF16"
        if self.right(order) and self.right(product):
            found += self._chain(order, form, norm, router, bias)
        return selfcheck.worst(found)

    def _chain(
        self,
        order: str,
        form: str | None,
        norm: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor,
    ) -> Iterator[float]:
        """Yield the differences of a layer's second half with the next one's qkv, in a row."""
        made, weights = self.experts_of(order)
        n, k = self.sizes.dense["qkv"]
        matrix, offset = self.random(n, k), self.random(n)
        packed: Any = ()
        if form is not None:
            tensors = EVERY[form].quantise(matrix)
            packed, matrix = EVERY[form].pack(*tensors), EVERY[form].dequantise(*tensors)
        how = (norm, _EPSILON, router, bias, None, weights)
        selfcheck.settle()

        def chain(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
            _, total, ids, _, sums = layer.routed_experts(x, residual, *how)
            second, total = layer.combine(sums, ids, total, norm, _EPSILON)
            if form is None:
                return second, total, dense.bf16_linear(second, matrix, offset)
            return second, total, dense.mx_linear(second, form, packed, offset, n)

        for rows in (1, experts.MAX_ROWS):
            x, residual = self.random(rows, k), self.random(rows, k)
            first, total, ids, shares, _ = layer.routed_experts(x, residual, *how)
            total = total.float() + expertcheck.checkpoint_experts(first, made, ids, shares)
            factor = (total.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()
            second = total * factor * norm.float()
            product = F.linear(second.to(matrix.dtype), matrix, offset)
            for run in selfcheck.RUNS:
                ours = run(partial(chain, x, residual))
                for one, other in zip(ours, (second, total, product), strict=True):
                    yield selfcheck.distance(one, other)

    # -- rotary embedding and KV cache -------------------------------------------------------

    def _rotary(self, dtype: torch.dtype) -> float:
        half = rotary.HEAD // 2
        rates = 150000.0 ** -(torch.arange(half, device=self.device, dtype=torch.float32) / half)
        angles = torch.arange(_POSITIONS, device=self.device).unsqueeze(-1) * rates
        cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        heads, kv_heads = self.sizes.heads, self.sizes.kv_heads
        one = torch.ones((), device=self.device, dtype=torch.float32)
        return selfcheck.compare_rotary(
            _rotate, cos_sin, heads, kv_heads, _update, dtype, (one, one)
        )


def _fail(error: Exception) -> dict[str, Any]:
    raise error


def _judged(compare: Callable[[], float]) -> dict[str, Any]:
    return {"difference": compare()}


def _rotate(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, head: int, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Rotate queries and keys [M, heads * head], as vLLM's ``forward_static`` does."""
    cos, sin = rest[1][positions].unsqueeze(1).chunk(2, -1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.unflatten(-1, (-1, head)).chunk(2, -1)
        both = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(both, -1).flatten(1)

    return rotated(q), rotated(k)


def _update(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put keys and values [M, G, head] into a cache, as the attention backends do."""
    cache = cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = cache[slot // cache.shape[2], :, slot % cache.shape[2]]
            place.copy_(torch.cat([keys[row], values[row]], -1))
