"""Signatures by the real cosign, of files and of an image in a real registry on loopback.

scripts/engine.sh brings both programs along.
"""

import json
import subprocess
from pathlib import Path

import pytest

from sparkforge.core.errors import CheckError
from sparkforge.release import command as signing
from sparkforge.release.command import SIGNED
from tests.project import Project, new_project
from tests.support import Server

from ..conftest import PASSWORD


@pytest.fixture
def dist(isolated: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The published files of a small project; blanks in its path."""
    monkeypatch.setenv("PIP_INDEX_URL", server.url("/simple/"))
    monkeypatch.setenv("COSIGN_PASSWORD", PASSWORD)
    folder = tmp_path / "a project"
    folder.mkdir()
    project: Project = new_project(folder, server)
    project.build()
    files = project.root / "dist" / "tiny"
    (files / ".lock").unlink(missing_ok=True)  # no release has it
    return files


def signer(keys: Path) -> str:
    return str(keys / "cosign.key")


def trust(keys: Path) -> str:
    return str(keys / "cosign.pub")


def test_signed_files_are_verified_with_the_public_key(dist: Path, keys: Path) -> None:
    signing.sign_folder(dist, signer(keys))
    for name in SIGNED:
        bundle = json.loads((dist / f"{name}.sigstore.json").read_text())
        assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert len(signing.check_folder(dist, trust(keys))) == len(SIGNED) + 1
    for name in SIGNED:
        path = dist / name
        path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CheckError) as error:
        signing.check_folder(dist, trust(keys))
    assert all(f"{name}: " in error.value.what for name in SIGNED)


def test_no_signature_another_key_and_a_wrong_password_are_refused(
    dist: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckError, match=r"receipt\.json: "):
        signing.check_folder(dist, trust(keys))
    signing.sign_folder(dist, signer(keys / "other"))
    with pytest.raises(CheckError, match=r"receipt\.json: "):
        signing.check_folder(dist, trust(keys))
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    with pytest.raises(CheckError):
        signing.sign_folder(dist, signer(keys))


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


def test_a_signed_image_is_verified_and_others_are_refused(
    dist: Path, keys: Path, registry: str, tmp_path: Path
) -> None:
    ours = pushed(registry, tmp_path / "one", "ours")
    others = pushed(registry, tmp_path / "two", "others")
    signing.sign_image(ours, dist, signer(keys))
    signing.check_image(ours, trust(keys))
    for image, whose in ((others, keys), (ours, keys / "other")):
        with pytest.raises(CheckError):
            signing.check_image(image, trust(whose))
