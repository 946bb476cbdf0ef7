"""The modules that FlashInfer compiles on SM 12.x for gpt-oss.

``tests/patches/test_packs.py`` makes vLLM's calls of FlashInfer with our series, and compares the
list with FlashInfer's own choice for a simulated 12.0 and 12.1. gpt-oss has 64 query and 8 KV
heads, or half of each with two ranks. The ratio is 8 in both cases, so one list serves one and two
ranks. The profiles' choices differ in dense layers, which the decode kernels compute, so it serves
all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sparkforge.core.errors import PinsError

UPSTREAM = "flashinfer"
LOCK = "requirements/packs.txt"
"""The compiler's wheels."""


@dataclass(frozen=True)
class Module:
    """One module of FlashInfer, a shared library, by FlashInfer's own name."""

    name: str
    generator: str
    """Function below ``flashinfer.jit`` that returns its sources, as ``module:name``."""
    arguments: Mapping[str, object]
    """``torch.X`` stands for a data type, ``variants.X`` for a source text of FlashInfer's."""
    needs: str = ""
    """Option of ``vllm serve`` that leads to it; "": the profiles' defaults do."""


_BF16 = "torch.bfloat16"
_DTYPES = {"bf16": _BF16, "e4m3": "torch.float8_e4m3fn"}


def _sinks(kv: str = "bf16", needs: str = "") -> Iterator[Module]:
    """Prefill with attention sinks, of layers with a sliding window and without."""
    for window in (True, False):
        name = (
            f"batch_prefill_attention_sink_bf16_kv_{kv}_head_dim_qk_64_head_dim_vo_64_posenc_0"
            f"_f16qk_False_swa_{window}_fa2"
        )
        arguments = {
            "backend": "fa2",
            "uri": name,
            "idtype": "torch.int32",
            "module_surface": "full",
            "dtype_q": _BF16,
            "dtype_kv": _DTYPES[kv],
            "dtype_o": _BF16,
            "head_dim_qk": 64,
            "head_dim_vo": 64,
            "pos_encoding_mode": 0,
            "additional_tensor_names": ["sink"],
            "additional_tensor_dtypes": ["float"],
            "additional_scalar_names": ["sm_scale"],
            "additional_scalar_dtypes": ["double"],
            "variant_name": "AttentionSink",
            "variant_decl": "variants.attention_sink_fa2_decl",
            "use_sliding_window": window,
            "use_fp16_qk_reduction": False,
            "paged_kv_stride_mode": "independent",
        }
        yield Module(name, "attention:gen_customize_batch_prefill_module", arguments, needs)


def _xqas(page: int = 16, kv: str = "bf16", needs: str = "") -> Iterator[Module]:
    """Decode with attention sinks (XQA), of layers with a sliding window and without."""
    for window in (True, False):
        name = (
            f"xqa_input_bf16_kv_cache_{kv}_output_bf16_page_size_{page}_head_dim_64"
            f"_head_group_ratio_8_use_sliding_window_{window}_use_spec_dec_False_spec_q_seq_len_1"
        )
        arguments = {
            "input_dtype": _BF16,
            "kv_cache_dtype": _DTYPES[kv],
            "output_dtype": _BF16,
            "page_size": page,
            "head_dim": 64,
            "head_group_ratio": 8,
            "use_sliding_window": window,
            "q_seq_len": 1,
            "use_ragged_q": False,
        }
        yield Module(name, "xqa:gen_xqa_module", arguments, needs)


_FP8, _CUTLASS = "--kv-cache-dtype fp8", "--moe-backend flashinfer_cutlass"
_MXFP8 = "mxfp8_quantization_sm100"  # named so on every device
MODULES: tuple[Module, ...] = (
    Module("sampling", "sampling:gen_sampling_module", {}),
    *_sinks(),
    *_xqas(),
    *_xqas(32, needs="--block-size 32"),
    *_xqas(64, needs="--block-size 64"),
    *_sinks("e4m3", _FP8),
    *_xqas(kv="e4m3", needs=_FP8),
    Module(_MXFP8, f"fp8_quantization:gen_{_MXFP8}_module", {}, _CUTLASS),
    Module("fused_moe_120", "fused_moe:gen_cutlass_fused_moe_sm120_module", {}, _CUTLASS),
)


def pinned(pack: Sequence[str]) -> tuple[Module, ...]:
    """Return the modules of a pack: ``default``, ``all``, names; PinsError if there is no such."""
    if unknown := set(pack) - {"default", "all", *(module.name for module in MODULES)}:
        msg = f"{min(unknown)!r} is no module of FlashInfer that is compiled ahead of time"
        raise PinsError(msg, "give default, all, or names of sparkforge/build/packs/modules.py")
    return tuple(
        module
        for module in MODULES
        if "all" in pack or module.name in pack or ("default" in pack and not module.needs)
    )
