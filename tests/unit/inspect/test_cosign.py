"""What cosign's exit codes and output mean, with programs in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkforge.core.errors import (
    RegistryError,
    SignError,
    SparkforgeError,
    StoreError,
    UsageError,
    VerifyError,
)
from sparkforge.inspect.verify import cosign
from sparkforge.inspect.verify.cosign import Signer, Trust

IMAGE = f"r.example.org/x@sha256:{'1' * 64}"
TRUST = Trust(key="env://PUBLIC")


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a program in cosign's place; its file is the shell script that the test writes."""
    program = tmp_path / "cosign"
    program.touch()
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("COSIGN_PASSWORD", raising=False)
    return program


def script(program: Path, said: str, code: int, public_key: int = 0) -> None:
    program.write_text(
        f"#!/bin/sh\n[ $1 != public-key ] || exit {public_key}\necho '{said}' >&2\nexit {code}\n"
    )


@pytest.mark.parametrize("code", [10, 11, 12, 13])
def test_an_exit_code_is_the_verdict_about_an_image(says: Path, code: int) -> None:
    # these words would be a registry's
    script(says, "no matching signatures: https://r.example.org/v2/: denied", code)
    with pytest.raises(VerifyError, match="no matching signatures") as error:
        cosign.check_image(IMAGE, TRUST)
    assert "trusted source" in error.value.remedy


@pytest.mark.parametrize(
    ("said", "kind", "hint"),
    [
        ("Get https://r.example.org/v2/: connection refused", RegistryError, "check name, network"),
        ("GET https://r.example.org/token: DENIED: no", RegistryError, "docker login r.example"),
        ("keys: Get https://log.example.com/1: no such host", VerifyError, "see cosign"),
        ("loading public key: PEM decoding failed", VerifyError, "see cosign"),
        ("open /keys/k: permission denied", VerifyError, "see cosign"),
        ("write f: No space left on device", StoreError, "free space"),
    ],
)
def test_without_a_verdict_neither_image_nor_signer_is_blamed(
    says: Path, said: str, kind: type[SparkforgeError], hint: str
) -> None:
    script(says, said, 1)
    with pytest.raises(kind) as error:
        cosign.check_image(IMAGE, TRUST)
    assert said in error.value.what
    assert hint in error.value.remedy


@pytest.mark.parametrize(
    ("signer", "public_key", "password", "hint"),
    [
        (Signer(key="a.key"), 0, None, "see cosign's output above"),
        (Signer(key="a.key"), 1, None, "set COSIGN_PASSWORD"),
        (Signer(key="a.key"), 1, "pw", "check the key and COSIGN_PASSWORD"),
        (Signer(), 0, None, "SIGSTORE_ID_TOKEN"),
    ],
)
def test_the_hint_of_a_failed_signature_follows_from_what_works(
    says: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signer: Signer,
    public_key: int,
    password: str | None,
    hint: str,
) -> None:
    if password is not None:
        monkeypatch.setenv("COSIGN_PASSWORD", password)
    script(says, "it failed for a reason of its own", 1, public_key)
    with pytest.raises(SignError, match="a reason of its own") as error:
        cosign.sign_image(IMAGE, tmp_path, signer)
    assert hint in error.value.remedy


def test_a_private_key_is_no_public_one(tmp_path: Path) -> None:
    key = tmp_path / "a.key"
    key.write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nx\n")
    with pytest.raises(UsageError, match="is no public key"):
        cosign.required(Trust(key=str(key)))
    key.write_text("-----BEGIN PUBLIC KEY-----\nx\n")
    assert cosign.required(Trust(key=str(key)))
