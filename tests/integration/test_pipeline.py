"""Whole builds of a small project through the command line, each in a process of its own."""

import json
import os
import random
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.receipt import SBOM
from sparkforge.core.log import human_bytes
from sparkforge.store.store import Store
from tests.project import FILES, PATCH, PATCHED, Project, slow_down
from tests.support import PATIENCE_S, alive, sha256, wait_for

BUILD = ("build", "--target", "tiny", "--engine", "none", "--until", "wheels")
SDIST, WHEEL = "/files/demo-1.0.tar.gz", "/files/demo-1.0-py3-none-any.whl"


def states(receipt: Any) -> dict[str, str]:
    return {label: item["state"] for label, item in receipt["run"]["items"].items()}


def snapshot(folder: Path) -> Mapping[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in folder.rglob("*")}


def member(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def _name(line: str) -> str:
    return line.partition("  ")[2]


def check_result(project: Project) -> None:
    """Hold dist/ against what the project promises, and the store against leftovers."""
    assert project.wheel.name == "demo-1.0+spark.3-py3-none-any.whl"
    assert member(project.wheel, "demo/mod.py") == PATCHED
    assert member(project.wheel, "demo/__init__.py") == FILES["demo/__init__.py"]
    published = [project.wheel.name, SBOM]
    sums = [f"{sha256((project.wheel.parent / name).read_bytes())}  {name}\n" for name in published]
    assert (project.wheel.parent / "SHA256SUMS").read_text() == "".join(sorted(sums, key=_name))
    assert list((project.store / "tmp").iterdir()) == []
    assert list((project.store / "partial").iterdir()) == []


def test_a_second_build_makes_nothing_and_asks_nobody(project: Project) -> None:
    first = project.build()
    check_result(project)
    assert states(first) == dict.fromkeys(["source demo", "series demo", "wheel demo"], "made")
    assert json.loads((project.root / "dist" / "tiny" / "receipt.json").read_text()) == first
    outputs = {item["label"]: item["outputs"] for item in first["items"]}
    assert outputs["series demo"]["touched"] == {"demo/mod.py": PATCH}
    assert outputs["wheel demo"]["sha256"] == sha256(project.wheel.read_bytes())
    assert set(project.requests()) == {"/simple/demo/", SDIST, WHEEL}
    before = snapshot(project.root / "dist"), snapshot(project.store / "artefacts")
    second = project.build()
    assert set(states(second).values()) == {"in the store"}
    assert {**first, "run": second["run"]} == second
    assert (snapshot(project.root / "dist"), snapshot(project.store / "artefacts")) == before
    assert project.requests() == []


def test_a_second_build_starts_and_imports_no_more_than_it_needs(project: Project) -> None:
    project.build()
    out, err = project.run(*BUILD, "--verbose", PYTHONPROFILEIMPORTTIME="1")
    started = [line for line in (out + err).splitlines() if line.strip().startswith("+ ")]
    # git finds the source's commit, and the series'; it may be asked whom the user trusts
    started = [line for line in started if " config " not in line]
    assert len(started) == 2, started
    assert all(" cat-file " in line for line in started)
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert {"sparkforge.build.cached", "sparkforge.build.stages.thirdparty", "yaml"} <= imported
    slow = "docker git jinja2 requests urllib3 unearth numpy filelock rich cyclonedx uv"
    assert imported & {*slow.split(), "packaging.markers"} == set()


def test_a_dry_run_makes_nothing_and_asks_nobody(project: Project) -> None:
    before = snapshot(project.root)
    out, _ = project.run(*BUILD, "--dry-run", "--json")
    plan = json.loads(out)["plan"]
    assert [step["label"] for step in plan] == ["source demo", "series demo", "wheel demo"]
    sizes = [len(project.server.pages[page].body) for page in (SDIST, WHEEL)]
    assert [step["download"] for step in plan] == [sizes[0], 0, sizes[1]]
    for step in plan:
        assert (step["state"], step["why"]) == ("to make", ["never built for this target"])
    out, _ = project.run(*BUILD, "--dry-run")
    assert f"fetches {human_bytes(sizes[1])}" in out
    assert not project.store.exists()
    assert snapshot(project.root) == before
    assert project.requests() == []


def test_explain_names_the_input_that_changed(project: Project) -> None:
    def explained() -> dict[str, Any]:
        out, _ = project.run("explain", "--target", "tiny", "--engine", "none", "--json")
        return {step["label"]: step for step in json.loads(out)["plan"]}

    project.build()
    old = sha256((project.patches / PATCH).read_bytes())
    project.patch({"demo/mod.py": PATCHED + b"more = 1\n"})
    new = sha256((project.patches / PATCH).read_bytes())
    steps = explained()
    assert steps["source demo"]["state"] == "in the store"
    assert steps["series demo"]["state"] == "to make"
    line = f"patches.{PATCH}: {old[:20]}…{old[-12:]} → {new[:20]}…{new[-12:]}"
    assert line in steps["series demo"]["why"]
    assert any(line.startswith("series.demo: ") for line in steps["wheel demo"]["why"])
    project.build()
    assert explained()["wheel demo"]["state"] == "in the store"


def test_an_empty_series_gives_the_release_wheel_itself(project: Project) -> None:
    shutil.rmtree(project.patches)
    receipt = project.build()
    assert list(states(receipt)) == ["wheel demo"]
    assert project.wheel.name == "demo-1.0-py3-none-any.whl"
    assert project.wheel.read_bytes() == project.server.pages[WHEEL].body


def test_an_emptied_series_is_refused_where_a_patched_tree_is_recorded(project: Project) -> None:
    project.run("pins", "record")
    project.build()
    shutil.rmtree(project.patches)
    for words in (BUILD, ("patches", "check")):
        project.run(*words, code=5)


def test_offline_works_once_the_store_has_all(project: Project) -> None:
    project.run(*BUILD, "--offline", code=4)
    project.build()
    project.requests()
    shutil.rmtree(project.store / "artefacts")
    shutil.rmtree(project.store / "git")
    project.build("--offline")
    check_result(project)
    assert project.requests() == []


# -- what stops a build, and with which exit code -------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda p: setattr(p.server.pages[SDIST], "body", b"other"), 5, "demo-1.0.tar.gz: sha256"),
        (lambda p: p.server.pages.pop(SDIST), 4, "404"),
        (lambda p: p.edit_pins("tag: v1.0", "tag: main"), 3, "pins.yaml:6: upstreams.demo.tag"),
        (lambda p: p.patch({"csrc/kernel.cu": b"//\n"}, "Kernel"), 7, "kernel.patch: csrc/kern"),
        (lambda p: p.store.write_text(""), 11, "/store: "),
    ],
)
def test_what_is_wrong_stops_the_build(
    project: Project, spoil: Callable[[Project], Any], code: int, words: str
) -> None:
    spoil(project)
    _, err = project.run(*BUILD, code=code)
    assert words in err
    assert not (project.root / "dist").exists()
    assert not any((project.store / "downloads").rglob("*.gz")) or code != 5


