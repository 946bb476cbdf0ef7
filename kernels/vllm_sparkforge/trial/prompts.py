# SPDX-License-Identifier: Apache-2.0
"""The experts of prompts: Marlin's, or FlashInfer's CUTLASS MoE where that is right and faster.

CUTLASS has a list of tactics for each of the two products. Each is compared with torch, which
rounds activations to MXFP8 as CUTLASS does; the autotuner of a server chooses among the right ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm_sparkforge.options import TACTIC

if TYPE_CHECKING:
    from vllm_sparkforge.trial.kinds import Kind, Trial

PART, BACKEND = "prompts", "flashinfer_cutlass"
LISTED = "CUTLASS's list of tactics"
ROWS = (2048, 8192)
FASTER = 1.05
"""Marlin's time over CUTLASS's, from which on the activations' rounding is worth it."""
_OPERATORS = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")
_CALLS = 3
"""That are timed together."""

Pair = tuple[int, int]


def _is_compiled() -> bool:
    """Whether the module is there: it takes an hour to compile."""
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module

    return bool(gen_cutlass_fused_moe_sm120_module().is_compiled)


def leave_out(failed: frozenset[str]) -> None:
    """Keep FlashInfer's autotuner from the tactics that failed."""
    numbers = {int(one.removeprefix(TACTIC)) for one in failed if one.startswith(TACTIC)}
    if not numbers:
        return
    from flashinfer.autotuner import AutoTuner

    usual = AutoTuner.choose_one

    def choose_one(
        self: Any, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, **named: Any
    ) -> Any:
        if custom_op not in _OPERATORS:
            return usual(self, custom_op, runners, tuning_config, inputs, **named)
        (runner,) = runners
        valid = runner.get_valid_tactics
        runner.get_valid_tactics = lambda *some: [one for one in valid(*some) if one not in numbers]
        _, tactic = usual(self, custom_op, runners, tuning_config, inputs, **named)
        # -1: not tuned, which is the first of the list
        if tactic == -1 or tactic in numbers:
            tactic = runner.get_valid_tactics(inputs, None)[0]
        return runner, tactic

    AutoTuner.choose_one = choose_one


def _listed(call: Callable[[], Any]) -> list[list[int]]:
    """Return the tactics of both products, as the autotuner would be given them in a call."""
    from flashinfer.autotuner import AutoTuner

    usual, lists = AutoTuner.choose_one, []

    def choose_one(self: Any, custom_op: str, runners: Any, _: Any, inputs: Any, **__: Any) -> Any:
        lists.append(runners[0].get_valid_tactics(inputs, None))
        return runners[0], lists[-1][0]

    AutoTuner.choose_one = choose_one
    try:
        call()
    finally:
        AutoTuner.choose_one = usual
    return lists


