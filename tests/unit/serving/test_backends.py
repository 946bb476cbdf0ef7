"""The backends that vLLM chose, in its log."""

from __future__ import annotations

import pytest

from sparkforge.serving import backends

LINE = "(EngineCore pid=7) INFO 11-21 07:21:00 "


@pytest.mark.parametrize(
    ("line", "kind", "name"),
    [
        ("[mxfp4.py:878] Using 'BF16_DEQUANT' Mxfp4 MoE backend.", "moe", "BF16_DEQUANT"),
        (
            "[cuda.py:478] Using AttentionBackendEnum.FLASHINFER backend.",
            "attention",
            "FLASHINFER",
        ),
        (
            "[cuda.py:527] Using TRITON_ATTN attention backend out of potential backends: ['X'].",
            "attention",
            "TRITON_ATTN",
        ),
        ("[__init__.py:995] Using MarlinMxFp4LinearKernel for MXFP4 GEMM", "linear", "MARLIN"),
        ("[__init__.py:995] Using DecodeMxFp4LinearKernel for MXFP4 GEMM", "linear", "DECODE"),
        ("[__init__.py:949] Using CPUMxFp8LinearKernel for MXFP8 GEMM", "linear", "CPU"),
        (
            "[__init__.py:949] Using FlashInferCutlassMxfp8LinearKernel for MXFP8 GEMM",
            "linear",
            "FLASHINFERCUTLASS",
        ),
        (
            "[selfcheck.py:93] Decode kernels are used for MXFP4 experts 128 x 2880 x 2880: they",
            "experts",
            "DECODE",
        ),
        (
            "[selfcheck.py:109] Decode kernels for MXFP4 experts are switched off. They failed",
            "experts",
            "DECODE",
        ),
        (
            "[experts.py:231] Decode kernels are not used for MXFP4 experts: LoRA is enabled.",
            "experts",
            "MARLIN",
        ),
        (
            "[module.py:133] Decode kernels are off: there are none for this device's capability.",
            "experts",
            "MARLIN",
        ),
        ("[selfcheck.py:93] Decode kernels are used for MXFP4 5120 x 2880: they", None, None),
        ("[layer.py:9] Decode kernels are not used for norms and routers: x.", None, None),
        ("[__init__.py:1206] Using MarlinNvFp4LinearKernel for NVFP4 GEMM", None, None),
        ("[cuda.py:527] Using TurboQuant attention backend.", None, None),
        ("[mxfp4.py:2326] Using CPUUnquantizedExperts", None, None),
    ],
)
def test_what_vllm_says_of_its_backends(line: str, kind: str | None, name: str | None) -> None:
    watch = backends.Watch({})
    assert watch.feed(LINE + line) is None
    assert watch.seen == ({kind: {name}} if kind else {})
    if kind:
        problem = backends.Watch({kind: "OTHER"}).feed(LINE + line)
        assert problem == f"vLLM chose the {kind} backend {name}; the profile says OTHER"
