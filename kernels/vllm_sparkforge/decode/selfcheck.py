# SPDX-License-Identifier: Apache-2.0
"""Compare each decode kernel with the path that it replaces, while a model loads.

The first layer of each kind and shape is computed for a few numbers of random rows,
with its real weights, on the very device. A kernel that raises an error or differs by
more than ``TOLERANCE`` is not used, and neither are others of its kind from then on.
``vllm_sparkforge.trial`` compares the same way, before there is a model.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from vllm_sparkforge import options
from vllm_sparkforge.decode import dense, experts, verdicts
from vllm_sparkforge.mx.table import Format, rows

logger = init_logger(f"vllm.{__name__}")

TOLERANCE = 0.02
"""Largest difference: Frobenius norm of a tile, relative to the path that is replaced. Two
paths round to BF16 in different places, which gives some 0.003."""
TILE = 16
"""Columns of a result that are judged together, as many as a warp computes: a wrong tile
of a large layer is lost in the norm of all of it."""
ROWS = (1, 2, 4, 5, 8, 16)
"""Numbers of rows; each of the kernels' own limits is one of them."""

RUNS: list[Callable[[Callable[[], Any]], Any]] = [lambda compute: compute()]
"""Ways to have kernels compute: as they are called; a trial adds a CUDA graph."""

_passed: dict[tuple[str, tuple[int, ...]], bool] = {}
_switched_off: set[str] = set()


def passed(kind: str, shape: tuple[int, ...]) -> bool:
    """Whether the kernels of a kind were found right for a shape."""
    return _passed.get((kind, shape), False)


def in_use() -> dict[str, bool]:
    """Return for each kind that was compared whether it is used for all of its shapes."""
    found: dict[str, bool] = {}
    for (kind, _), right in _passed.items():
        found[kind] = found.get(kind, True) and right
    return found


def passes(kind: str, shape: tuple[int, ...], strict: bool, compare: Callable[[], float]) -> bool:
    """Whether kernels can be used, from a comparison for the first layer of its kind
    and shape.

    Args:
        kind: a format's label, BF16, MXFP4 experts, row-major MXFP4 experts, norms and
            routers, or rotary embedding and (FP8) KV cache.
        shape: of the layer's weights.
        strict: whether a failure is an error (``decode_kernels`` is on).
        compare: returns the largest relative difference.

    Raises:
        RuntimeError: ``strict``, and the kernels failed.

    """
    if (kind, shape) not in _passed:
        config = get_current_vllm_config_or_none()
        failed = kind in options.of(config).failed
        if failed:
            logger.info_once("Decode kernels are not used for %s: they failed their trial.", kind)
        off = failed or kind in _switched_off
        _passed[kind, shape] = not off and _compare(kind, shape, strict, compare)
        if config is not None:
            verdicts.write(config, in_use())
    return _passed[kind, shape]


def _compare(kind: str, shape: tuple[int, ...], strict: bool, compare: Callable[[], float]) -> bool:
    start = time.perf_counter()
    cause = None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        # the random numbers of a server are the same with the check and without
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            difference = compare()
        reason = f"they differ by {difference:.2g} from it, more than {TOLERANCE}"
        right = difference <= TOLERANCE  # not with NaN
    except Exception as e:
        right, cause, reason = False, e, f"{type(e).__name__}: {e}"
    name = f"{kind} {' x '.join(map(str, shape))}"
    if right:
        logger.info(
            "Decode kernels are used for %s: they differ by %.2g from the path for "
            "many rows (checked in %.1f s).",
            name,
            difference,
            time.perf_counter() - start,
        )
        return True
    if strict:
        raise RuntimeError(
            f"decode_kernels is on: those for {name} failed the comparison with the "
            f"path for many rows: {reason}."
        ) from cause
    _switched_off.add(kind)
    logger.warning(
        "Decode kernels for %s are switched off. They failed the comparison with the "
        "path for many rows at %s: %s.",
        kind,
        name,
        reason,
    )
    return False


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative difference of the worst tile, which is ``TILE`` columns of all
    rows; infinity where nothing can be compared.

    A tile counts as an eighth of the others' size at least: in a smaller one terms cancel,
    and only their rounding is left.
    """
    both = torch.stack([ours.float() - theirs.float(), theirs.float()])
    rows = both.view(2, -1, both.shape[-1])
    tiles = F.pad(rows, (0, -rows.shape[-1] % TILE)).unflatten(-1, (-1, TILE))
    difference, size = torch.linalg.vector_norm(tiles, dim=(1, 3))
    usual = size.square().mean().sqrt()
    if usual == 0:
        return math.inf
    return float((difference / size.clamp(min=usual / 8)).max())


def worst(differences: Iterable[float]) -> float:
    """Return the largest one, or NaN if one is."""
    found = list(differences)
    return math.nan if any(map(math.isnan, found)) else max(found)


def settle() -> None:
    """Wait for weights that were just made: a kernel may read its own before the one ahead
    has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_bytes(like: torch.Tensor, low: int, high: int) -> torch.Tensor:
    size = like.numel() * like.element_size()
    made_up = torch.empty(size, dtype=torch.uint8, device=like.device)
    return made_up.random_(low, high).view(like.dtype).view(like.shape)


