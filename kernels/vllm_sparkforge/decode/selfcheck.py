# SPDX-License-Identifier: Apache-2.0
"""Compare each decode kernel with the path that it replaces, while a model loads.

The first layer of each kind and shape is computed for a few numbers of random rows,
with its real weights, on the very device. A kernel that raises an error or differs by
more than ``TOLERANCE`` is not used, and neither are others of its kind from then on.
"""

import math
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from vllm_sparkforge.decode import dense, experts, verdicts

logger = init_logger(f"vllm.{__name__}")

TOLERANCE = 0.02
"""Largest difference: Frobenius norm, relative to the path that is replaced. Two paths
round to BF16 in different places, which gives some 0.003."""
ROWS = (1, 2, 4, 5, 8, 16)
"""Numbers of rows; each of the kernels' own limits is one of them."""

MXFP8_TOLERANCE = 0.15
"""Largest difference from experts that round their activations to MXFP8, twice."""

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
        kind: MXFP4, MXFP8, INT8, BF16, MXFP4 experts, row-major MXFP4 experts, norms and
            routers, or rotary embedding and KV cache.
        shape: of the layer's weights.
        strict: whether a failure is an error (``decode_kernels`` is on).
        compare: returns the largest relative difference.

    Raises:
        RuntimeError: ``strict``, and the kernels failed.

    """
    if (kind, shape) not in _passed:
        _passed[kind, shape] = kind not in _switched_off and _compare(kind, shape, strict, compare)
        if (config := get_current_vllm_config_or_none()) is not None:
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
    """Return the relative difference; infinity where nothing can be compared."""
    norm = float(theirs.float().norm())
    if norm == 0:
        return math.inf
    return float((ours.float() - theirs.float()).norm()) / norm


def _worst(differences: Iterable[float]) -> float:
    """Return the largest one, or NaN if one is."""
    found = list(differences)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _random_bytes(like: torch.Tensor, low: int, high: int) -> torch.Tensor:
    size = like.numel() * like.element_size()
    made_up = torch.empty(size, dtype=torch.uint8, device=like.device)
    return made_up.random_(low, high).view(like.dtype).view(like.shape)


# -- dense layers ----------------------------------------------------------------------


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Expand MXFP4 (uint8 [N, K // 2]) or MXFP8 (float8_e4m3fn [N, K]) to bfloat16,
    with E8M0 scales (uint8 [N, K // 32]), or INT8 (int8 [N, K]), with scales in bfloat16
    ([N, K // 64])."""
    if weight.dtype == torch.uint8:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
        table = torch.cat([table, -table])
        values = table[torch.stack([weight & 15, weight >> 4], -1).flatten(-2).int()]
    else:
        values = weight.float()
    int8 = weight.dtype == torch.int8
    factors = scale.float() if int8 else torch.exp2(scale.view(torch.uint8).float() - 127)
    values = values.unflatten(-1, (scale.shape[-1], -1)) * factors.unsqueeze(-1)
    return values.flatten(-2).to(torch.bfloat16)


