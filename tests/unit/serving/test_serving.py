"""What is decided before the server starts: options, page cache, access."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sparkforge.pins import pins, profiles
from sparkforge.serving import access, arguments, backends, pagecache
from sparkforge.serving.document import Document
from sparkforge.serving.memory import MemoryPlan
from sparkforge.serving.profile import _KINDS, Profile
from tests.support import ROOT

PLAN = MemoryPlan(keep_free_gib=12, most_percent=80, least_gib=75)


# -- profile ---------------------------------------------------------------------------------------


def test_options_of_a_full_profile() -> None:
    assert Profile(
        model="m",
        moe_backend="marlin",
        attention_backend="FLASHINFER",
        kv_cache_dtype="auto",
        max_model_len=8,
        cudagraph_capture_sizes=(1, 2),
        tool_call_parser="openai",
        reasoning_parser="openai_gptoss",
        prefix_caching=False,
        enforce_eager=True,
        memory=PLAN,
        expect={"moe": "M"},
    ).options() == [
        *("--moe-backend", "marlin", "--attention-backend", "FLASHINFER"),
        *("--kv-cache-dtype", "auto", "--max-model-len", "8"),
        *("--reasoning-parser", "openai_gptoss", "--cudagraph-capture-sizes", "1", "2"),
        *("--tool-call-parser", "openai", "--enable-auto-tool-choice"),
        *("--no-enable-prefix-caching", "--enforce-eager"),
    ]
    assert Profile().options() == []
    assert Profile(memory=PLAN).options() == []
    share = ["--gpu-memory-utilization", "0.80"]
    assert Profile(memory=PLAN).options(most_memory=True) == share


def test_every_field_of_a_profile_is_read() -> None:
    read_apart = {"cudagraph_capture_sizes", "memory", "expect", "choices"}
    plain = {one.name for one in fields(Profile) if one.type in _KINDS}
    assert plain | read_apart == {one.name for one in fields(Profile)}
    assert not plain & read_apart


def test_the_image_reads_every_profile_that_a_build_writes() -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    documents = [loaded.profile_of(target) for target in loaded.targets.values()]
    assert len([document for document in documents if document]) > 2
    for document in documents:
        back = json.loads(json.dumps(Profile.of(Document("a profile", document)).document()))
        assert back == document


def test_both_sides_have_the_same_fields() -> None:
    names = {field.name for field in fields(Profile)}
    assert names - {"vocabulary_sha256", "cuda_arch", "choices"} == set(
        profiles.Profile.model_fields
    )
    plan = {field.name for field in fields(MemoryPlan)}
    assert plan == set(profiles.MemoryPlan.model_fields)


@pytest.mark.parametrize(
    ("words", "there"),
    [
        (["--moe-backend", "x"], True),
        (["--moe-backend=x"], True),
        (["--moe_backend=x"], True),
        (["--moe-backend-of-mine", "--other", "--", "moe-backend"], False),
    ],
)
def test_an_option_is_found_as_vllm_would_take_it(words: list[str], there: bool) -> None:
    assert arguments.has(words, "--moe-backend") is there


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--n", "1", "--n=2", "--m", "3"], "2"),
        (["--n_o", "1"], None),
        (["--n"], None),
        (["--n", "1", "--n"], None),
    ],
)
def test_of_two_values_the_later_counts(words: list[str], value: str | None) -> None:
    assert arguments.value(words, "--n") == value


@pytest.mark.parametrize(
    ("words", "caller", "kinds"),
    [
        ([], [], "moe experts"),
        (["--mxfp4-layers", "qkv,o"], [], "moe experts linear"),
        (["--mxfp4-layers=lm_head=mxfp8"], [], "moe experts linear"),
        (["--mxfp4-layers", "moe"], [], "moe experts"),
        (["--mxfp4-layers", "qkv", "--mxfp4-layers", "moe"], [], "moe experts"),
        (["--mxfp4-layers", "qkv"], ["--linear-backend", "torch"], "moe experts"),
        (["--mxfp4-layers", "qkv"], ["--moe-backend=triton"], "linear"),
        (["--mxfp4-layers", "qkv"], ["--decode-kernels", "off"], "moe"),
        (["--mxfp4-layers", "qkv"], ["--enable-lora"], "moe linear"),
        ([], ["--enable-expert-parallel"], "moe"),
        ([], ["--dtype", "half"], "moe"),
    ],
)
def test_a_word_is_expected_of_what_the_options_leave_to_the_profile(
    words: list[str], caller: list[str], kinds: str
) -> None:
    profile = Profile(expect={"moe": "MARLIN", "experts": "DECODE", "linear": "MARLIN"})
    assert list(profile.expectations([*words, *caller], caller)) == kinds.split()


# -- page cache ------------------------------------------------------------------------------------


@pytest.fixture
def on_disk() -> Any:
    """A folder on a real disk: files of a tmpfs are never dropped."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        yield Path(folder)


