"""Options of ``vllm serve``: as the plugin gets them, and secrets among them."""

import json
from typing import Any

import pytest

from sparkforge.serving.options import EX_CONFIG, SettingError, for_plugin, redacted


def passed(words: str) -> tuple[list[str], Any]:
    """Return the words that stay, and the configuration at their end; None without one."""
    *kept, last = for_plugin(words.split()) or [""]
    name, _, text = last.partition("=")
    if name != "--additional-config":
        return [*kept, *filter(None, [last])], None
    return kept, json.loads(text)


@pytest.mark.parametrize(
    ("words", "kept", "ours"),
    [
        ("--mxfp4-layers qkv,o", "", {"mxfp4_layers": "qkv,o"}),
        ("--mxfp4_layers=qkv --a 1 --mxfp4-layers o", "--a 1", {"mxfp4_layers": "o"}),
        ("--moe_backend=BF16-Dequant", "", {"experts": "bf16_dequant"}),
        ("--all-reduce oneshot", "", {"all_reduce": "oneshot"}),
        (
            "--moe-backend=bf16_dequant --decode-kernels off --mxfp4-layers moe",
            "",
            {"experts": "bf16_dequant", "decode_kernels": "off", "mxfp4_layers": "moe"},
        ),
        (
            "--moe-backend bf16_dequant --decode-kernels off --moe_backend auto",
            "--moe-backend=auto",
            {"decode_kernels": "off"},
        ),
    ],
)
def test_our_options_go_into_the_configuration(words: str, kept: str, ours: dict[str, str]) -> None:
    assert passed(words) == (kept.split(), {"sparkforge": ours})


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (
            '--additional-config {"b":{"c":1}}',
            '{"b":{"c":1},"sparkforge":{"decode_kernels":"off"}}',
        ),
        (
            '--additional_config={"sparkforge":{"decode_kernels":"on","a":2}}',
            '{"sparkforge":{"a":2,"decode_kernels":"off"}}',
        ),
    ],
)
def test_a_given_configuration_is_kept_beside_them(words: str, config: str) -> None:
    found = for_plugin(["-x", *words.split(), "--decode-kernels", "off"])
    assert found == ["-x", f"--additional-config={config}"]


@pytest.mark.parametrize(
    "words",
    [
        "--additional-config secret",
        "--additional-config.a=secret",
        "--decode-kernels --enforce-eager",
        "--decode-kernels yes",
        '--mxfp4-layers qkv --additional-config {"sparkforge":{"mxfp4_layers":"secret"}}',
        "--mxfp4-layers qkv=int5",
        "--mxfp4-layers QKV",
        "--mxfp4-layers qkv,,o",
        "--mxfp4-layers qkv,qkv=int8",
        "--mxfp4-layers moe=int8",
    ],
)
def test_what_cannot_be_passed_is_an_error_with_a_hint(words: str) -> None:
    with pytest.raises(SettingError) as refusal:
        for_plugin(["--moe-backend", "bf16_dequant", *words.split()])
    assert refusal.value.code == EX_CONFIG
    assert refusal.value.hint
    assert "secret" not in str(refusal.value)


def test_no_secret_is_shown() -> None:
    words = ["vllm", "--api-key", "a", "b", "--seed", "1", "--hf_token=c", "--api-key=d"]
    assert redacted(words) == [
        *("vllm", "--api-key", "***", "***", "--seed", "1", "--hf_token=***", "--api-key=***"),
    ]
    shown = ['{"tokenizer": "a", "max_tokens": 7}', "--max-num-batched-tokens", "8"]
    assert redacted(shown) == shown
    # vLLM's parser takes options that are cut short
    assert redacted(["--hf-tok", "a", "--api-k=b"]) == ["--hf-tok", "***", "--api-k=***"]


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", '{"a": {"Auth_Token": "hidden"}, "max_tokens": 5}'],
        ['--x={"secret": "hid\\"den", "password": "hidden'],
        ["--kv-transfer-config.extra.hf_token", "hidden", "--seed", "1"],
        ["--x", "https://user:hidden/hidden@host/y"],
    ],
)
def test_no_secret_in_json_or_a_url_is_shown(words: list[str]) -> None:
    shown = " ".join(redacted(words))
    assert "hid" not in shown
    assert "***" in shown
    assert len(redacted(words)) == len(words)
