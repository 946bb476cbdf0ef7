"""What is damaged in the store, or is no store, or is another user's, is never shipped or run."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkforge.build import cached
from sparkforge.build.cached import undamaged
from sparkforge.build.image import trial_item
from sparkforge.core.errors import StoreError
from sparkforge.store.store import Store
from tests.project import PATCHED, Project
from tests.results import context_of

BUILD = ("build", "--target", "tiny", "--engine", "none", "--until", "wheels")


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    """Take the second half of a file away."""
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size // 2)


def stored(project: Project, stage: str, name: str) -> Path:
    (path,) = (project.store / "artefacts" / stage).glob(f"*/{name}")
    return path


# -- wheels, dist/ ------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_damaged_wheel_is_rebuilt(project: Project, damage: Callable[[Path], None]) -> None:
    project.build()
    before = project.wheel.read_bytes()
    damage(stored(project, "wheels", "*.whl"))
    out, _ = project.run(*BUILD, "--dry-run", "--json")
    plan = [step["state"] for step in json.loads(out)["plan"]]
    assert plan == ["in the store", "in the store", "to make"]
    states = [item["state"] for item in project.build()["run"]["items"].values()]
    assert states == ["in the store", "in the store", "made"]
    assert project.wheel.read_bytes() == before
    assert stored(project, "wheels", "*.whl").read_bytes() == before


def test_damaged_preflight_checkpoint_is_rebuilt(store: Store) -> None:
    item, context = trial_item(), context_of("spark", store=store)
    cached.run(context, [item])
    name = "preflight/model.safetensors"
    weights, sha256 = item.path / name, item.result.files[name]
    before = weights.read_bytes()
    flip(weights)
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        undamaged(weights, sha256)
    (planned,) = cached.plan(context, [item])
    assert planned.state == "to make"
    cached.run(context, [item])
    assert undamaged(weights, sha256).read_bytes() == before


@pytest.mark.parametrize("name", ["wheel", "sbom.cdx.json"])
def test_damaged_dist_is_published_again(project: Project, name: str) -> None:
    project.build()
    path = project.wheel if name == "wheel" else project.wheel.parent / name
    before = path.read_bytes()
    path.unlink()  # a copy of its own: the store's is whole
    path.write_bytes(before[:-1] + b"?")
    project.build()
    assert path.read_bytes() == before


# -- git -----------------------------------------------------------------------------------


def test_damaged_repository_is_an_error(project: Project) -> None:
    first = project.build()
    repo = project.store / "git" / "demo.git"
    for path in (repo / "objects").rglob("*"):
        if path.is_file():
            cut(path)
    for words in (("patches", "check"), BUILD):
        shutil.rmtree(project.store / "artefacts", ignore_errors=True)
        _, err = project.run(*words, code=12)
        assert f"if git calls it damaged, delete {repo}: " in err
    shutil.rmtree(repo)
    assert project.build()["items"] == first["items"]


# -- what is no store -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["thesis.tex", "git/myrepo/a"])
def test_used_folder_is_refused_as_store(project: Project, tmp_path: Path, name: str) -> None:
    kept = tmp_path / "Documents" / name
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    project.store = tmp_path / "Documents"
    before = sorted(project.store.rglob("*"))
    for words in (("clean",), ("clean", "--superseded"), BUILD):
        _, err = project.run(*words, code=11)
        assert "is not a sparkforge store, and contains " in err
    project.run(*BUILD, "--dry-run")
    assert sorted(project.store.rglob("*")) == before
    assert kept.read_text() == "precious"


# -- another user's -----------------------------------------------------------------------------


@pytest.fixture
def stranger() -> int:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's files")
    return 65534


def test_foreign_store_is_refused_unless_trusted(
    project: Project, tmp_path: Path, stranger: int
) -> None:
    project.build()
    canary = tmp_path / "canary"
    repo = project.store / "git" / "demo.git"
    subprocess.run(["git", "-C", repo, "config", "core.fsmonitor", f"touch {canary}"], check=True)
    for path in [project.store, *project.store.rglob("*")]:
        os.chown(path, stranger, stranger, follow_symlinks=False)
    for words in (BUILD, ("patches", "check"), ("clean",), (*BUILD, "--dry-run")):
        _, err = project.run(*words, code=11)
        assert f"git config --global --add safe.directory {project.store}" in err
    settings = tmp_path / "gitconfig"
    settings.write_text(f'[safe]\n\tdirectory = "{project.store}"\n\tdirectory = "{repo}"\n')
    trusts = str(settings)
    project.run("patches", "check", GIT_CONFIG_GLOBAL=trusts)
    shutil.rmtree(project.store / "artefacts")
    project.run(*BUILD, GIT_CONFIG_GLOBAL=trusts)
    assert not canary.exists()


PROGRAMS = {
    "core.fsmonitor": "fsmonitor",
    **{f"filter.evil.{name}": name for name in ("clean", "smudge", "process")},
    "alias.status": "alias",
    "gpg.program": "gpg",
    "diff.external": "diff",
}


def test_programs_of_a_work_tree_do_not_run(project: Project, tmp_path: Path) -> None:
    work, canary = tmp_path / "work", tmp_path / "canary"
    canary.mkdir()
    project.run("patches", "apply", "demo", str(work))
    script = work / "evil"
    script.write_text(f"#!/bin/sh\ntouch {canary}/$1\ncat\n")
    script.chmod(0o755)
    for key, name in PROGRAMS.items():
        value = f"!{script} {name}" if name == "alias" else f"{script} {name}"
        subprocess.run(["git", "-C", work, "config", key, value], check=True)
    for folder in ("info", "hooks"):
        (work / ".git" / folder).mkdir(exist_ok=True)
    (work / ".git" / "info" / "attributes").write_text("* filter=evil diff=evil\n")
    for name in ("pre-commit", "post-commit", "post-checkout", "reference-transaction"):
        hook = work / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {canary}/{name}\n")
        hook.chmod(0o755)
    (work / "demo" / "mod.py").write_bytes(PATCHED + b"more = 1\n")
    names = {f"core.hooksPath={os.devnull}", "core.fsmonitor=false"}
    names |= {"filter.evil.process=", "filter.evil.clean=", "user.name=Me", "user.email=me@x"}
    quiet = [word for name in names for word in ("-c", name)]
    subprocess.run(["git", *quiet, "add", "demo/mod.py"], cwd=work, check=True)
    assert list(canary.iterdir()) == []
    subprocess.run(["git", *quiet, "commit", "-qm", "Add a line"], cwd=work, check=True)
    os.utime(work / "demo" / "__init__.py")  # git reads it again
    project.run("patches", "export", str(work), code=6)  # the message has no trailers
    assert list(canary.iterdir()) == []


# -- credentials ------------------------------------------------------------------------


def test_credentials_are_not_printed(project: Project) -> None:
    # nothing answers at that address
    mirror = "demo=https://user:hun/ter2@127.0.0.1:9/v.git"
    out, err = project.run(*BUILD, "--mirror", mirror, "--json", "--verbose", code=4)
    assert "127.0.0.1:9/v.git" in json.loads(out)["error"]["what"]
    assert "ter2" not in out + err
    project.edit_pins(
        "git: https://127.0.0.1:9/demo.git", "git: https://u:hunter2@127.0.0.1:9/d.git"
    )
    out, err = project.run("pins", "check", "--json", code=3)
    assert "upstreams.demo.git" in err
    assert "hunter2" not in out + err
