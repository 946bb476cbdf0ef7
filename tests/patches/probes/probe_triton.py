"""Runs inside the interpreter under test: compiles the Triton MoE of gpt-oss for a made-up device.

usage: python -m tests.patches.probes.probe_triton CAPABILITY OUT.json

vLLM's own functions run on CPU tensors of gpt-oss's shapes, through the real triton_kernels, down
to the launch of each Triton kernel; there the kernel is compiled by Triton and ptxas for the
device, and not launched. OUT gets, for every case, the kernels with the shared memory and the TMA
forms they use, or the error that compiling ended with. Nothing is computed: this proves that the
kernels exist and fit, not what they answer.

triton_kernels must be importable (it is a part of the CUDA wheel). The Triton that compiles is the
one of the interpreter.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patches.probes import fake_cuda
from tests.patches.probes.probe_scatter import compile_instead_of_launching, routing

# Experts share nothing that matters here, so a few stand for 128; tokens are then multiplied.
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 4, 2880, 2880
TOKENS = (1, 64, 512)

Kernels = list[dict[str, Any]]


def noted(compiled: Any) -> dict[str, Any]:
    """What the tests want to know of a kernel."""
    text = compiled.asm["ptx"]
    return {
        "name": compiled.metadata.name,
        "shared": compiled.metadata.shared,
        "scatter4": "scatter4" in text,
        "gather4": "gather4" in text,
        "mma": "mma.sync" in text or "tcgen05.mma" in text,
    }


class Layer:
    """Weights and routing of one MoE layer, made by vLLM's own preparation."""

    def __init__(self) -> None:
        import torch
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
        from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

        def weight(rows: int, columns: int) -> tuple[Any, Any]:
            blocks = torch.zeros(EXPERTS, rows, columns // 2, dtype=torch.uint8)
            scales = torch.zeros(EXPERTS, rows, columns // 32, dtype=torch.uint8)
            value, flex, scale = _swizzle_mxfp4(blocks, scales)
            return value, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))

        self.w1, w1_scale = weight(2 * INTERMEDIATE, HIDDEN)
        self.w2, w2_scale = weight(HIDDEN, INTERMEDIATE)
        self.quant_config = mxfp4_w4a16_moe_quant_config(
            w1_bias=torch.zeros(EXPERTS, 2 * INTERMEDIATE),
            w2_bias=torch.zeros(EXPERTS, HIDDEN),
            w1_scale=w1_scale,
            w2_scale=w2_scale,
        )

    def unfused(self, tokens: int) -> None:
        """Run what --moe-backend triton_unfused runs."""
        import torch
        from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as moe

        # Made without its constructor, which wants a whole engine; apply reads these alone.
        experts: Any = object.__new__(moe.UnfusedOAITritonExperts)
        experts.quant_config = self.quant_config
        experts._lora_context = None
        experts._make_routing_data = lambda *args: routing(EXPERTS, tokens * TOP_K, TOP_K)
        experts.activation = lambda *args, **kwargs: None
        workspace = tokens * TOP_K * 2 * INTERMEDIATE
        experts.apply(
            output=torch.empty(tokens, HIDDEN, dtype=torch.bfloat16),
            hidden_states=torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16),
            w1=self.w1,
            w2=self.w2,
            topk_weights=torch.zeros(tokens, TOP_K),
            topk_ids=torch.zeros(tokens, TOP_K, dtype=torch.int64),
            activation=moe.MoEActivation.SWIGLUOAI,
            global_num_experts=EXPERTS,
            expert_map=None,
            a1q_scale=None,
            a2_scale=None,
            workspace13=torch.empty(workspace, dtype=torch.bfloat16),
            workspace2=torch.empty(workspace, dtype=torch.bfloat16),
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )


def attempt(kernels: Kernels, run: Callable[[int], None], tokens: int) -> dict[str, Any]:
    """Run one case; return its kernels and its error."""
    kernels.clear()
    error = ""
    try:
        run(tokens)
    except Exception as problem:
        error = f"{type(problem).__name__}: {str(problem)[:2000]}"
    return {"kernels": list(kernels), "error": error}


def main() -> None:
    capability, out = fake_cuda.Capability.parse(sys.argv[1]), Path(sys.argv[2])
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    kernels: Kernels = []
    fake_cuda.install(capability)
    compile_instead_of_launching(
        (capability.major, capability.minor),
        fake_cuda.SHARED_MEMORY[capability.major],
        lambda compiled: kernels.append(noted(compiled)),
    )

    from triton_kernels.matmul_ogs_details import opt_flags

    layer = Layer()
    constraints = dict(opt_flags._opt_flags_constraints)
    result: dict[str, Any] = {
        str(tokens): attempt(kernels, layer.unfused, tokens) for tokens in TOKENS
    }

    # The control: the same without the constraint.
    opt_flags._opt_flags_constraints = {**constraints, "fused_scatter": None}
    result["with fused scatter"] = attempt(kernels, layer.unfused, 1)
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
