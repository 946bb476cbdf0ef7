# SPDX-License-Identifier: Apache-2.0
"""What follows the attention of a gpt-oss layer, as one operator.

With few rows it is four launches: residual, norm and router; gate and up of the experts
with each row's four largest logits; down; the experts' sum with the residual and the norm
that the next layer begins with. With more rows the experts take their usual path, and each
norm with its residual is one launch. Which one computes is decided inside the operator:
torch.compile traces one graph for all numbers of rows.

With tensor parallelism a rank has a part of each expert. The sums of a row's experts are
added up over the ranks, rounded to BF16 as vLLM does it, before the residual and the norm.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.utils.torch_utils import LayerNameType

from vllm_sparkforge import contract, ops
from vllm_sparkforge.decode import experts, module, selfcheck
from vllm_sparkforge.decode.dense import rows_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import GateLinear
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import (
        FlashInferExperts,
    )
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    Experts = MarlinExperts | FlashInferExperts

logger = init_logger(f"vllm.{__name__}")

KIND = "norms and routers"
MAX_HIDDEN = 3072
MAX_EXPERTS = 128
_THREADS = 512
_EXPERTS_A_BLOCK, _ROWS_A_BLOCK = 8, 4


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalize.

    Args:
        x: bfloat16 [M, K], M at least 1.
        residual: bfloat16 [M, K].
        weight: bfloat16 [K].
        epsilon: of RMSNorm.

    Returns:
        The sum, normalized, and the sum, both bfloat16 [M, K].

    """
    x, residual = rows_of(x), rows_of(residual)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    operands = module.NormOperands(
        x=module.pointer(x),
        residual=module.pointer(residual),
        norm=module.pointer(weight),
        sum=module.pointer(total),
        normed=module.pointer(normed),
        k=x.shape[1],
        epsilon=epsilon,
    )
    module.launch("add_norm", (x.shape[0], 1), _THREADS, 0, operands, x.device)
    return normed, total


