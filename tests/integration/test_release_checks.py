"""The section of a changelog, and the checks of a checkout before a release."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.build.results import ImageResult
from sparkforge.cli import release
from sparkforge.core.errors import RegistryError, StaleError
from sparkforge.inspect.verify import signing
from sparkforge.inspect.verify.cosign import Signer
from sparkforge.pins import pins
from sparkforge.release import checks, collect, notes
from sparkforge.release.checks import Candidate
from sparkforge.runtime.registry import Reference
from tests.project import Project
from tests.support import ROOT

CHANGELOG = """\
# Changelog

## 1.0-spark.3 (2026-11-23)

* A change.

## 1.0-spark.2 (2026-11-01)

* An older one.
"""


def test_a_section_ends_where_the_next_begins() -> None:
    first, second = notes.sections(CHANGELOG)
    assert (first.version, first.date, first.text) == ("1.0-spark.3", "2026-11-23", "* A change.")
    assert second.text == "* An older one."


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def candidate(project: Project) -> Candidate:
    """The small project as a clean checkout, built at its commit."""
    root = project.root
    (root / notes.NAME).write_text(CHANGELOG)
    (root / ".gitignore").write_text("dist/\n.sparkforge/\n.env\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all")
    project.build()
    path = root / "pins.yaml"
    return Candidate(root, path, pins.load(path), "tiny", lambda: None, lambda: "page")


def failed(one: Candidate) -> Mapping[str, str]:
    """Return what each failed check says; each has a hint."""
    found = [row for row in checks.check(one) if not row.ok]
    assert all(row.hint for row in found)
    return {row.name: row.said for row in found}


def commit(one: Candidate, message: str) -> None:
    git(one.root, "add", ".")
    git(one.root, "commit", "--quiet", "--message", message)


def test_a_clean_checkout_and_build_pass(candidate: Candidate) -> None:
    assert failed(candidate) == {}
    assert candidate.tag == "v1.0-spark.3"
    left = candidate.root / "left.txt"
    left.write_text("")
    assert failed(candidate) == {"checkout": "not committed: left.txt"}
    left.unlink()
    for old, new, said in (
        ("2026-11-23", "unreleased", "has no date"),
        ("2026-11-23", "2026-13-01", "has no date"),
        ("spark.3", "spark.4", "has no section 1.0-spark.3"),
        ("* A change.", "", "is empty"),
        ("## 1.0-spark.3", "## 1.0-spark.9 (2026-11-24)\n\n* x\n\n## 1.0-spark.3", "is above"),
    ):
        (candidate.root / notes.NAME).write_text(CHANGELOG.replace(old, new, 1))
        commit(candidate, said)
        assert list(failed(candidate)) == ["changelog"]
        assert said in failed(candidate)["changelog"]


def test_a_build_of_another_commit(candidate: Candidate, project: Project) -> None:
    git(candidate.root, "branch", candidate.tag)  # no tag
    assert any("git tag " in step for step in release.next_steps(candidate, None, signed=True))
    git(candidate.root, "tag", candidate.tag)
    assert failed(candidate) == {}
    assert not any("git tag " in step for step in release.next_steps(candidate, None, signed=True))
    (candidate.root / "README.md").write_text("more\n")
    commit(candidate, "no input of the build")
    assert list(failed(candidate)) == ["version"]
    git(candidate.root, "tag", "--delete", candidate.tag)
    (candidate.root / "Dockerfile").write_text("# another\n")
    commit(candidate, "an input")
    assert "files of the build differ" in failed(candidate)["provenance"]
    (candidate.root / "left.txt").write_text("")
    (candidate.folder / "receipt.json").unlink()
    project.build()
    (candidate.root / "left.txt").unlink()
    assert "not committed" in failed(candidate)["provenance"]
    project.edit_pins("a small target", "another small target")
    commit(candidate, "pins")
    assert failed(candidate)["build"] == "pins.yaml has changed since the build"


def test_what_is_damaged_missing_or_stale(candidate: Candidate) -> None:
    def stale() -> None:
        raise StaleError("out of date: docs/patches.md", "update it: build.py docs")

    assert "docs/patches.md" in failed(replace(candidate, pages=stale))["pages"]
    bill = candidate.folder / "sbom.cdx.json"
    bill.write_bytes(bill.read_bytes() + b" ")
    assert failed(candidate) == {"build": "sbom.cdx.json: differs from SHA256SUMS"}
    (candidate.folder / "provenance.intoto.json").write_text(json.dumps({"predicate": []}))
    assert "names no commit" in failed(candidate)["provenance"]
    (candidate.folder / "receipt.json").write_text("{}")
    assert failed(candidate) == {"build": "no build of tiny"}
    (candidate.root / ".git").rename(candidate.root / "no-git")
    assert "no git repository" in failed(candidate)["checkout"]


def test_dry_run_writes_nothing(candidate: Candidate, project: Project) -> None:
    """The small project has no generated pages, so it is never ready."""
    before = sorted(project.root.rglob("*"))
    out, err = project.run("release", "--target", "tiny", "--dry-run", "--json", code=29)
    document = json.loads(out)
    assert (document["release"], document["tag"]) == ("1.0-spark.3", "v1.0-spark.3")
    assert {row["name"] for row in document["checks"] if not row["ok"]} == {"pages"}
    assert "1.0-spark.3 is not ready for a release" in err
    assert sorted(project.root.rglob("*")) == before


WORDS = (
    (("--push", "127.0.0.1:9/xy"), 2, "an image without a signature cannot be verified"),
    (("--keyless", "--key", str(ROOT / "LICENSE")), 2, "--keyless and --key conflict"),
    (("--no-log",), 2, "add --key"),
    (("--key", "none.key"), 2, "no such file"),
    (("--keyless", "--push", "https://127.0.0.1:9/xy"), 2, "without a scheme"),
    (("--keyless", "--push", "127.0.0.1:9/xy"), 29, "the last build of tiny has no image"),
)


def test_words_that_make_no_sense(project: Project) -> None:
    for words, code, said in WORDS:
        _, err = project.run("release", "--target", "tiny", *words, code=code)
        assert said in err
    _, err = project.run("release", "--target", "tniy", code=2)
    assert "tniy" in err


def test_the_folder_of_a_release_is_whole_and_replaced(candidate: Candidate) -> None:
    folder = made(candidate)
    assert sorted(path.name for path in folder.iterdir()) == collect.names(candidate)
    assert signing.sums(folder) == []
    (folder / "NOTES.md").write_text("other\n")
    (folder / "report.html").unlink()
    assert signing.sums(folder) == [
        "NOTES.md: differs from release.json",
        "report.html: missing, but release.json lists it",
    ]
    assert signing.sums(made(candidate)) == []


DIGEST = f"sha256:{'1' * 64}"
PUSHED = Reference("r.example.org/x", DIGEST)
COSIGN = """\
#!/bin/sh
echo "$@" >>"$0.log"
while [ $# -gt 1 ]; do
    [ "$1" != --bundle ] || echo "$3" >"$2"
    shift
done
"""


@pytest.fixture
def cosign(candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that signs everything and notes its words; the last build has an image."""
    program = tmp_path / "programs" / "cosign"
    program.parent.mkdir()
    program.write_text(COSIGN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    built = ImageResult("x:1", "sha256:2", DIGEST, "base", ())
    monkeypatch.setattr(collect, "built_image", lambda one: built)
    return program


def made(one: Candidate, image: Reference | None = None, *, key: str | None = None) -> Path:
    """Make the release; returns its folder."""
    signer = None if key is None else Signer(key=key, no_log=True)
    return release._made(one, signer, image).folder


def image_in(folder: Path) -> object:
    return json.loads((folder / "release.json").read_text())["image"]["reference"]


def test_a_release_names_its_image_once_that_is_pushed(
    candidate: Candidate, cosign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise RegistryError("cannot be reached", "run this again")

    before = made(candidate, key="first.key")
    assert image_in(before) is None
    monkeypatch.setattr(release, "_pushed", down)
    with pytest.raises(RegistryError):
        made(candidate, PUSHED, key="second.key")
    assert image_in(before) is None  # as it was, and nothing beside it
    assert collect.signatures(before) == list(signing.SIGNED)
    assert list(before.parent.iterdir()) == [before]
    monkeypatch.setattr(release, "_pushed", lambda *_: None)
    assert image_in(made(candidate, PUSHED, key="second.key")) == str(PUSHED)
    last = Path(f"{cosign}.log").read_text().splitlines()[-1]
    assert last.startswith("sign-blob ") and last.endswith("/release.json")
    assert signing.sums(before) == []


def test_a_run_without_key_keeps_signatures_and_the_image(
    candidate: Candidate, cosign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "_pushed", lambda *_: None)
    folder = made(candidate, PUSHED, key="cosign.key")
    again = release._made(candidate, None, None)
    assert (again.signed, again.image) == (list(signing.SIGNED), str(PUSHED))
    other = replace(candidate, page=lambda: "another page")
    again = release._made(other, None, None)
    assert (again.signed, again.image) == ([], str(PUSHED))  # they would be of other files
    assert signing.sums(folder) == []
    rebuilt = ImageResult("x:2", "sha256:3", f"sha256:{'4' * 64}", "base", ())
    monkeypatch.setattr(collect, "built_image", lambda one: rebuilt)
    assert image_in(made(candidate)) is None
