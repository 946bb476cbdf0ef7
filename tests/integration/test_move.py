"""A move with companions: one command to a tested landing, or to a stop that is named."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sparkforge.core.run import call
from sparkforge.maintain import ablate
from sparkforge.pins.pins import load
from sparkforge.runtime import environment
from sparkforge.series import series
from sparkforge.sources import wheelhouse
from tests.integration.moving import COMMIT, NEW, OLD, STOPPED, Upstream, files_of, lines, with_line
from tests.project import FILES, PLATFORM, Project
from tests.support import BODY, ROOT, Repo, add_project, make_sdist, make_wheel, sha256

MOD = FILES["demo/mod.py"]
PARTS = ("helper", "engine")
TESTS = """\
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(os.environ.get("SPARKFORGE_CHECKOUT", Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    found = {}

    def of(upstream, name):
        if upstream not in found:
            found[upstream] = tmp_path_factory.mktemp(upstream) / "tree"
            subprocess.run(
                [sys.executable, "-m", "sparkforge", "patches", "apply", upstream,
                 found[upstream], "--pins", CHECKOUT / "pins.yaml", "--offline"], check=True)
        return (found[upstream] / name).read_text()

    return of


def test_line(text):
    assert "line_20 = 2" in text("demo", "demo/mod.py")


def test_moved(text):
    assert "ours = 1" in text("demo", "demo/new_name.py")


def test_taken():
    pass


def test_reworded(text):
    assert "ready = True" in text("demo", "demo/late.py")


def test_helper(text):
    assert "ours = 1" in text("helper", "helper/mod.py")


def test_engine(text):
    assert "ours = 1" in text("engine", "engine/mod.py")
"""


def publish(
    project: Project, name: str, version: str, requires: Sequence[str] = (), text: bytes = b""
) -> None:
    """Put a package of one module onto the index, as a wheel and as an sdist."""
    folder = project.root.parent / f"release-{name}"
    text = text or (lines(name) if version == OLD else b"new = 0\n" + lines(name))
    files = {f"{name}/mod.py": text, f"{name}/_version.py": f"commit_id = 'g{COMMIT}'\n".encode()}
    make_wheel(folder, name, version, files, requires=requires)
    make_sdist(folder, name, version, files)
    listed = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    add_project(project.server, name, listed)


def message(subject: str, name: str, drop: str = "test") -> str:
    """Return the message of a patch, by the name of its test."""
    body = BODY.replace("tests/test_it.py::test_it", f"tests/test_it.py::{name}")
    return f"{subject}\n\n{body.replace('Drop-when: test', f'Drop-when: {drop}')}"


def pin(project: Project, name: str) -> str:
    """Pin the release 1.0 of an upstream, and write its series; returns its part of pins.yaml."""
    names = {"sdist": f"{name}-1.0.tar.gz", "wheel": f"{name}-1.0-py3-none-any.whl"}
    release = project.root.parent / f"release-{name}"
    files = {key: (release / file).read_bytes() for key, file in names.items()}
    repo = Repo(project.root.parent / f"upstream-{name}")
    repo.commit({f"{name}/mod.py": lines(name)})
    repo.commit(
        {f"{name}/mod.py": with_line(lines(name), 20, b"ours = 1")},
        message(f"Change {name}", f"test_{name}"),
    )
    folder = project.root / "patches" / name
    folder.mkdir(parents=True)
    ((patch, data),) = series.export(repo.path, "HEAD~1", "HEAD")
    (folder / patch).write_bytes(data)
    (folder / "series").write_text(f"{patch}\n")
    described = "".join(
        f"      {key}: {{project: {name}, file: {file},"
        f" sha256: {sha256(files[key])}, size: {len(files[key])}}}\n"
        for key, file in names.items()
    )
    return f"""\
  {name}:
    git: https://127.0.0.1:9/{name}.git
    tag: v1.0
    commit: {COMMIT}
    version: 1.0
    files:
{described}    source_file: sdist
    paths:
      - {{repo: {name}/, wheel: {name}/}}
"""


def lock_script() -> str:
    """Return the real script, with the locks of this project in place of ours."""
    text = (ROOT / "scripts" / "lock.sh").read_text()
    head, _, rest = text.partition("# the driver runs on every Python")
    tail = rest[rest.index("for name in $wanted; do") :]
    words = "--python-version 3.11 --only-binary :all: --no-emit-package helper"
    return f"{head}lock tiny.in tiny.txt {words} --no-emit-package engine\n" + (
        f"lock tools.in tools.txt --python-version 3.11 --only-binary :all:\n{tail}"
    )


@pytest.fixture
def up(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """A project like ours: vLLM and FlashInfer, and torch, which wants a Triton."""
    project = upstream.project
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("UV_EXCLUDE_NEWER", "")  # the index of tests gives no upload times
    monkeypatch.setattr(ablate, "dev_python", lambda root: Path(sys.executable))
    for name in PARTS:
        for version in ("1.0", "2.0", "3.0"):
            publish(project, name, version)
    for version in ("1.0", "2.0"):
        publish(project, "lib", version)
    for name in ("other", "fresh", "own"):
        for version in ("1.0", "1.5"):
            publish(project, name, version)
    upstream.begin_with({"demo/old_name.py": lines("old"), "demo/late.py": lines("late")})
    upstream.release(
        {}, OLD, requires=["helper==1.0", "engine==1.0", "lib==1.0", "other<1.5", "left>=1"]
    )
    path = project.root / "pins.yaml"
    wheel = (project.root.parent / "release" / "demo-1.0-py3-none-any.whl").read_bytes()
    old = load(path).upstreams["demo"].files["wheel"]
    text = path.read_text().replace(old.sha256, sha256(wheel))
    text = text.replace(f"size: {old.size}}}", f"size: {len(wheel)}}}")
    text = text.replace(
        "images: {}\n", "".join(pin(project, name) for name in PARTS) + "images: {}\n"
    )
    wheels = "".join(
        f"      {name}: {{files: {{{PLATFORM}: wheel}}, local: spark}}\n" for name in PARTS
    )
    dropped = "        local: spark\n        drop_requires: [left]\n"
    text = text.replace("        local: spark\n", f"{dropped}{wheels}")
    path.write_text(text)
    folder = project.root / "requirements"
    (folder / "tiny.in").write_text(
        "# Declared, without left.\nhelper==1.0\nengine==1.0\nlib==1.0\nother<1.5\nown\n"
    )
    (folder / "tools.in").write_text("lib==1.0\n")
    (project.root / "scripts").mkdir()
    (project.root / "scripts" / "lock.sh").write_text(lock_script())
    env = {"UV": str(environment.uv_program())}
    call("bash", "scripts/lock.sh", cwd=project.root, env=env)
    (project.root / "tests" / "test_it.py").write_text(TESTS)
    return upstream


def write_series(up: Upstream) -> None:
    """Write the series of demo, and publish 2.0, which has renamed, moved and taken things."""
    edits: dict[str, tuple[Mapping[str, bytes], str]] = {
        "Change a line": ({"demo/mod.py": with_line(MOD, 20, b"line_20 = 2")}, "test_line"),
        "Follow a file": (
            {"demo/old_name.py": with_line(lines("old"), 20, b"ours = 1")},
            "test_moved",
        ),
        "Taken one": (
            {"demo/__init__.py": FILES["demo/__init__.py"] + b"taken = 1\n"},
            "test_taken",
        ),
        "Reworded one": (
            {"demo/late.py": with_line(lines("late"), 25, b"ready = True")},
            "test_reworded",
        ),
    }
    repo, folder = up.project.repo, up.project.patches
    repo("checkout", "--quiet", "--detach", "v1.0")
    for subject, (files, test) in edits.items():
        drop = "demo>=2.0" if subject == "Reworded one" else "test"
        repo.commit(files, message(subject, test, drop))
    for left in folder.glob("*.patch"):
        left.unlink()
    exported = series.export(repo.path, "v1.0", "HEAD")
    for name, data in exported:
        (folder / name).write_bytes(data)
    (folder / "series").write_text("".join(f"{name}\n" for name, _ in exported))
    up.release(
        {
            "demo/mod.py": b"renamed = 0\n" + MOD.replace(b"line_12 = 1", b"line_twelve = 1"),
            "demo/old_name.py": None,
            "demo/new_name.py": lines("old"),
            "demo/__init__.py": FILES["demo/__init__.py"] + b"taken = 1\n",
            "demo/late.py": with_line(lines("late"), 2, b"ready = True"),
        },
        requires=["helper==2.0", "engine~=2.0", "lib==2.0", "other>=1.5", "fresh", "left>=2"],
    )
    up.project.run("pins", "record")


ONTO = ("demo", "--onto", NEW, "--with-companions")


def check_landed(up: Upstream) -> None:
    loaded = load(up.root / "pins.yaml")
    versions = {name: pinned.version for name, pinned in loaded.upstreams.items()}
    # demo wants engine~=2.0: not the newest
    assert versions == {"demo": "2.0", "helper": "2.0", "engine": "2.0"}
    assert loaded.release.counter == 4
    requirements = up.root / "requirements"
    assert (requirements / "tiny.in").read_text() == (
        "# Declared, without left.\nhelper==2.0\nengine~=2.0\nlib==2.0\nother>=1.5\nown\nfresh\n"
    )
    assert (requirements / "tools.in").read_text() == "lib==2.0\n"
    for name, wanted in (
        ("tiny", {"fresh": "1.5", "lib": "2.0", "other": "1.5", "own": "1.5"}),
        ("tools", {"lib": "2.0"}),
    ):
        locked = wheelhouse.read_lock(requirements / f"{name}.txt")
        assert {one.name: one.version for one in locked} == wanted
    up.project.run("patches", "check")
    names = [patch.name for patch in series.read(up.project.patches).patches]
    assert names == ["change-a-line.patch", "follow-a-file.patch", "reworded-one.patch"]
    assert not (up.root / "dist/rebase/demo").exists()


def test_each_stop_is_named_and_then_all_of_it_lands(up: Upstream) -> None:
    """A companion's conflict, a test that fails, the landing."""
    write_series(up)
    publish(up.project, "engine", NEW, text=with_line(lines("engine"), 20, b"theirs = 1"))
    path = up.root / "tests" / "test_it.py"
    path.write_text(TESTS.replace('"line_20 = 2"', '"line_20 = 3"'))  # as a name that changed
    before = files_of(up.root)

    said = up.rebase(*ONTO, code=STOPPED)
    assert "engine: change-engine.patch: conflict" in said["error"]["what"]
    folder = up.root / "dist/rebase/demo"
    (folder / "tree-engine/engine/mod.py").write_bytes(with_line(lines("engine"), 20, b"ours = 1"))
    said = up.rebase("demo", "--continue", code=STOPPED)
    assert "change-a-line.patch: tests/test_it.py::test_line fails" in said["error"]["what"]
    assert files_of(up.root) == before
    tree = Repo(folder / "tree")
    changed = (tree.path / "demo/mod.py").read_bytes().replace(b"line_20 = 2", b"line_20 = 3")
    (tree.path / "demo/mod.py").write_bytes(changed)
    assert "uncommitted" in up.rebase("demo", "--continue", code=2)["error"]["what"]
    commits = tree("rev-list", "--reverse", "HEAD~3..HEAD").split()
    tree("commit", "--quiet", "--all", f"--fixup={commits[0]}")
    tree("-c", "sequence.editor=true", "rebase", "--quiet", "-i", "--autosquash", "HEAD~4")

    said = up.rebase("demo", "--continue")
    check_landed(up)
    assert {
        one["patch"]: one["verdict"] for part in said["series"].values() for one in part["patches"]
    } == {
        "change-a-line.patch": "changed",
        "follow-a-file.patch": "target-renamed",
        "taken-one.patch": "upstreamed",
        "reworded-one.patch": "clean",
        "change-helper.patch": "clean",
        "change-engine.patch": "conflict",
    }
    assert list(said["tests"].values()) == ["passes"] * 5
    # its condition, and nothing that is left to do for requirements
    assert [one["what"] for one in said["companions"]] == [
        "demo: reworded-one: its Drop-when holds: demo>=2.0; upstream has it"
    ]
    changes = (up.root / "CHANGELOG.md").read_text()
    assert "* demo v1.0 → v2.0." in changes
    assert "* helper v1.0 → v2.0." in changes


def test_what_no_release_meets_is_named(up: Upstream) -> None:
    write_series(up)
    up.release({}, requires=["helper==2.0", "engine~=4.0"])
    said = up.rebase(*ONTO, code=2)
    assert said["error"]["what"] == "engine: no release on the index meets ~=4.0"
    assert not (up.root / "dist/rebase/demo").exists()
