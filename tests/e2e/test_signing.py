"""sign, and verify's --key, with the real cosign and a real registry, both on this machine alone.

scripts/engine.sh brings both programs along. Keyless signing needs a public service that vouches
for an identity; of it only the words that cosign gets are looked at.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sparkforge.build.results import ImageResult
from sparkforge.core import typed
from tests.project import Project, new_project
from tests.support import Server

from .conftest import PASSWORD

SIGNED = ("receipt.json", "SHA256SUMS", "sbom.cdx.json", "provenance.intoto.json")


@pytest.fixture
def built(
    isolated: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> Project:
    """A small project with a published wheel; blanks in its path."""
    monkeypatch.setenv("PIP_INDEX_URL", server.url("/simple/"))
    folder = tmp_path / "a project"
    folder.mkdir()
    project = new_project(folder, server)
    project.build()
    return project


def sign(project: Project, keys: Path, *words: str, code: int = 0, password: str = PASSWORD) -> str:
    key = ("--key", str(keys / "cosign.key"), "--no-log")
    out, err = project.run(
        "sign", "--target", "tiny", *key, *words, code=code, COSIGN_PASSWORD=password
    )
    assert PASSWORD not in out + err
    return out + err


def verify(project: Project, keys: Path, *words: str, code: int = 0) -> str:
    named = words or (str(project.root / "dist" / "tiny"),)
    out, err = project.run("verify", *named, "--key", str(keys / "cosign.pub"), code=code)
    return out + err


def test_what_is_signed_is_verified_with_the_public_key(built: Project, keys: Path) -> None:
    said = sign(built, keys, "-v")
    assert "cosign sign-blob" in said  # every command is echoed, and PASSWORD is in none
    folder = built.root / "dist" / "tiny"
    assert {p.name for p in folder.glob("*.sigstore.json")} == {
        f"{n}.sigstore.json" for n in SIGNED
    }
    for name in SIGNED:
        bundle = json.loads((folder / f"{name}.sigstore.json").read_text())
        assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert f"{len(SIGNED) + 1} files" in verify(built, keys)
    # the folder may be anywhere: who gets it has no store
    moved = folder.rename(built.root.parent / "got it")
    assert f"{len(SIGNED) + 1} files" in verify(built, keys, str(moved))


def test_a_changed_file_is_named(built: Project, keys: Path) -> None:
    sign(built, keys)
    for name in SIGNED:
        path = built.root / "dist" / "tiny" / name
        path.write_bytes(path.read_bytes() + b" ")
    said = verify(built, keys, code=9)
    for name in SIGNED:
        assert f"  | {name}: " in said


def test_a_changed_wheel_and_one_more_are_named(built: Project, keys: Path) -> None:
    sign(built, keys)
    wheel = built.wheel
    data = wheel.read_bytes()
    (wheel.parent / "other-1-py3-none-any.whl").write_bytes(b"")
    wheel.unlink()  # it is linked to the store's
    wheel.write_bytes(data[:-1] + b"x")
    said = verify(built, keys, code=9)
    assert f"{wheel.name}: differs from SHA256SUMS" in said
    assert "other-1-py3-none-any.whl: not in SHA256SUMS" in said


def test_another_key_and_no_signature_do_not_count(built: Project, keys: Path) -> None:
    assert "receipt.json: not signed" in verify(built, keys, code=9)
    sign(built, keys / "other")
    assert "receipt.json: " in verify(built, keys, code=9)
    assert "5 files" in verify(built, keys / "other")


def test_a_new_build_drops_the_signatures_of_the_old(built: Project, keys: Path) -> None:
    sign(built, keys)
    built.patch({"demo/mod.py": b"y = 2\n"})
    built.edit_pins("counter: 3", "counter: 4")
    built.build()
    assert not list((built.root / "dist" / "tiny").glob("*.sigstore.json"))
    assert "not signed" in verify(built, keys, code=9)


def test_a_wrong_password_or_key_is_one_clear_error(built: Project, keys: Path) -> None:
    assert "check the key and COSIGN_PASSWORD" in sign(built, keys, code=9, password="wrong")
    assert "no such file" in sign(built, keys / "none", code=2)
    assert not list((built.root / "dist" / "tiny").glob("*sigstore.json*"))
    sign(built, keys)
    assert "no such file" in verify(built, keys / "none", code=2)


def pushed(registry: str, folder: Path, content: str) -> str:
    """Push an image of one file; returns its reference with the digest."""
    folder.mkdir()
    (folder / "file").write_text(content)
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY file /\n")
    tag = f"{registry}/sparkforge/tiny:{content}"
    for words in (
        ("buildx", "build", "--builder", "default", "--provenance=false", "--load", "-t", tag, "."),
        ("push", tag),
    ):
        subprocess.run(["docker", *words], cwd=folder, check=True, capture_output=True)
    look = ["docker", "image", "inspect", tag, "--format", "{{json .RepoDigests}}"]
    names = json.loads(subprocess.run(look, check=True, capture_output=True).stdout)
    # an engine that ran this test before knows the same image from another registry
    (found,) = (name for name in names if name.startswith(f"{registry}/"))
    subprocess.run(["docker", "rmi", tag], check=True, capture_output=True)
    return str(found)


def test_an_image_is_signed_where_it_was_pushed(
    built: Project, keys: Path, registry: str, tmp_path: Path
) -> None:
    ours = pushed(registry, tmp_path / "one", "ours")
    others = pushed(registry, tmp_path / "two", "others")
    receipt = built.root / "dist" / "tiny" / "receipt.json"
    document = json.loads(receipt.read_text())
    digest = ours.partition("@")[2]
    outputs = typed.as_json(ImageResult("ours:1", "sha256:1", digest, "base", ()))
    item = {"stage": "image", "label": "image", "key": "0", "inputs": {}, "outputs": outputs}
    document["items"].append(item)
    receipt.write_text(json.dumps(document))
    assert "is not the built image" in sign(built, keys, "--image", others, code=9)
    tag = ours.partition("@")[0]
    assert "a tag can change" in sign(built, keys, "--image", tag, code=2)
    sign(built, keys, "--image", ours)
    public = ["--key", str(keys / "cosign.pub"), "--insecure-ignore-tlog"]
    for words in (
        ["verify"],
        ["verify-attestation", "--type", "cyclonedx"],
        ["verify-attestation", "--type", "slsaprovenance1"],
    ):
        subprocess.run(["cosign", *words, *public, ours], check=True, capture_output=True)
    said = verify(built, keys, others, code=9)
    assert f"{others}: " in said
    # signed, then read out of the engine, which does not hold it: another error
    assert f"signed: {ours}" in verify(built, keys, ours, code=7)