# -- dense layers ----------------------------------------------------------------------


def compare_mx(
    form: Format,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    packed: Sequence[torch.Tensor],
    k: int,
) -> float:
    """Return the largest difference between a packed weight [N, K] and torch.

    Args:
        tensors: what ``form.quantise`` gave.
        bias: bfloat16 [N], or None.
        packed: what ``form.pack`` made of them.

    """
    n, device = tensors[0].shape[0], tensors[0].device
    if not tensors[0].view(torch.uint8).any():  # of a dummy checkpoint
        tensors = form.quantise(torch.randn(n, k, device=device, dtype=torch.bfloat16))
        packed = form.pack(*tensors)
    settle()
    counts = (*ROWS, dense.LAUNCH_ROWS + 1)
    many = dense.MX_ROWS + 1
    x = torch.randn(many, k, device=device, dtype=torch.bfloat16)
    theirs = x.new_empty(many, n)
    step = max(1, (16 << 20) // k)
    for first in range(0, n, step):
        some = slice(first, first + step)
        expanded = form.dequantise(*rows(tensors, some))
        theirs[:, some] = F.linear(x, expanded, None if bias is None else bias[some])

    def product(count: int) -> torch.Tensor:
        return dense.mx_linear(x[:count], form.name, packed, bias, n)

    return worst(
        distance(run(partial(product, m)), theirs[:m]) for run in RUNS for m in (*counts, many)
    )


def compare_bf16(weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Return the largest difference between our BF16 kernels and torch.

    Args:
        weight: bfloat16 [N, K].
        bias: bfloat16 [N], or None.

    """
    if not weight.any():
        weight = torch.randn_like(weight)
    settle()
    x = torch.randn(max(ROWS), weight.shape[1], device=weight.device, dtype=weight.dtype)
    theirs = F.linear(x, weight, bias)
    return worst(
        distance(run(partial(dense.bf16_linear, x[:m], weight, bias)), theirs[:m])
        for run in RUNS
        for m in ROWS
    )


# -- norms and routers -----------------------------------------------------------------


def compare_half(
    norm: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    weights: experts.Weights | None,
) -> float:
    """Return the largest difference between what lies between a layer's products and
    torch.

    Two experts of nearly equal logits may change places: what counts are the logits of
    the experts that were chosen, not the experts.

    Args:
        norm: bfloat16 [K], RMSNorm's weight.
        epsilon: of RMSNorm.
        weight: bfloat16 [E, K], the router's.
        bias: bfloat16 [E].
        weights: of the experts, whose kernels choose; None: others compute them.

    """
    from vllm_sparkforge.decode import layer

    k = weight.shape[1]
    norm, weight = (t if t.any() else torch.randn_like(t) for t in (norm, weight))
    settle()

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=norm.device, dtype=dtype)

    def norms(ours: tuple[torch.Tensor, ...], total: torch.Tensor) -> list[float]:
        factor = (total.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        theirs = (total * factor * norm.float(), total)
        return [distance(*pair) for pair in zip(ours, theirs, strict=True)]

    def chosen_experts(
        run: Callable[..., Any],
        x: torch.Tensor,
        residual: torch.Tensor,
        chosen_from: experts.Weights,
    ) -> Iterable[float]:
        rows, total = x.shape[0], x.float() + residual.float()
        real = rows - (rows == 5)  # of these, the last only pads
        padding = torch.arange(rows, device=norm.device) >= real
        given = (x, residual, norm, epsilon, weight, bias, padding, chosen_from)
        *sums, ids, shares, _ = run(partial(layer.routed_experts, *given))
        yield from norms(tuple(sums), total)
        if (ids[real:] != -1).any():
            raise ValueError("a row that pads has experts")
        ids, shares = ids[:real].long().sort(), shares[:real]
        ids, shares = ids.values, shares.gather(-1, ids.indices)
        if (ids[:, 1:] == ids[:, :-1]).any():
            raise ValueError("a row has an expert twice")
        logits = F.linear(sums[0][:real].float(), weight.float(), bias.float())
        chosen = logits.gather(-1, ids)
        best = logits.topk(experts.TOP_K).values
        yield distance(chosen.sort(-1, descending=True).values, best)
        # the kernel rounds each logit to BF16: large ones may shift by a lot
        rounding = chosen.abs().amax(-1, keepdim=True) * 2**-7
        ours, theirs = (logs.clamp(min=-20) for logs in (shares.log(), chosen.log_softmax(-1)))
        yield float(((ours - theirs).abs() - rounding).clamp(min=0).max())
        yield distance(shares.sum(-1), torch.ones_like(shares[:, 0]))

    def differences(run: Callable[..., Any], rows: int) -> Iterable[float]:
        x, residual = random(rows, k), random(rows, k)
        total = x.float() + residual.float()
        yield from norms(run(partial(layer.add_norm, x, residual, norm, epsilon)), total)
        if weights is not None:
            yield from chosen_experts(run, x, residual, weights)

        parts = random(rows * experts.TOP_K, k, dtype=torch.float32)
        ids = torch.zeros(rows, experts.TOP_K, dtype=torch.int32, device=norm.device)
        total = residual.float() + parts.view(rows, experts.TOP_K, k).sum(1)
        yield from norms(run(partial(layer.combine, parts, ids, residual, norm, epsilon)), total)

    return worst(
        difference for run in RUNS for rows in ROWS for difference in differences(run, rows)
    )


# -- rotary embedding and KV cache -----------------------------------------------------

_BLOCKS, _BLOCK_SIZE = 4, 16


def compare_rotary(
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    cos_sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    update: Callable[..., None],
    dtype: torch.dtype,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """Return the largest difference between our queries, keys and values and those of
    vLLM's embedding and of the attention backend's own cache update.

    Args:
        rotate: ``RotaryEmbedding.forward_static``.
        cos_sin: see ``rotary.rotate_and_cache``, also for the heads.
        heads: of the queries.
        kv_heads: of keys and values.
        update: takes keys, values, a cache and slots.
        dtype: of the cache.
        scales: see ``rotary.rotate_and_cache``.

    Raises:
        ValueError: the kernel wrote into a slot that is no row's.

    """
    from vllm_sparkforge.decode import rotary

    size, device = rotary.HEAD, cos_sin.device
    widths = [n * size for n in (heads, kv_heads, kv_heads)]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def read(places: torch.Tensor) -> torch.Tensor:
        return places.view(torch.float8_e4m3fn) if dtype == torch.uint8 else places

    def differences(run: Callable[..., Any], rows: int, cache: torch.Tensor) -> Iterable[float]:
        qkv = random(rows, sum(widths))
        positions = torch.randint(0, cos_sin.shape[0], (rows,), device=device)
        slots = torch.randperm(_BLOCKS * _BLOCK_SIZE, device=device)[:rows]
        if rows == 5:
            slots[-1] = -1  # this row only pads
        if rows == 8:
            slots = slots[:-1]  # so does this one
        ours, theirs = cache.clone(), cache.clone()
        given = (qkv, positions, cos_sin, heads, ours, slots, scales)
        queries = run(partial(rotary.rotate_and_cache, *given))
        q, k, v = qkv.split(widths, -1)
        q, k = rotate(positions, q.float(), k.float(), size, size, cos_sin, True)
        yield distance(queries.flatten(1), q)
        keys, values = k.to(qkv.dtype).view(-1, kv_heads, size), v.unflatten(-1, (-1, size))
        update(keys, values, theirs, slots)
        # slots in a row, whatever the cache's order is
        places = [each.transpose(1, 2).flatten(0, 1) for each in (ours, theirs, cache)]
        free = torch.ones(len(places[0]), dtype=torch.bool, device=device)
        free[slots[slots >= 0]] = False
        if not torch.equal(places[0][free], places[2][free]):
            raise ValueError("a slot that is no row's was written")
        yield distance(read(places[0][~free]), read(places[1][~free]))

    caches = (
        random(_BLOCKS, kv_heads, _BLOCK_SIZE, 2 * size).to(dtype),
        random(_BLOCKS, _BLOCK_SIZE, kv_heads, 2 * size).to(dtype).transpose(1, 2),
    )
    return worst(
        difference
        for run in RUNS
        for cache in caches
        for rows in ROWS
        for difference in differences(run, rows, cache)
    )