def test_a_record_that_differs_stops_the_build(project: Project) -> None:
    wrong = f"    patched:\n      release: {{commit: {'1' * 40}, tree: {'2' * 40}}}\n"
    project.edit_pins("    paths:\n", f"{wrong}    paths:\n")
    _, err = project.run(*BUILD, code=5)
    assert "upstreams.demo.patched.release: the patched tree is" in err
    project.run("pins", "record")
    project.build()
    check_result(project)


# -- killed, interrupted, at once -------------------------------------------------------------


def test_kill_9_at_any_moment_and_the_next_build_succeeds(project: Project) -> None:
    for path in (SDIST, WHEEL):
        slow_down(project.server, path, pieces=10, pause_s=0.03)
    chance = random.Random(11)
    killed = 0
    for _ in range(8):
        child = project.start(*BUILD)
        try:
            child.wait(chance.uniform(0.2, 1.0))
        except subprocess.TimeoutExpired:
            child.kill()
            killed += 1
        child.communicate()
        for wheel in (project.store / "artefacts").rglob("*.whl"):
            assert (wheel.parent / "artefact.json").is_file()
        for file in (project.store / "downloads").rglob("*.*"):
            assert sha256(file.read_bytes()) == file.parent.name
        for folder in ("artefacts", "downloads", "git"):
            if chance.random() < 0.7:
                shutil.rmtree(project.store / folder, ignore_errors=True)
    assert killed >= 3
    project.build()
    check_result(project)


GIT = """#!/bin/sh
case " $* " in
  *" {what} "*)
    sleep 60 & echo "$$ $!" > {note}.new; mv {note}.new {note}; wait ;;
esac
exec {git} "$@"
"""


@pytest.mark.parametrize(
    ("number", "what"), [(signal.SIGINT, "fast-import"), (signal.SIGTERM, "am")]
)
def test_an_interrupt_ends_everything_and_the_next_build_goes_on(
    project: Project, tmp_path: Path, number: int, what: str
) -> None:
    note = tmp_path / "note"
    (tmp_path / "git").write_text(GIT.format(what=what, note=note, git=shutil.which("git")))
    (tmp_path / "git").chmod(0o755)
    child = project.start(*BUILD, PATH=f"{tmp_path}:{os.environ['PATH']}")
    wait_for(note.exists)
    pids = [int(word) for word in note.read_text().split()]
    child.send_signal(number)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130, err
    assert "the next run continues" in err
    assert "Traceback" not in out + err
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert list((project.store / "tmp").iterdir()) == []
    project.build()
    check_result(project)


def test_two_builds_at_once_share_the_work(project: Project) -> None:
    with Store(project.store).lock("git-demo"):  # until all have begun
        children = [project.start(*BUILD, "--json") for _ in range(3)]
        for child in children:
            assert child.stderr is not None
            assert any("waiting for another build of" in line for line in child.stderr)
    results = [child.communicate(timeout=PATIENCE_S) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], results
    check_result(project)
    asked = project.requests()
    assert (asked.count(SDIST), asked.count(WHEEL)) == (1, 1)
    receipts = [json.loads(out) for out, _ in results]
    assert receipts[0]["items"] == receipts[1]["items"] == receipts[2]["items"]
