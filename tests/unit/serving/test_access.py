"""The API key, and secrets in logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkforge.serving import access


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
    with pytest.raises(access.AccessError, match="one word"):
        access.api_key({}, secret)


def test_a_key_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(access.AccessError, match="cannot be read by user"):
        access.api_key({}, tmp_path)  # a folder: root may read any file


@pytest.mark.parametrize("key", ["\ufeffword", "schlüssel", "ключ", "a\0b", "a\x01b"])
def test_a_key_that_no_request_can_carry_is_an_error(tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key)
    (tmp_path / "latin").write_bytes(b"schl\xfcssel")
    for variables, name in (({}, "key"), ({}, "latin"), ({"VLLM_API_KEY": key}, "none")):
        with pytest.raises(access.AccessError, match="one word") as refused:
            access.api_key(variables, tmp_path / name)
        assert key not in str(refused.value)


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_this_machine_alone_needs_no_key(bind: str) -> None:
    access.check_open(bind, "", allowed=False)


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.168.1.4", "::", "spark"])
def test_others_need_one(bind: str) -> None:
    with pytest.raises(access.AccessError):
        access.check_open(bind, "", allowed=False)
    access.check_open(bind, "key", allowed=False)
    access.check_open(bind, "", allowed=True)


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