def test_files_leave_the_page_cache_and_keep_their_bytes(on_disk: Path) -> None:
    weights = on_disk / "model-00001-of-00002.safetensors"
    blob = on_disk / "blob"
    for file in (weights, blob):
        with file.open("wb") as out:
            out.write(os.urandom(1 << 20) * 8)
            os.fsync(out.fileno())  # a page that is not on the disk yet stays
    (on_disk / "model-00002-of-00002.safetensors").symlink_to(blob)  # as in the hub's cache
    files = pagecache.weight_files(on_disk)
    before = weights.read_bytes(), blob.read_bytes()
    assert [pagecache.resident(file) for file in files] == [8 << 20, 8 << 20]
    assert pagecache.evict(files) == 16 << 20
    assert sum(pagecache.resident(file) for file in files) < 1 << 20
    assert (weights.read_bytes(), blob.read_bytes()) == before


def test_a_model_is_found_in_the_hubs_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--openai--gpt-oss-120b"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    assert pagecache.snapshot(tmp_path, "openai/gpt-oss-120b", None) is None
    (folder / "refs" / "main").write_text("abc")
    found = folder / "snapshots" / "abc"
    assert pagecache.snapshot(tmp_path, "openai/gpt-oss-120b", None) == found
    assert pagecache.snapshot(tmp_path, "openai/gpt-oss-120b", "abc") == found
    assert pagecache.snapshot(tmp_path, "openai/gpt-oss-120b", "def") is None


# -- backends --------------------------------------------------------------------------------------

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


# -- access ----------------------------------------------------------------------------------------


def test_a_secret_comes_before_the_environment(tmp_path: Path) -> None:
    secret, none = tmp_path / "key", tmp_path / "none"
    secret.write_text("from-the-file\n")
    environment = {"VLLM_API_KEY": "from-the-environment"}
    assert access.api_key(environment, secret) == "from-the-file"
    assert access.api_key(environment, none) == "from-the-environment"
    assert access.api_key(environment, Path(os.devnull)) == "from-the-environment"
    assert access.api_key({}, none) == ""


def test_more_than_a_word_is_no_key(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("one two\n")
    with pytest.raises(access.AccessError, match="more than one word"):
        access.api_key({}, secret)


def test_a_key_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(access.AccessError, match="cannot be read by user"):
        access.api_key({}, tmp_path)  # a folder: root may read any file


@pytest.mark.parametrize("key", ["\ufeffword", "schlüssel", "ключ", "a\0b", "a\x01b"])
def test_a_key_that_no_request_can_carry_is_an_error(tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key)
    (tmp_path / "latin").write_bytes(b"schl\xfcssel")
    for variables, name in (({}, "key"), ({}, "latin"), ({"VLLM_API_KEY": key}, "none")):
        with pytest.raises(access.AccessError, match=r"no HTTP header can carry") as refused:
            access.api_key(variables, tmp_path / name)
        assert key not in str(refused.value)


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_this_machine_alone_needs_no_key(bind: str) -> None:
    access.check_open({"SPARKFORGE_BIND": bind}, "")
    access.check_open({"SPARKFORGE_LISTEN_HOST": "127.0.0.1"}, "")
    with pytest.raises(access.AccessError, match=r"published on 0\.0\.0\.0"):
        access.check_open({}, "")  # docker run -p publishes on all addresses


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.168.1.4", "::", ""])
def test_others_need_one(bind: str) -> None:
    variables = {"SPARKFORGE_BIND": bind}
    with pytest.raises(access.AccessError, match="without an API key"):
        access.check_open(variables, "")
    access.check_open(variables, "key")
    access.check_open(variables | {"SPARKFORGE_ALLOW_OPEN": "1"}, "")


def test_no_secret_is_shown() -> None:
    words = ["vllm", "--api-key", "a", "b", "--seed", "1", "--hf_token=c", "--api-key=d"]
    assert access.redacted(words) == [
        *("vllm", "--api-key", "***", "***", "--seed", "1", "--hf_token=***", "--api-key=***"),
    ]
    # vLLM's parser takes options that are cut short
    assert access.redacted(["--hf-tok", "a", "--api-k=b"]) == ["--hf-tok", "***", "--api-k=***"]


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", '{"a": {"Auth_Token": "hidden"}, "max_tokens": 5}'],
        ['--kv-transfer-config={"api-key":"hidden"}'],
        ['--x={"secret": "hid\\"den", "password": "hidden'],
        ["--kv-transfer-config.extra.hf_token", "hidden", "--seed", "1"],
        ["--kv-transfer-config.extra.token=hidden"],
        ["--x", "https://user:hidden@host/y"],
        ["--x", "https://user:hidden/hidden@host/y"],
    ],
)
def test_no_secret_in_json_or_a_url_is_shown(words: list[str]) -> None:
    shown = " ".join(access.redacted(words))
    assert "hid" not in shown
    assert "***" in shown
    assert len(access.redacted(words)) == len(words)


def test_what_is_no_secret_is_shown() -> None:
    words = ['{"tokenizer": "a", "max_tokens": 7, "method": "b"}', "--max-num-batched-tokens", "8"]
    assert access.redacted(words) == words