class Prompts:
    """The kinds that lead to a choice.

    Args:
        trial: makes the experts.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._wanted: dict[int, torch.Tensor] = {}

    def kinds(self, found: dict[str, Any]) -> Iterator[Kind]:
        """Yield them: the kernels for few rows in CUTLASS's order, its tactics, and the choice."""
        from vllm.platforms import current_platform
        from vllm.utils.flashinfer import has_flashinfer_cutlass_fused_moe

        from vllm_sparkforge.decode import experts
        from vllm_sparkforge.trial import kinds

        family = current_platform.is_device_capability_family(120)
        if not (family and has_flashinfer_cutlass_fused_moe() and _is_compiled()):
            return
        order = experts.ROW_MAJOR_KIND
        yield kinds.Kind(order, PART, lambda: {"difference": self._trial.compare_experts(order)})
        yield kinds.Kind(LISTED, PART, self._list)
        if not (self._trial.right(order) and self._trial.right(LISTED)):
            return
        first, second = found[LISTED]["tactics"]
        pairs = [
            (first[i % len(first)], second[i % len(second)])
            for i in range(max(len(first), len(second)))
        ]
        for pair in pairs:
            yield kinds.Kind(_name(pair), PART, partial(self._pair, pair))
        right = [pair for pair in pairs if self._trial.right(_name(pair))]
        if not right:
            return
        # one that was beside a wrong one, now beside a right one
        again = [(one, right[0][1]) for one in first if one not in {pair[0] for pair in right}]
        again += [(right[0][0], one) for one in second if one not in {pair[1] for pair in right}]
        for pair in again:
            yield kinds.Kind(_name(pair), PART, partial(self._pair, pair))
        right += [pair for pair in again if self._trial.right(_name(pair))]
        left_out = {*first, *second} - {one for pair in right for one in pair}
        best = min(right, key=lambda pair: sum(found[_name(pair)]["ms"]))
        yield kinds.Kind(PART, PART, partial(self._choose, best, sorted(left_out)))

    @property
    def _made(self) -> Any:
        from vllm_sparkforge.decode import experts

        return self._trial.experts_of(experts.ROW_MAJOR_KIND)

    def _input(self, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(rows)
        x = self._trial.random(rows, columns)
        scores = self._trial.random(rows, self._trial.sizes.experts, dtype=torch.float32)
        shares, ids = scores.topk(4)
        return x, ids.to(torch.int32), shares.softmax(-1)

    def _cutlass(self, given: Sequence[torch.Tensor], pair: Pair | None) -> torch.Tensor:
        """Compute experts as vLLM's FlashInferExperts does, with one tactic for each product."""
        from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize
        from vllm.utils.flashinfer import flashinfer_cutlass_fused_moe

        x, ids, shares = given
        _, weights = self._made
        quantized, scale = mxfp8_e4m3_quantize(x, True)
        alpha, beta, limit = (shares.new_full((weights.w13.shape[0],), v) for v in (1.702, 1, 7))
        output = torch.empty_like(x)
        flashinfer_cutlass_fused_moe(
            input=quantized,
            token_selected_experts=ids,
            token_final_scales=shares,
            fc1_expert_weights=weights.w13.view(torch.long),
            fc2_expert_weights=weights.w2.view(torch.long),
            fc1_expert_biases=weights.w13_bias,
            fc2_expert_biases=weights.w2_bias,
            swiglu_alpha=alpha,
            swiglu_beta=beta,
            swiglu_limit=limit,
            output=output,
            output_dtype=x.dtype,
            quant_scales=[
                weights.w13_scale.view(torch.int32),
                torch.ones_like(alpha),
                weights.w2_scale.view(torch.int32),
                torch.ones_like(alpha),
            ],
            input_sf=scale,
            use_mxfp8_act_scaling=True,
            profile_ids=None if pair is None else list(pair),
        )
        return output

    def _list(self) -> dict[str, Any]:
        given = self._input(ROWS[0], self._made[1].hidden)
        lists = _listed(lambda: self._cutlass(given, None))
        return {"text": f"{len(lists[0])} and {len(lists[1])}", "tactics": lists}

    def _pair(self, pair: Pair) -> dict[str, Any]:
        from vllm_sparkforge.decode import expertcheck, selfcheck

        made, weights = self._made
        found, times = [], []
        for rows in ROWS:
            given = self._input(rows, weights.hidden)
            if rows not in self._wanted:
                x, ids, shares = given
                self._wanted[rows] = expertcheck.checkpoint_experts(x, made, ids, shares, _as_mxfp8)
            ours = self._cutlass(given, pair)
            found.append(selfcheck.distance(ours, self._wanted[rows]))
            times.append(_ms(lambda given=given: self._cutlass(given, pair)))
        worst = selfcheck.worst(found)
        text = f"differs by {worst:.2g}, {', '.join(f'{one:.2f}' for one in times)} ms"
        return {"difference": worst, "text": text, "ms": times}

    def _choose(self, best: Pair, left_out: Sequence[int]) -> dict[str, Any]:
        """Time both, and choose; Marlin runs as vLLM's MarlinExperts has it."""
        from vllm.model_executor.layers.fused_moe.activation import (
            ApplyMoEActivationConfig,
            MoEActivation,
        )
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
        from vllm.scalar_type import scalar_types

        from vllm_sparkforge.decode import experts

        _, marlin = self._trial.experts_of(experts.KIND)
        both = []
        for rows in ROWS:
            x, ids, shares = self._input(rows, marlin.hidden)
            theirs = partial(
                fused_marlin_moe,
                hidden_states=x,
                w1=marlin.w13,
                w2=marlin.w2,
                bias1=marlin.w13_bias,
                bias2=marlin.w2_bias,
                w1_scale=marlin.w13_scale,
                w2_scale=marlin.w2_scale,
                topk_weights=shares,
                topk_ids=ids,
                quant_type_id=scalar_types.float4_e2m1f.id,
                activation=MoEActivation.SWIGLUOAI,
                activation_config=ApplyMoEActivationConfig(7.0, 1.702, 1.0),
            )
            given = self._input(rows, self._made[1].hidden)
            both.append((_ms(theirs), _ms(lambda given=given: self._cutlass(given, best))))
        faster = all(usual >= FASTER * ours for usual, ours in both)
        times = ", ".join(
            f"{rows} rows {usual:.2f} and {ours:.2f} ms"
            for rows, (usual, ours) in zip(ROWS, both, strict=True)
        )
        return {
            "text": f"{'CUTLASS' if faster else 'Marlin'}: Marlin and CUTLASS take for {times}",
            "moe_backend": BACKEND if faster else None,
            "name": Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8.value,
            "left_out": [f"{TACTIC}{one}" for one in left_out],
        }


def _name(pair: Pair) -> str:
    return f"CUTLASS tactics {pair[0]} and {pair[1]}"


def _as_mxfp8(rows: torch.Tensor) -> torch.Tensor:
    """Round to MXFP8 along rows, as CUTLASS's inputs are."""
    from vllm_sparkforge.mx import formats

    return formats.mxfp8_dequantize(*formats.mxfp8_quantize(rows)).float()


def _ms(call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call, after a first one: the better of two rounds."""
    from vllm_sparkforge.decode import selfcheck

    call()
    rounds = []
    for _ in range(2):
        selfcheck.settle()
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        selfcheck.settle()
        rounds.append((time.perf_counter() - began) * 1000 / _CALLS)
    return min(rounds)
