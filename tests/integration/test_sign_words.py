"""sign and verify --key where there is no cosign, and words that make no sense together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.project import Project

KEY = "cosign.pub"


@pytest.fixture(autouse=True)
def key(project: Project) -> None:
    """A file that looks like a key, where the commands run."""
    (project.root.parent / KEY).write_text("-----BEGIN PUBLIC KEY-----\n")


@pytest.fixture
def no_cosign(tmp_path: Path) -> str:
    """A PATH with git and nothing else of use."""
    folder = tmp_path / "few"
    folder.mkdir()
    for place in os.environ["PATH"].split(":"):
        if (Path(place) / "git").exists():
            (folder / "git").symlink_to(Path(place) / "git")
            break
    return str(folder)


def test_without_cosign_one_clear_error(project: Project, no_cosign: str) -> None:
    project.build()
    folder = project.root / "dist" / "tiny"
    _, err = project.run("sign", "--target", "tiny", "--key", KEY, code=9, PATH=no_cosign)
    assert "apt-get install cosign" in err
    for name in ("receipt.json", "SHA256SUMS", "sbom.cdx.json", "provenance.intoto.json"):
        (folder / f"{name}.sigstore.json").write_text("{}")
    _, err = project.run("verify", str(folder), "--key", KEY, code=9, PATH=no_cosign)
    assert "apt-get install cosign" in err


def test_nothing_is_signed_that_was_not_built(project: Project) -> None:
    _, err = project.run("sign", "--target", "tiny", "--key", KEY, code=9)
    assert "nothing to sign" in err
    project.build()
    (project.root / "dist" / "tiny" / "SHA256SUMS").write_text("")
    _, err = project.run("sign", "--target", "tiny", "--key", KEY, code=9)
    assert "do not list the same files" in err


@pytest.mark.parametrize(
    "text",
    [
        '{"items": 3}',
        '{"items": [3]}',
        '{"items": [{"stage": "image"}]}',
        '{"items": [{"stage": "image", "inputs": {}, "outputs": {"kind": "image", "base": 3}}]}',
    ],
)
def test_a_receipt_of_another_shape_is_none(project: Project, text: str) -> None:
    project.build()
    (project.root / "dist" / "tiny" / "receipt.json").write_text(text)
    project.run("explain", "--target", "tiny")  # means what was built last, where that is known
    image = f"r/x@sha256:{'0' * 64}"
    _, err = project.run("sign", "--target", "tiny", "--key", KEY, "--image", image, code=9)
    assert "is not a receipt" in err
    receipt = project.build()
    assert receipt["items"]


WORDS = (
    (("sign", "--target", "tiny", "--key", "-----BEGIN KEY-----\nx"), "is the key itself"),
    (("sign", "--target", "tiny", "--no-log"), "add --key"),
    (("sign", "--target", "tiny", "--key", "none.key"), "no such file"),
    (("sign", "--target", "tiny", "--key", KEY, "--image", "r/x:1"), "REPOSITORY@sha256"),
    (("verify", ".", "--identity", "me"), "need each other"),
    (("verify", ".", "--key", KEY, "--issuer", "u"), "conflict"),
    (("verify", "--key", KEY), "nothing to verify"),
    (("verify", "x.tar", "--key", KEY), "next to a receipt.json"),
    (("verify", ".", "--key", KEY), "has no receipt.json"),
)


def test_words_that_make_no_sense(project: Project) -> None:
    project.build()
    for words, said in WORDS:
        _, err = project.run(*words, code=2)
        assert said in err
