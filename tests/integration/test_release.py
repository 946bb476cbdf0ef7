"""`release` and `verify --key`, with a program in cosign's place."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from sparkforge.core.errors import CheckError, UsageError
from sparkforge.release.command import SIGNED
from tests.project import Project

CHANGELOG = "# Changelog\n\n## 1.0-spark.3 (2026-11-23)\n\n* A change.\n"
KEY = "cosign.pub"
RELEASE = ("release", "--target", "tiny")
# signs with the hash of a file, and accepts nothing else
COSIGN = """\
#!/bin/sh
command=$1
[ "$2" != --help ] || exit 0
while [ $# -gt 1 ]; do
    [ "$1" != --bundle ] || bundle=$2
    shift
done
found=$(sha256sum <"$1")
case $command in
sign-blob) echo "$found" >"$bundle" ;;
verify-blob) [ "$found" = "$(cat "$bundle")" ] || { echo "wrong signature" >&2; exit 1; } ;;
esac
"""


def commit(project: Project, message: str = "x") -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", message]):
        subprocess.run(["git", *identity, *words], cwd=project.root, check=True)


@pytest.fixture
def committed(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The small project as a clean checkout, built at its commit, with a cosign on the PATH."""
    program = tmp_path / "programs" / "cosign"
    program.parent.mkdir()
    program.write_text(COSIGN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (project.root.parent / KEY).write_text("a key\n")
    (project.root / "CHANGELOG.md").write_text(CHANGELOG)
    (project.root / "SECURITY.md").write_text("Write to us@example.org.\n")
    (project.root / ".gitignore").write_text("dist/\n.sparkforge/\n.env\n")
    commit(project)
    project.build()
    return project


def folder_of(project: Project) -> Path:
    return project.root / "dist" / "releases" / "1.0-spark.3" / "tiny"


def refused(project: Project, *words: str) -> str:
    return project.run(*RELEASE, *words, code=CheckError.exit_code)[1]


def test_a_release_is_signed_and_verified(committed: Project) -> None:
    out, _ = committed.run(*RELEASE, "--key", KEY, "--json")
    folder = folder_of(committed)
    assert json.loads(out)["folder"] == str(folder)
    names = {committed.wheel.name, *SIGNED, *(f"{name}.sigstore.json" for name in SIGNED)}
    assert {path.name for path in folder.iterdir()} == names
    out, _ = committed.run("verify", str(folder), "--key", KEY, "--json")
    assert set(json.loads(out)["signed"]) == {committed.wheel.name, *SIGNED}
    committed.run(*RELEASE)  # without a key
    _, err = committed.run("verify", str(folder), "--key", KEY, code=CheckError.exit_code)
    assert "receipt.json: " in err


@pytest.mark.parametrize("name", ["receipt.json", "demo-1.0+spark.3-py3-none-any.whl", "more"])
def test_a_changed_or_added_file_is_not_verified(committed: Project, name: str) -> None:
    committed.run(*RELEASE, "--key", KEY)
    path = folder_of(committed) / name
    data = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    path.write_bytes(data + b" ")
    _, err = committed.run("verify", str(path.parent), "--key", KEY, code=CheckError.exit_code)
    assert f"{name}: " in err


def test_an_unfinished_checkout_is_not_released(committed: Project) -> None:
    left = committed.root / "left.txt"
    left.write_text("")
    assert "not committed" in refused(committed)
    left.unlink()
    (committed.root / "CHANGELOG.md").write_text(CHANGELOG.replace("2026-11-23", "unreleased"))
    (committed.root / "SECURITY.md").write_text("Write to `security@example.invalid`, or\n")
    commit(committed)
    assert "CHANGELOG.md" in (problems := refused(committed))
    assert "SECURITY.md has no address" in problems  # until whoever publishes writes one
    (committed.root / "CHANGELOG.md").write_text(CHANGELOG)
    (committed.root / "SECURITY.md").write_text("Write to us@example.org.\n")
    commit(committed, "not an input of the build")
    committed.run(*RELEASE)
    subprocess.run(["git", "tag", "v1.0-spark.3", "HEAD~1"], cwd=committed.root, check=True)
    assert "tag v1.0-spark.3" in refused(committed)


def test_a_build_of_other_inputs_is_not_released(committed: Project) -> None:
    (committed.root / "Dockerfile").write_text("# another\n")
    assert "not committed" in refused(committed)
    commit(committed)
    assert "whose inputs differ" in refused(committed)


def test_a_damaged_or_missing_build_is_not_released(committed: Project) -> None:
    dist = committed.root / "dist" / "tiny"
    assert "no image" in refused(committed, "--key", KEY, "--push", "127.0.0.1:9/xy")
    (dist / "sbom.cdx.json").write_text("{}")
    assert "sbom.cdx.json: " in refused(committed)
    (dist / "receipt.json").write_text('{"items": 3}')
    assert "no build of tiny" in refused(committed)


@pytest.mark.parametrize(
    "words",
    [
        (*RELEASE, "--push", "127.0.0.1:9/xy"),
        (*RELEASE, "--key", "none.key"),
        (*RELEASE, "--key", "-----BEGIN KEY-----\nx"),
        (*RELEASE, "--key", KEY, "--push", "https://127.0.0.1:9/xy"),
        ("verify", "--key", KEY),
        ("verify", ".", "--key", KEY),
    ],
)
def test_conflicting_options(committed: Project, words: tuple[str, ...]) -> None:
    committed.run(*words, code=UsageError.exit_code)