def routed_experts(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    weights: experts.Weights,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add, normalize, choose four experts for each row, and compute them.

    Args:
        x: bfloat16 [M, K], M from 1 to ``experts.MAX_ROWS``.
        residual: bfloat16 [M, K].
        norm: bfloat16 [K], RMSNorm's weight.
        epsilon: of RMSNorm.
        weight: bfloat16 [E, K], the router's.
        bias: bfloat16 [E].
        padding: bool [M], whether a row only pads, or None.
        weights: of the experts.

    Returns:
        The sum, normalized, and the sum, both bfloat16 [M, K]; the experts with the
        largest logits, int32 [M, 4], -1 in rows that pad; the softmax of these
        logits, float32 [M, 4]; and what ``experts.products`` returns.

    """
    x, residual = rows_of(x), rows_of(residual)
    (rows, k), n = x.shape, weight.shape[0]
    total, normed = torch.empty_like(x), torch.empty_like(x)
    logits = x.new_empty(rows, n)
    ids = x.new_empty(rows, experts.TOP_K, dtype=torch.int32)
    shares = x.new_empty(rows, experts.TOP_K, dtype=torch.float32)
    operands = module.RouteOperands(
        x=module.pointer(x),
        residual=module.pointer(residual),
        norm=module.pointer(norm),
        weights=module.pointer(weight),
        bias=module.pointer(bias),
        sum=module.pointer(total),
        normed=module.pointer(normed),
        logits=module.pointer(logits),
        ids=module.pointer(ids),
        k=k,
        n=n,
        rows=rows,
        epsilon=epsilon,
    )
    grid = (n // _EXPERTS_A_BLOCK, -(-rows // _ROWS_A_BLOCK))
    shared = _ROWS_A_BLOCK * (k + 32) * 2
    module.launch("route", grid, _THREADS, shared, operands, x.device)
    by = experts.Logits(logits, padding)
    return normed, total, ids, shares, experts.products(normed, weights, ids, shares, by)


def combine(
    sums: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum up the experts of each row, add the residual and normalize.

    Args:
        sums: float32 [M * 4, K], what ``experts.products`` returns.
        ids: int32 [M, 4]; -1 where a row of ``sums`` does not count.
        residual: bfloat16 [M, K].
        norm: bfloat16 [K], RMSNorm's weight.
        epsilon: of RMSNorm.

    Returns:
        The sum, normalized, and the sum, both bfloat16 [M, K].

    """
    rows, k = residual.shape
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    operands = module.CombineOperands(
        experts=module.pointer(sums),
        ids=module.pointer(ids),
        residual=module.pointer(residual),
        norm=module.pointer(norm),
        sum=module.pointer(total),
        normed=module.pointer(normed),
        k=k,
        epsilon=epsilon,
    )
    module.launch("experts_combine", (rows, 1), _THREADS, 0, operands, sums.device)
    return normed, total


class MoEHalf:
    """Norm, router and experts of a layer, and the norm that follows.

    Args:
        norm: between attention and experts.
        router: of this layer.
        runner: the experts.
        following: the next layer's first norm, or the model's last.
        strict: whether a failed self-check is an error.

    """

    def __init__(
        self,
        norm: "RMSNorm",
        router: "GateLinear",
        runner: "MoERunner",
        following: "RMSNorm",
        strict: bool,
    ) -> None:
        self.norm, self.router, self.runner = norm, router, runner
        self.following, self.strict = following, strict
        self._experts: Experts | None = None  # if few rows take the kernels
        self._checked = False

    def prepare(self, prepared: "Experts") -> None:
        """Compare the kernels with the usual path, once all weights are loaded.

        Args:
            prepared: the experts.

        """
        weight = self.router.weight.data
        few = prepared if prepared.uses_decode_kernels else None
        passed = selfcheck.passes(
            KIND,
            tuple(weight.shape),
            self.strict,
            lambda: selfcheck.compare_half(
                self.norm.weight.data,
                self.norm.variance_epsilon,
                weight,
                self.router.bias.data,
                None if few is None else self._weights(few),
            ),
        )
        self._checked = on_all_ranks(passed)
        self._experts = few if on_all_ranks(self._checked and few is not None) else None

    def _weights(self, few: "Experts") -> experts.Weights:
        layer = self.runner.routed_experts
        return few.decode_weights(layer.w13_weight, layer.w2_weight)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator.

        Args:
            x: bfloat16 [M, K], what the attention gives.
            residual: bfloat16 [M, K].

        Returns:
            The layer's result, normalized by ``following``, and the new residual.

        """
        name = self.runner._encode_layer_name()
        return torch.ops.sparkforge.moe_half(x, residual, name)

    def compute(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what the operator returns; see ``__call__``."""
        few = self._experts
        rows = x.shape[0]
        if few is not None and 0 < rows <= experts.MAX_ROWS and not few.hooked(rows):
            return self._few_rows(few, x, residual)
        normed, residual = self._add_norm(self.norm, x, residual)
        logits, k = self.router(normed), normed.shape[1]
        if (padding := self.runner.moe_config.hidden_dim - k) > 0:
            normed = F.pad(normed, (0, padding))
        out = self.runner._forward_impl(normed, logits, None)
        assert isinstance(out, torch.Tensor)
        return self._add_norm(self.following, self._reduce(out[:, :k]), residual)

    def _few_rows(
        self, few: "Experts", x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
            _get_padding_mask,
        )

        _, residual, ids, _, sums = routed_experts(
            x,
            residual,
            self.norm.weight,
            self.norm.variance_epsilon,
            self.router.weight,
            self.router.bias,
            _get_padding_mask(x.shape[0]),
            self._weights(few),
        )
        following = self.following
        if self.runner.moe_config.tp_size == 1:
            return combine(sums, ids, residual, following.weight, following.variance_epsilon)
        total = torch.empty_like(residual)
        experts.sum_up(total, sums, ids)
        return self._add_norm(following, self._reduce(total), residual)

    def _reduce(self, out: torch.Tensor) -> torch.Tensor:
        """Add up the experts' sums over ranks of tensor parallelism."""
        return self.runner._maybe_reduce_final_output(out.contiguous(), None)

    def _add_norm(
        self, norm: "RMSNorm", x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._checked and x.shape[0] > 0:
            return add_norm(x, residual, norm.weight, norm.variance_epsilon)
        # not its own forward, which passes on what this operator has normalized
        return RMSNorm.forward(norm, x, residual)


def on_all_ranks(usable: bool) -> bool:
    """Whether the kernels can be used on all ranks of tensor parallelism; each has to ask.

    Every rank computes all norms and routers. Ranks that rounded them differently would
    choose different experts for a row, and add up parts of these.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return usable
    found = torch.tensor([usable], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group.cpu_group)
    if usable and not found.item():
        logger.warning_once("Decode kernels are not used for %s: not all ranks can.", KIND)
    return bool(found.item())


def refused(
    config: VllmConfig, norm: "RMSNorm", router: "GateLinear", runner: "MoERunner"
) -> str | None:
    """Return why a layer cannot be computed so, None if it can.

    Known before weights are loaded, since what torch.compile traces depends on it.
    """
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    method, moe = runner.routed_experts.quant_method, runner.moe_config
    backend = getattr(method, "mxfp4_backend", None)
    row_major = Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8
    if backend not in (row_major, Mxfp4MoeBackend.MARLIN):
        return "the experts are not MXFP4 with Marlin or CUTLASS as MoE backend"
    reason = experts.refused(moe, None)
    if reason is not None:
        return reason
    # others choose by more than the largest logits, or at random
    if type(runner.router) is not FusedTopKRouter:
        return f"experts are chosen by {type(runner.router).__name__}"
    parallel = config.parallel_config
    if parallel.world_size_across_dp > parallel.tensor_parallel_size:
        return "the model is spread over devices by more than tensor parallelism"
    # a pass of vLLM 0.31's, after which a rank has some rows of the residual
    if getattr(config.compilation_config.pass_config, "enable_sp", False):
        return "rows are spread over devices between norms"
    if config.aux_output_config.enabled:
        return "the experts of each token are returned"
    offload = config.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        return "weights are offloaded to the host"
    n, k = router.weight.shape
    if k % 64 != 0 or k > MAX_HIDDEN:
        return f"a hidden size of {k}"
    if n % _EXPERTS_A_BLOCK != 0 or n > MAX_EXPERTS:
        return f"{n} experts"
    if not norm.weight.dtype == router.weight.dtype == torch.bfloat16:
        return "norms and routers are not bfloat16"
    return None


def join(
    config: VllmConfig,
    norm: "RMSNorm",
    router: "GateLinear",
    runner: "MoERunner",
    following: "RMSNorm",
) -> MoEHalf | None:
    """Return the half of a layer as one operator, None if it stays as it is.

    Args:
        config: of the model.
        norm: see ``MoEHalf``, also for the others.
        router: ...
        runner: ...
        following: ...

    """
    if not module.enabled(config, "norms"):
        return None
    # its own class prepares the half
    reason = contract.broken("experts") or refused(config, norm, router, runner)
    if reason is not None:
        logger.info_once("Decode kernels are not used for %s: %s.", KIND, reason)
        return None
    return MoEHalf(norm, router, runner, following, module.is_required(config))


def _decode_moe_half(
    x: torch.Tensor, residual: torch.Tensor, layer_name: LayerNameType
) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    name = moe_runner._resolve_layer_name(layer_name)
    return moe_runner.get_layer_from_name(name).decode_half.compute(x, residual)


def _decode_moe_half_fake(
    x: torch.Tensor, residual: torch.Tensor, layer_name: LayerNameType
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


ops.register(
    "moe_half", _decode_moe_half, _decode_moe_half_fake, tags=(torch.Tag.needs_fixed_stride_order,)
)
