"""Why FlashInfer loads the modules of a pack for gpt-oss, and no others: quotes of the sources.

Read in vLLM 0.33.0 with our series and in FlashInfer 0.7.2.post1 with ours.
"""

from __future__ import annotations

from dataclasses import dataclass

_ATTENTION = "vllm/v1/attention/backends/flashinfer.py"
_SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"
_MOE = "vllm/model_executor/layers/fused_moe"


@dataclass(frozen=True)
class Evidence:
    """A text that the patched source of an upstream contains."""

    upstream: str
    path: str
    text: str


@dataclass(frozen=True)
class LeftOut:
    """A module that FlashInfer has and gpt-oss does not load on SM 12.x.

    Attributes:
        name: FlashInfer's own.
        call: text by which vLLM's code calls it.
        callers: the files of vLLM with that text, all of them.
        why: reason that they do not call it here.
        gates: the lines that say so.
    """

    name: str
    call: str
    callers: tuple[str, ...]
    why: str
    gates: tuple[Evidence, ...]


CALLS: dict[str, tuple[Evidence, ...]] = {
    "sampling": (
        Evidence("vllm", _SAMPLER, "flashinfer.sampling.top_p_sampling_from_probs("),
        Evidence("vllm", _SAMPLER, "flashinfer.sampling.top_k_sampling_from_probs("),
        Evidence("vllm", _SAMPLER, "flashinfer.sampling.top_k_top_p_sampling_from_logits("),
        Evidence("flashinfer", "flashinfer/sampling.py", "module = gen_sampling_module()"),
    ),
    "batch_prefill_attention_sink_": (
        Evidence("vllm", _ATTENTION, "self._prefill_wrapper = BatchAttentionWithAttentionSinkW"),
        Evidence("flashinfer", "flashinfer/attention/_core.py", "batch_prefill_attention_sink_"),
    ),
    "xqa_": (
        Evidence("vllm", _ATTENTION, "flashinfer_xqa_batch_decode_with_kv_cache("),
        Evidence("flashinfer", "flashinfer/decode.py", "    xqa(\n        query_new,"),
        Evidence("flashinfer", "flashinfer/xqa.py", "spec = gen_xqa_module("),
    ),
    "mxfp8_quantization_sm100": (
        Evidence("vllm", f"{_MOE}/utils.py", "return mxfp8_e4m3_quantize("),
        Evidence("vllm", "vllm/utils/flashinfer.py", "import mxfp8_quantize as mxfp8_quantize_"),
        Evidence(
            "flashinfer",
            "flashinfer/quantization/fp8_quantization.py",
            "module = gen_mxfp8_quantization_sm100_module().build_and_load()",
        ),
    ),
    "fused_moe_120": (
        Evidence(
            "vllm",
            f"{_MOE}/experts/flashinfer_cutlass_moe.py",
            "_ = flashinfer_cutlass_fused_moe(",
        ),
        Evidence(
            "flashinfer",
            "flashinfer/fused_moe/core.py",
            "module = gen_cutlass_fused_moe_sm120_module(use_fast_build).build_and_load()",
        ),
    ),
}
"""The calls that lead to a module, by the start of its name."""

_GPT_OSS = "vllm/model_executor/models/gpt_oss.py"
_ROPE = "vllm/model_executor/layers/rotary_embedding"
_LAYERS = "vllm/model_executor/layers"
_DEVICES = "vllm/distributed/device_communicators"

LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut(
        "rope",
        "from flashinfer.rope import",
        (f"{_ROPE}/common.py",),
        "vLLM has turned it off for all but DeepSeek's scaling",
        (
            Evidence(
                "vllm",
                f"{_ROPE}/base.py",
                'if not hasattr(self, "use_flashinfer"):\n            self.use_flashinfer = False',
            ),
            Evidence("vllm", _GPT_OSS, '"rope_type": "yarn"'),
        ),
    ),
    LeftOut(
        "norm",
        "from flashinfer.norm import",
        (
            "vllm/models/minimax_m3/nvidia/model.py",
            "vllm/models/muse_spark/common/ops/fused_rmsnorm.py",
            "vllm/models/muse_spark/nvidia/model.py",
            "vllm/models/qwen4_exp/nvidia/indexer_qsa.py",
        ),
        "these models have norms of their own; gpt-oss has vLLM's",
        (Evidence("vllm", _GPT_OSS, "layers.layernorm import RMSNorm"),),
    ),
    LeftOut(
        "page",
        "append_paged_kv_cache",
        (_ATTENTION,),
        "vLLM writes its cache itself, but one in NVFP4",
        (
            Evidence(
                "vllm",
                _ATTENTION,
                "if self.nvfp4_fa2:\n                data, scales, kv_layout = _nvfp4_kv_views(",
            ),
        ),
    ),
    LeftOut(
        "topk",
        "from flashinfer import top_k\n",
        (f"{_LAYERS}/logits_processor.py",),
        "drafting models ask for the k best tokens; a sampler's top-k is in sampling",
        (Evidence("vllm", f"{_LAYERS}/logits_processor.py", "def get_top_k_tokens("),),
    ),
    LeftOut(
        "topk",
        "from flashinfer.topk import",
        (f"{_LAYERS}/indexer_topk.py",),
        "for sparse attention, if asked for by name",
        (
            Evidence(
                "vllm",
                f"{_LAYERS}/indexer_topk.py",
                "deep_select/flashinfer/torch are opt-in only",
            ),
        ),
    ),
    LeftOut(
        "cascade",
        "MultiLevelCascadeAttentionWrapper(",
        (),
        "vLLM has no cascade attention with FlashInfer any more",
        (),
    ),
    LeftOut(
        "trtllm_comm",
        "create_allreduce_fusion_workspace(",
        (f"{_DEVICES}/flashinfer_all_reduce.py",),
        "two ranks: both of its users want a size limit for the device, and 12.x has none",
        (
            Evidence(
                "vllm",
                f"{_DEVICES}/flashinfer_all_reduce.py",
                "if not default_max_size_mb:\n",
            ),
            Evidence(
                "vllm",
                "vllm/config/vllm.py",
                "current_platform.is_device_capability_family(100)\n"
                "            or current_platform.is_device_capability(90)",
            ),
        ),
    ),
)
"""Without modules for other formats (``mxfp8_gemm_cutlass_sm120``: checkpoints in MXFP8)."""