def compare_mx(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    packed: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """Return the largest difference between a packed weight and torch.

    Args:
        weight: see ``dense.pack``.
        scale: see ``dense.pack``.
        bias: bfloat16 [N], or None.
        packed: what ``dense.pack`` made of both.

    """
    if not weight.view(torch.uint8).any():  # of a dummy checkpoint
        weight = _random_bytes(weight, 0, 127)  # no NaN of E4M3, in both formats
        int8 = weight.dtype == torch.int8
        scale = torch.rand_like(scale) if int8 else _random_bytes(scale, 117, 123)
        packed = dense.pack(weight, scale)
    n, k = weight.shape[0], dense.columns(weight)
    counts = (*ROWS, dense.LAUNCH_ROWS + 1)
    many = dense.MX_ROWS + 1
    x = torch.randn(many, k, device=weight.device, dtype=torch.bfloat16)
    theirs = x.new_empty(many, n)
    step = max(1, (16 << 20) // k)
    for first in range(0, n, step):
        rows = slice(first, first + step)
        theirs[:, rows] = F.linear(
            x,
            dequantize(weight[rows], scale[rows]),
            None if bias is None else bias[rows],
        )

    def product(count: int) -> torch.Tensor:
        return dense.mx_linear(x[:count], *packed, bias, n)

    return _worst(distance(product(m), theirs[:m]) for m in (*counts, many))


def compare_bf16(weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Return the largest difference between our BF16 kernels and torch.

    Args:
        weight: bfloat16 [N, K].
        bias: bfloat16 [N], or None.

    """
    if not weight.any():
        weight = torch.randn_like(weight)
    x = torch.randn(max(ROWS), weight.shape[1], device=weight.device, dtype=weight.dtype)
    theirs = F.linear(x, weight, bias)
    return _worst(distance(dense.bf16_linear(x[:m], weight, bias), theirs[:m]) for m in ROWS)


# -- experts ---------------------------------------------------------------------------

_MADE_UP_EXPERTS = 8


def _made_up(weights: experts.Weights) -> experts.Weights:
    """Return random weights of a few experts."""
    few = [tensor[:_MADE_UP_EXPERTS] for tensor in weights[:6]]
    return experts.Weights(
        _random_bytes(few[0], 0, 256),
        _random_bytes(few[1], 117, 123),
        torch.randn_like(few[2]),
        _random_bytes(few[3], 0, 256),
        _random_bytes(few[4], 117, 123),
        torch.randn_like(few[5]),
        weights.inner,
    )


def compare_experts(weights: experts.Weights, reference: Callable[..., torch.Tensor]) -> float:
    """Return the largest difference between our experts and another computation.

    Args:
        weights: of the layer.
        reference: computes the same from x, weights, ids and shares.

    """
    if not (weights.w13.any() and weights.w2.any()):  # of a dummy checkpoint
        weights = _made_up(weights)
    device, k = weights.w13.device, weights.hidden
    num_experts = weights.w13.shape[0]

    def difference(rows: int) -> float:
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        # the default type is BF16 while a model loads
        scores = torch.rand(rows, num_experts, device=device, dtype=torch.float32)
        # rows that share experts, as close ones do
        scores[1::2, : experts.TOP_K] += 1
        shares, ids = scores.topk(experts.TOP_K)
        ids, shares = ids.to(torch.int32), shares.softmax(-1)
        theirs = reference(x, weights, ids, shares)
        pads = rows == 5  # one more that only pads
        padded = F.pad(x, (0, 0, 0, pads), value=1.0)
        ids = F.pad(ids, (0, 0, 0, pads), value=-1)
        ours = torch.full_like(padded, math.nan)
        experts.experts(ours, padded, weights, ids, F.pad(shares, (0, 0, 0, pads), value=1.0))
        if ours[rows:].any():
            raise ValueError("a row that pads is not zero")
        return distance(ours[:rows], theirs)

    return _worst(difference(rows) for rows in ROWS)


def _row_major_matrix(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Expand one expert's matrix, whose scales lie in tiles of 128 x 4."""
    n, groups = scale.shape
    tiles = scale.view(torch.uint8).view(n // 128, groups // 4, 32, 4, 4)
    return dequantize(weight, tiles.permute(0, 3, 2, 1, 4).reshape(n, groups))


def row_major_experts(
    x: torch.Tensor, weights: experts.Weights, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Compute experts in row-major order in float32, from expanded weights."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        w13 = _row_major_matrix(weights.w13[expert], weights.w13_scale[expert])
        both = x[row].float() @ w13.float().T + weights.w13_bias[expert].float()
        up, gate = both.chunk(2, -1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        hidden[:, weights.inner :] = 0
        w2 = _row_major_matrix(weights.w2[expert], weights.w2_scale[expert])
        part = hidden @ w2.float().T + weights.w2_bias[expert].float()
        out.index_add_(0, row, part * shares[row, slot].unsqueeze(-1))
    return out


def compare_row_major(weights: experts.Weights, cutlass: Callable[..., torch.Tensor]) -> float:
    """Return the largest difference between our experts in row-major order and torch.

    Args:
        weights: of the layer.
        cutlass: computes the same from x, weights, ids and shares, with activations
            in MXFP8; only of these weights.

    Raises:
        ValueError: CUTLASS, which gets rows beyond ``MAX_ROWS``, reads other weights.

    """

    def reference(
        x: torch.Tensor,
        used: experts.Weights,
        ids: torch.Tensor,
        shares: torch.Tensor,
    ) -> torch.Tensor:
        wanted = row_major_experts(x, used, ids, shares)
        if used is weights:  # they are no made-up ones
            difference = distance(cutlass(x, used, ids, shares), wanted)
            if not difference <= MXFP8_TOLERANCE:
                raise ValueError(
                    f"FlashInfer's CUTLASS MoE differs by {difference:.2g} from torch, "
                    f"more than {MXFP8_TOLERANCE}"
                )
        return wanted

    return compare_experts(weights, reference)


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

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=norm.device, dtype=dtype)

    def norms(ours: tuple[torch.Tensor, ...], total: torch.Tensor) -> list[float]:
        factor = (total.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        theirs = (total * factor * norm.float(), total)
        return [distance(*pair) for pair in zip(ours, theirs, strict=True)]

    def chosen_experts(
        x: torch.Tensor, residual: torch.Tensor, chosen_from: experts.Weights
    ) -> Iterable[float]:
        rows, total = x.shape[0], x.float() + residual.float()
        real = rows - (rows == 5)  # of these, the last only pads
        padding = torch.arange(rows, device=norm.device) >= real
        *sums, ids, shares, _ = layer.routed_experts(
            x, residual, norm, epsilon, weight, bias, padding, chosen_from
        )
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

    def differences(rows: int) -> Iterable[float]:
        x, residual = random(rows, k), random(rows, k)
        total = x.float() + residual.float()
        yield from norms(layer.add_norm(x, residual, norm, epsilon), total)
        if weights is not None:
            yield from chosen_experts(x, residual, weights)

        parts = random(rows * experts.TOP_K, k, dtype=torch.float32)
        ids = torch.zeros(rows, experts.TOP_K, dtype=torch.int32, device=norm.device)
        total = residual.float() + parts.view(rows, experts.TOP_K, k).sum(1)
        yield from norms(layer.combine(parts, ids, residual, norm, epsilon), total)

    return _worst(difference for rows in ROWS for difference in differences(rows))


# -- rotary embedding and KV cache -----------------------------------------------------

_BLOCKS, _BLOCK_SIZE = 4, 16


def compare_rotary(
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    cos_sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    update: Callable[..., None],
) -> float:
    """Return the largest difference between our queries, keys and values and those of
    vLLM's embedding and of the attention backend's own cache update.

    Args:
        rotate: ``RotaryEmbedding.forward_static``.
        cos_sin: see ``rotary.rotate_and_cache``, also for the heads.
        heads: of the queries.
        kv_heads: of keys and values.
        update: takes keys, values, a cache and slots.

    Raises:
        ValueError: the kernel wrote into a slot that is no row's.

    """
    from vllm_sparkforge.decode import rotary

    size, device = rotary.HEAD, cos_sin.device
    widths = [n * size for n in (heads, kv_heads, kv_heads)]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def differences(rows: int, cache: torch.Tensor) -> Iterable[float]:
        qkv = random(rows, sum(widths))
        positions = torch.randint(0, cos_sin.shape[0], (rows,), device=device)
        slots = torch.randperm(_BLOCKS * _BLOCK_SIZE, device=device)[:rows]
        if rows == 5:
            slots[-1] = -1  # this row only pads
        if rows == 8:
            slots = slots[:-1]  # so does this one
        ours, theirs = cache.clone(), cache.clone()
        queries = rotary.rotate_and_cache(qkv, positions, cos_sin, heads, ours, slots)
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
        yield distance(places[0][~free], places[1][~free])

    caches = (
        random(_BLOCKS, kv_heads, _BLOCK_SIZE, 2 * size),
        random(_BLOCKS, _BLOCK_SIZE, kv_heads, 2 * size).transpose(1, 2),
    )
    return _worst(
        difference for cache in caches for rows in ROWS for difference in differences(rows, cache)
    )
