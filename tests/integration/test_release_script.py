"""scripts/release.sh, with programs in the places of build.py, docker and gh."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.forge import stand_in
from tests.support import ROOT

NAME = f"registry.example.org/me/fork@sha256:{'1' * 64}"
_BUILD = """\
import json, os, sys
with open("calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
print(os.environ["DOCUMENT"])
"""
# `image inspect` has the name by digest before a push, too; a container is named as its image
_DOCKER = f"""\
#!/bin/sh
case "$1 $2" in
  "image inspect") echo "{NAME}" ;;
  "create "*) echo "$2" ;;
  "cp --quiet") cp -r "$FORGE/${{3%%:*}}/." "$4" ;;
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
    stand_in(programs)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "x"]):
        subprocess.run(["git", *identity, *words], cwd=folder, check=True)
    return folder


def release(checkout: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "release.sh"), "--key", "cosign.key", *words],
        cwd=checkout,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
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


@pytest.fixture
def forge(checkout: Path, tmp_path: Path) -> Path:
    """A repository whose README waits for a release, and the files of two targets."""
    folder, source = tmp_path / "forge", tmp_path / "source"
    source.mkdir()
    (source / "README.md").write_text("Build it: <!-- release -->\n")
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "x"]):
        subprocess.run(["git", *identity, *words], cwd=source, check=True)
    subprocess.run(["git", "clone", "--quiet", "--bare", source, folder / "bare"], check=True)
    for path, text in (
        ("serve/compose.yaml", "a"),
        ("serve/.env.example", "b"),
        *((f"{one}/{name}", name) for one in ("cpu", "rtx") for name in ("receipt.json", "a.whl")),
    ):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (checkout / "CHANGELOG.md").write_text("## 1-spark.1 (2026-11-29)\n\n* all\n")
    return folder


def publish(checkout: Path, forge: Path, day: int = 29) -> subprocess.CompletedProcess[str]:
    env = {
        "FORGE": str(forge),
        "GITHUB_REF_NAME": "v1-spark.1",
        "GITHUB_REPOSITORY": "me/fork",
        "GITHUB_SERVER_URL": "https://forge.example.org",
        "GIT_COMMITTER_DATE": f"2026-11-{day}T00:00:00Z",
        "FAILS": "none",
    }
    return release(checkout, "publish", NAME, "serve=serve", "cpu=cpu", "rtx=rtx", **env)


def test_a_job_that_may_open_no_pull_request_runs_again(checkout: Path, forge: Path) -> None:
    (forge / "refuses").touch()
    assert publish(checkout, forge).returncode == 1
    (forge / "refuses").unlink()
    done = publish(checkout, forge, 30)
    assert done.returncode == 0, done.stderr
    assets = {one.name for one in (forge / "assets").iterdir()}
    assert assets == {"compose.yaml", "env.example", "a.whl", "cpu.tar", "rtx.tar"}
    show = ["git", "show", "release-v1-spark.1:README.md"]
    readme = subprocess.run(show, cwd=forge / "bare", capture_output=True, check=True).stdout
    assert f"`{NAME}` <!-- release -->".encode() in readme


def test_two_wheels_of_one_name_are_equal(checkout: Path, forge: Path) -> None:
    (forge / "rtx" / "a.whl").write_text("of another compiler")
    done = publish(checkout, forge)
    assert done.returncode == 1 and "rtx: a.whl differs" in done.stderr
    assert not (forge / "assets").exists()
