"""scripts/release.sh, with programs in the places of build.py, docker and gh."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

NAME = f"registry.example.org/me/fork@sha256:{'1' * 64}"
_BUILD = """\
import json, os, sys
with open("calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
print(os.environ["DOCUMENT"])
"""
# `image inspect` has the name by digest before a push, too
_DOCKER = f"""\
#!/bin/sh
case "$1 $2" in
  "image inspect") echo "{NAME}" ;;
  "$FAILS "*) exit 1 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository without tags, in which build.py notes its calls."""
    folder, programs = tmp_path / "checkout", tmp_path / "programs"
    for one in (folder, programs):
        one.mkdir()
    (folder / "build.py").write_text(_BUILD)
    (programs / "docker").write_text(_DOCKER)
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "x"]):
        subprocess.run(["git", *identity, *words], cwd=folder, check=True)
    return folder


def release(checkout: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "release.sh", "--key", "cosign.key", *words]
    env = {**os.environ, **env}
    return subprocess.run(
        command, cwd=checkout, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("fails", ["none", "build", "push"])
def test_a_job_names_no_files_that_were_not_pushed(checkout: Path, fails: str) -> None:
    document = json.dumps({"release": "1-spark.1", "folder": ".", "image": NAME})
    done = release(checkout, "join", NAME, DOCUMENT=document, FAILS=fails)
    pushed = fails == "none"
    assert (done.returncode == 0) is pushed, done.stderr
    assert (f"serve-files={NAME}\n" in done.stdout) is pushed


def test_a_tag_of_another_release_builds_nothing(checkout: Path) -> None:
    document = json.dumps({"releases": {"cpu": "1-spark.1"}})
    done = release(checkout, "image", "cpu", "registry.example.org/me/fork", DOCUMENT=document)
    assert done.returncode == 1 and "no tag v1-spark.1 here" in done.stderr
    assert (checkout / "calls").read_text() == "--version --json\n"
