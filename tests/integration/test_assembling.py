"""A compiled wheel of what a build wrote, and of the release's files for the rest."""

import zipfile
from pathlib import Path

import pytest

from sparkforge.build.stages import natives
from sparkforge.pins.types import PathRule
from sparkforge.series.series import Patched
from sparkforge.sources.sources import Source
from sparkforge.wheels import overlay
from tests.support import EPOCH, Repo, make_wheel

OLD, NEW, OTHER = (b"\x7fELF" + word for word in (b"old", b"new", b"other"))
RELEASE = {
    "demo/__init__.py": b"x = 1\n",
    "demo/patched.py": b"x = 1\n",
    "demo/removed.py": b"x = 1\n",
    "demo/_C.so": OLD,
    "demo/_D.so": OTHER,
}


@pytest.fixture
def own(tmp_path: Path) -> overlay.Layer:
    """A tree whose series changes a module and a native source, and removes a module."""
    repo = Repo(tmp_path / "repo")
    before = {name: RELEASE[name] for name in ("demo/patched.py", "demo/removed.py")}
    base = repo.commit({**before, "csrc/c.cpp": b"old\n"})
    changes = {"demo/patched.py": b"x = 3\n", "demo/removed.py": None, "csrc/c.cpp": b"new\n"}
    commit = repo.commit(changes)
    tree = repo("rev-parse", f"{base}^{{tree}}")
    source = Source("demo", "git", repo.path, base, tree, "test")
    touched = dict.fromkeys(changes, "a.patch")
    patched = Patched(source, commit, repo("rev-parse", f"{commit}^{{tree}}"), touched)
    return overlay.Layer(patched, (PathRule(repo="demo/", wheel="demo/"),))


def test_wheel_has_patched_compiled_and_released_files(tmp_path: Path, own: overlay.Layer) -> None:
    wheel = make_wheel(tmp_path / "release", files=RELEASE)
    request = overlay.Request(wheel, None, "spark.1", (), None, EPOCH)
    (tmp_path / "made").mkdir()
    done = natives.overlaid(request, [own], {"demo/_C.so": NEW}, tmp_path / "made")
    assert (done.replaced, done.removed) == (("demo/patched.py",), ("demo/removed.py",))
    assert (done.left_out, done.compile_only) == (("csrc/c.cpp",), ())
    with zipfile.ZipFile(done.path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if "info/" not in name}
    wanted = {**RELEASE, "demo/patched.py": b"x = 3\n", "demo/_C.so": NEW}
    del wanted["demo/removed.py"]
    assert files == wanted
