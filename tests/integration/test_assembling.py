"""A compiled wheel of what a build wrote, and of the release's files for the rest."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sparkforge.build.compile import assembling
from sparkforge.build.results import NativeFile
from sparkforge.core.errors import BuildError
from sparkforge.pins.compiling import Compile, Native
from sparkforge.pins.pins import Upstream
from sparkforge.pins.types import PathRule
from sparkforge.series.series import Patched
from sparkforge.sources.sources import Source
from sparkforge.wheels import overlay
from tests.support import EPOCH, Repo, make_wheel, sha256

OLD, NEW, OTHER = (b"\x7fELF" + word for word in (b"old", b"new", b"other"))
RELEASE = {
    "demo/__init__.py": b"x = 1\n",
    "demo/patched.py": b"x = 1\n",
    "demo/removed.py": b"x = 1\n",
    "demo/renamed_by_hand.py": b"x = 2\n",
    "demo/_C.so": OLD,
    "demo/_D.so": OTHER,
    "demo/vendored/a.py": b"v = 1\n",
}
BUILT = {
    "demo/__init__.py": b"x = 1\n",
    "demo/patched.py": b"x = 3\n",
    "demo/renamed_by_hand.py": b"x = 1\n",
}
NATIVES = tuple(
    Native(file=f"demo/{name}.so", target=name, device="cpu", sources=(f"csrc/{name}.cpp",))
    for name in ("_C", "_D")
)
UPSTREAM = Upstream.model_construct(
    compile=Compile(natives=NATIVES, from_release=("demo/vendored/",))
)


@pytest.fixture
def own(tmp_path: Path) -> overlay.Layer:
    """A tree whose series changes one file and removes one."""
    repo = Repo(tmp_path / "repo")
    before = {name: RELEASE[name] for name in ("demo/patched.py", "demo/removed.py")}
    base = repo.commit(before)
    commit = repo.commit({"demo/patched.py": b"x = 3\n", "demo/removed.py": None})
    tree = repo("rev-parse", f"{base}^{{tree}}")
    source = Source("demo", "git", repo.path, base, tree, "test")
    touched = dict.fromkeys(before, "a.patch")
    patched = Patched(source, commit, repo("rev-parse", f"{commit}^{{tree}}"), touched)
    return overlay.Layer(patched, (PathRule(repo="demo/", wheel="demo/"),))


def assemble(folder: Path, own: overlay.Layer, built: dict[str, bytes]) -> assembling.Assembled:
    wheel = make_wheel(folder / "release", files=RELEASE)
    out = folder / "out"
    make_wheel(out, files=built)
    (out / "native" / "demo").mkdir(parents=True)
    (out / "native" / "demo" / "_C.so").write_bytes(NEW)
    request = overlay.Request(wheel, None, "spark.1", (), None, EPOCH)
    (folder / "made").mkdir()
    made = assembling.built(out, "native", NATIVES[:1])
    return assembling.assemble(request, made, own, [], folder / "made", UPSTREAM)


def test_wheel_has_built_files_and_the_release_natives(tmp_path: Path, own: overlay.Layer) -> None:
    done = assemble(tmp_path, own, BUILT)
    assert done.natives == {
        "demo/_C.so": NativeFile(sha256(NEW), "compiled"),
        "demo/_D.so": NativeFile(sha256(OTHER), "release"),
    }
    assert done.differs == ("demo/renamed_by_hand.py",)
    assert done.wheel.replaced == ("demo/patched.py", "demo/renamed_by_hand.py")
    assert done.wheel.removed == ("demo/removed.py",)
    with zipfile.ZipFile(done.wheel.path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if "info/" not in name}
    kept = {name: RELEASE[name] for name in ("demo/_D.so", "demo/vendored/a.py")}
    assert files == {**BUILT, **kept, "demo/_C.so": NEW}


def test_file_that_the_build_lost_is_an_error(tmp_path: Path, own: overlay.Layer) -> None:
    built = {name: data for name, data in BUILT.items() if name != "demo/__init__.py"}
    with pytest.raises(BuildError, match=r"demo/__init__\.py"):
        assemble(tmp_path, own, built)


def test_native_that_was_not_installed_is_an_error(tmp_path: Path) -> None:
    make_wheel(tmp_path, files=BUILT)
    with pytest.raises(BuildError, match="_D"):
        assembling.built(tmp_path, "native", NATIVES[1:])
