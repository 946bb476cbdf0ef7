"""Profiles: their options, the user's choice, files that are none."""

import json
from pathlib import Path

import pytest

from sparkforge.pins import pins
from sparkforge.serving.options import StartError
from sparkforge.serving.profile import MemoryPlan, Profile, Watch
from tests.support import ROOT

PLAN = MemoryPlan(keep_free_gib=12, most_percent=80, least_gib=75)


def test_options_of_a_full_profile() -> None:
    assert Profile(
        moe_backend="marlin",
        max_model_len=8,
        cudagraph_capture_sizes=(1, 2),
        tool_call_parser="openai",
        prefix_caching=False,
        enforce_eager=True,
        memory=PLAN,
        expect={"moe": "M"},
    ).options() == [
        *("--no-enable-prefix-caching", "--moe-backend", "marlin", "--max-model-len", "8"),
        *("--cudagraph-capture-sizes", "1", "2", "--tool-call-parser", "openai"),
        *("--enforce-eager", "--enable-auto-tool-choice"),
    ]
    share = ["--gpu-memory-utilization", "0.80"]
    assert Profile(memory=PLAN).options() == []
    assert Profile(memory=PLAN).options(most_memory=True) == share


def test_the_image_reads_every_profile_that_a_build_writes(tmp_path: Path) -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    documents = [loaded.profile_of(target).document() for target in loaded.targets.values()]
    assert len([document for document in documents if document]) > 2
    for document in documents:
        (tmp_path / "profile.json").write_text(json.dumps(document))
        assert Profile.load(tmp_path / "profile.json").document() == document


@pytest.mark.parametrize(
    ("words", "caller", "kinds"),
    [
        ([], [], "moe experts"),
        (["--mxfp4-layers", "qkv,o"], [], "moe experts linear"),
        (["--mxfp4-layers", "qkv=lossless,o=lossless,moe"], [], "moe experts"),
        (["--mxfp4-layers", "qkv=lossless,o=int6,lm_head=int8"], [], "moe experts"),
        (["--mxfp4-layers", "qkv=lossless,o=nvfp4"], [], "moe experts linear"),
        (["--mxfp4-layers", "qkv", "--mxfp4-layers", "moe"], [], "moe experts"),
        (["--mxfp4-layers", "qkv"], ["--linear-backend", "torch"], "moe experts"),
        (["--mxfp4-layers", "qkv"], ["--moe-backend=triton"], "linear"),
        (["--mxfp4-layers", "qkv"], ["--decode-kernels", "off"], "moe"),
    ],
)
def test_a_word_is_expected_of_what_the_options_leave_to_the_profile(
    words: list[str], caller: list[str], kinds: str
) -> None:
    profile = Profile(expect={"moe": "MARLIN", "experts": "DECODE", "linear": "MARLIN"})
    assert list(profile.expectations([*words, *caller], caller)) == kinds.split()


@pytest.mark.parametrize(
    "text",
    [
        '{"memory": 5}',
        '{"expect": {"a": 1}}',
        '{"max_model_length": 4096}',
        '{"choice": "fast", "choices": {"exact": {}}}',
        "[" * 20_000,
        "a: [",
    ],
    ids=lambda text: text[:30],
)
def test_a_file_that_is_no_profile_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine").write_text(text)
    with pytest.raises(StartError, match="mine") as error:
        Profile.load(tmp_path / "mine")
    assert "\n" not in str(error.value)


SAID = """\
moe BF16_DEQUANT [mxfp4.py:878] Using 'BF16_DEQUANT' Mxfp4 MoE backend.
attention FLASHINFER [cuda.py:478] Using AttentionBackendEnum.FLASHINFER backend.
attention TRITON_ATTN [cuda.py:527] Using TRITON_ATTN attention backend out of potential: ['X'].
linear MARLIN [__init__.py:995] Using MarlinMxFp4LinearKernel for MXFP4 GEMM
linear FLASHINFERCUTLASS [a.py:9] Using FlashInferCutlassMxfp8LinearKernel for MXFP8 GEMM
linear PLAIN [linear.py:9] Using PlainInt8LinearKernel for INT8 GEMM
linear DECODE [linear.py:9] Using DecodeInt6LinearKernel for INT6 GEMM
linear MARLIN [linear.py:9] Using MarlinNvFp4LinearKernel for NVFP4 GEMM
linear DECODE [linear.py:9] Using DecodeLosslessLinearKernel for LOSSLESS GEMM
experts DECODE [selfcheck.py:93] Decode kernels are used for MXFP4 experts 128 x 2880 x 2880: they
experts DECODE [selfcheck.py:109] Decode kernels for MXFP4 experts are switched off. They failed
experts MARLIN [experts.py:231] Decode kernels are not used for MXFP4 experts: LoRA is enabled.
experts MARLIN [module.py:133] Decode kernels are off: there are none for this device.
- - [selfcheck.py:93] Decode kernels are used for MXFP4 5120 x 2880: they
- - [__init__.py:1206] Using MarlinFP8ScaledMMLinearKernel for FP8 GEMM
"""


@pytest.mark.parametrize("said", SAID.splitlines())
def test_what_vllm_says_of_its_backends(said: str) -> None:
    kind, name, text = said.split(" ", 2)
    line, watch = f"(EngineCore pid=7) INFO 11-21 07:21:00 {text}", Watch({})
    assert watch.feed(line) is None
    assert watch.seen == ({kind: {name}} if kind != "-" else {})
    problem = Watch({kind: "OTHER"}).feed(line)
    assert problem is None if kind == "-" else f"the {kind} backend {name};" in str(problem)
