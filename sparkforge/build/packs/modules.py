"""The modules that FlashInfer compiles on SM 12.x for gpt-oss, and the calls of vLLM for them.

Read in vLLM 0.33.0 with our series and in FlashInfer 0.7.2.post1 with ours.
``tests/patches/test_packs.py`` checks each piece of evidence against those sources, and makes
FlashInfer's own calls for a simulated 12.0 and 12.1, with tensors of gpt-oss's shapes: 64 query and
8 KV heads, or half of each with two ranks. The ratio is 8 in both cases, so one list serves one and
two ranks. ``exact``, ``balanced`` and ``fast`` differ in dense layers, which Marlin and the decode
kernels compute, so it serves all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkforge.core.errors import PinsError, UsageError

Set = Literal["default", "all"]
SETS: tuple[Set, ...] = ("default", "all")
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
class Module:
    """One module of FlashInfer, a shared library.

    Attributes:
        name: FlashInfer's own, by which it looks for the library.
        generator: function below ``flashinfer.jit`` that returns its sources, as ``module:name``.
        arguments: of that function; ``torch.X`` stands for a data type, ``variants.X`` for a source
            text of FlashInfer's.
        needs: option of ``vllm serve`` that leads to it; "": the profiles' defaults do.
        evidence: the calls that lead to it.
    """

    name: str
    generator: str
    arguments: Mapping[str, object]
    needs: str
    evidence: tuple[Evidence, ...]


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


def _sink(*, window: bool, kv: str = "bf16", needs: str = "") -> Module:
    """Prefill with attention sinks, of layers with a sliding window or without."""
    name = (
        f"batch_prefill_attention_sink_bf16_kv_{kv}_head_dim_qk_64_head_dim_vo_64_posenc_0"
        f"_f16qk_False_swa_{window}_fa2"
    )
    return Module(
        name,
        "attention:gen_customize_batch_prefill_module",
        {
            "backend": "fa2",
            "uri": name,
            "dtype_q": "torch.bfloat16",
            "dtype_kv": _DTYPES[kv],
            "dtype_o": "torch.bfloat16",
            "idtype": "torch.int32",
            "head_dim_qk": 64,
            "head_dim_vo": 64,
            "additional_tensor_names": ["sink"],
            "additional_tensor_dtypes": ["float"],
            "additional_scalar_names": ["sm_scale"],
            "additional_scalar_dtypes": ["double"],
            "variant_name": "AttentionSink",
            "variant_decl": "variants.attention_sink_fa2_decl",
            "pos_encoding_mode": 0,
            "use_sliding_window": window,
            "use_fp16_qk_reduction": False,
            "paged_kv_stride_mode": "independent",
            "module_surface": "full",
        },
        needs,
        (
            Evidence(
                "vllm", _ATTENTION, "self._prefill_wrapper = BatchAttentionWithAttentionSinkW"
            ),
            Evidence(
                "flashinfer", "flashinfer/attention/_core.py", "batch_prefill_attention_sink_"
            ),
        ),
    )


_DTYPES = {"bf16": "torch.bfloat16", "e4m3": "torch.float8_e4m3fn"}


def _xqa(*, window: bool, page: int = 16, kv: str = "bf16", needs: str = "") -> Module:
    """Decode with attention sinks (XQA), of layers with a sliding window or without."""
    return Module(
        f"xqa_input_bf16_kv_cache_{kv}_output_bf16_page_size_{page}_head_dim_64_head_group_ratio_8"
        f"_use_sliding_window_{window}_use_spec_dec_False_spec_q_seq_len_1",
        "xqa:gen_xqa_module",
        {
            "input_dtype": "torch.bfloat16",
            "kv_cache_dtype": _DTYPES[kv],
            "page_size": page,
            "head_dim": 64,
            "head_group_ratio": 8,
            "use_sliding_window": window,
            "output_dtype": "torch.bfloat16",
            "q_seq_len": 1,
            "use_ragged_q": False,
        },
        needs,
        (
            Evidence("vllm", _ATTENTION, "flashinfer_xqa_batch_decode_with_kv_cache("),
            Evidence("flashinfer", "flashinfer/decode.py", "    xqa(\n        query_new,"),
            Evidence("flashinfer", "flashinfer/xqa.py", "spec = gen_xqa_module("),
        ),
    )


_CUTLASS = "--moe-backend flashinfer_cutlass"
_FP8 = "--kv-cache-dtype fp8"

MODULES: tuple[Module, ...] = (
    Module(
        "sampling",
        "sampling:gen_sampling_module",
        {},
        "",
        (
            Evidence("vllm", _SAMPLER, "flashinfer.sampling.top_p_sampling_from_probs("),
            Evidence("vllm", _SAMPLER, "flashinfer.sampling.top_k_sampling_from_probs("),
            Evidence("vllm", _SAMPLER, "flashinfer.sampling.top_k_top_p_sampling_from_logits("),
            Evidence("flashinfer", "flashinfer/sampling.py", "module = gen_sampling_module()"),
        ),
    ),
    _sink(window=True),
    _sink(window=False),
    _xqa(window=True),
    _xqa(window=False),
    *(
        _xqa(window=window, page=page, needs=f"--block-size {page}")
        for page in (32, 64)
        for window in (True, False)
    ),
    *(_sink(window=window, kv="e4m3", needs=_FP8) for window in (True, False)),
    *(_xqa(window=window, kv="e4m3", needs=_FP8) for window in (True, False)),
    Module(
        "mxfp8_quantization_sm100",  # named so on every device
        "fp8_quantization:gen_mxfp8_quantization_sm100_module",
        {},
        _CUTLASS,
        (
            Evidence("vllm", f"{_MOE}/utils.py", "return mxfp8_e4m3_quantize("),
            Evidence(
                "vllm", "vllm/utils/flashinfer.py", "import mxfp8_quantize as mxfp8_quantize_"
            ),
            Evidence(
                "flashinfer",
                "flashinfer/quantization/fp8_quantization.py",
                "module = gen_mxfp8_quantization_sm100_module().build_and_load()",
            ),
        ),
    ),
    Module(
        "fused_moe_120",
        "fused_moe:gen_cutlass_fused_moe_sm120_module",
        {},
        _CUTLASS,
        (
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
    ),
)

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


def chosen(which: Set, names: Sequence[str] = ()) -> tuple[Module, ...]:
    """Return the modules of a set, or those of these names.

    Raises:
        UsageError: there is no module of a name.
    """
    if not names:
        return tuple(module for module in MODULES if which == "all" or not module.needs)
    known = {module.name: module for module in MODULES}
    if unknown := [name for name in names if name not in known]:
        msg = f"--module {unknown[0]}: no such module"
        raise UsageError(msg, f"choose from: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def pinned(pack: Sequence[str], key: str) -> tuple[Module, ...]:
    """Return the modules of a target's pack: of sets, of options, or by their names.

    Args:
        key: of pins.yaml, for the message.

    Raises:
        PinsError: there is no set, option and module of a name.
    """
    known: dict[str, tuple[Module, ...]] = {name: chosen(name) for name in SETS}
    for module in MODULES:
        known[module.name] = (module,)
        if module.needs:
            known[module.needs] = (*known.get(module.needs, ()), module)
    if unknown := [name for name in pack if name not in known]:
        msg = f"{key}: {unknown[0]!r} is no set, option or module"
        hint = f"give {' or '.join(SETS)}, or options or names of build.py packs --list"
        raise PinsError(msg, hint)
    return tuple({module.name: module for name in pack for module in known[name]}.values())
