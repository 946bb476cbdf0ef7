"""A virtual environment takes our wheels from wherever the store is, and notices damage."""

import platform
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from sparkforge.core.disk import sha256_file
from sparkforge.runtime import environment
from tests.support import make_wheel

VERSION = ".".join(platform.python_version_tuple()[:2])


def install(place: Path, *wheels: Path) -> Path:
    return environment.install(
        place / "made",
        wheels,
        python=Path(sys.executable),
        lock=place / "lock.txt",
        wheelhouse=place / "wheels",
        unpacked=place,
        target="tiny",
    )


def test_our_wheels_are_installed_from_any_folder(tmp_path: Path) -> None:
    site = again(tmp_path / "with #, ; and space")
    assert (site / "demo" / "__init__.py").is_file()
    assert {path.name for path in site.parents[3].iterdir()} == {"venv", "files.json"}


def test_byte_code_of_the_same_files_is_shared(tmp_path: Path) -> None:
    first, second = (tmp_path / name / "venv/lib/python/demo" for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir(parents=True)
        for name in ("ours", "kept"):
            (folder / f"{name}.py").write_text("x = 1\n")
    for name in ("shared", "kept"):
        (first / f"{name}.py").write_text("x = 1\n")
        (second / f"{name}.py").unlink(missing_ok=True)
        (second / f"{name}.py").hardlink_to(first / f"{name}.py")
    for name in ("ours", "kept", "shared", "gone"):
        (first / "__pycache__").mkdir(exist_ok=True)
        (first / "__pycache__" / f"{name}.cpython-311.pyc").write_text("first")
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "kept.cpython-311.pyc").write_text("second")
    # what a server is writing, before it gets its name
    (first / "__pycache__" / "shared.cpython-311.pyc.140234").write_text("half")
    environment.share_byte_code(tmp_path / "first", tmp_path / "second")
    found = {path.name: path.read_text() for path in (second / "__pycache__").iterdir()}
    assert found == {"shared.cpython-311.pyc": "first", "kept.cpython-311.pyc": "second"}


def test_restored_files_stand_beside_the_environment(tmp_path: Path) -> None:
    package, old = tmp_path / "venv/lib/python/site-packages/demo", tmp_path / "old"
    (package / "__pycache__").mkdir(parents=True)
    for name in ("a.py", "b.py", "__pycache__/a.cpython-311.pyc"):
        (package / name).write_text("ours")
    old.write_text("the release's")
    to = environment.restored(tmp_path, {"demo/a.py": old}, tmp_path / "packages")
    assert (to / "demo/a.py").read_text() == "the release's"
    assert (package / "a.py").read_text() == "ours"
    assert (to / "demo/b.py").samefile(package / "b.py")
    assert not (to / "demo/__pycache__").exists()


# -- damage ------------------------------------------------------------------------------------


def third(place: Path) -> str:
    """Put a third-party wheel in the wheelhouse; returns its line of the lock."""
    wheel = make_wheel(place / "wheels", "third", "1.0", {"third.py": b"here = True\n"})
    return f"third==1.0 --hash=sha256:{sha256_file(wheel)}\n"


def again(place: Path, lock: str = "") -> Path:
    """Install a third-party wheel and ours, from what is unpacked already."""
    shutil.rmtree(place / "made", ignore_errors=True)
    (place / "made").mkdir(parents=True)
    (place / "lock.txt").write_text(lock or third(place))
    ours = make_wheel(place / "ours", version="1.0+spark.1")
    venv = install(place, ours)
    return venv / "lib" / f"python{VERSION}" / "site-packages"


@pytest.mark.parametrize("damage", ["flip", "metadata", "record"])
def test_a_damaged_unpacked_wheel_is_unpacked_again(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    again(tmp_path)
    name = {"metadata": "METADATA", "record": "third-1.0.dist-info/RECORD"}.get(damage, "third.py")
    (path,) = (tmp_path / "cache").rglob(f"archive-v0/*/**/{name}")
    path.chmod(0o644)
    path.write_bytes(b"here = Fals\n" if damage == "flip" else b"")
    site = again(tmp_path)
    assert (site / "third.py").read_bytes() == b"here = True\n"
    assert "unpacking the wheels again" in "".join(capsys.readouterr())


@pytest.mark.parametrize("damage", ["flip", "gone", "listing"])
def test_a_changed_file_of_an_environment_is_noticed(tmp_path: Path, damage: str) -> None:
    site, made = again(tmp_path), tmp_path / "made"
    (site / "demo" / "__pycache__").mkdir()
    (site / "demo" / "__pycache__" / "x.pyc").touch()  # a server's
    assert not environment.changed(made)
    path = made / "files.json" if damage == "listing" else site / "demo" / "__init__.py"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"1", b"3"))
    assert environment.changed(made)


def test_a_wheel_with_a_wrong_record_is_installed_as_it_was_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pynvvideocodec 2.0.4: two of its libraries have other sizes than its RECORD says."""
    third(tmp_path)
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in (members | {"third.py": b"here = 'changed'\n"}).items():
            archive.writestr(name, content)
    lock = f"third==1.0 --hash=sha256:{sha256_file(wheel)}\n"
    again(tmp_path, lock)
    assert (again(tmp_path, lock) / "third.py").read_bytes() == b"here = 'changed'\n"
    assert "unpacking the wheels again" not in "".join(capsys.readouterr())


def test_a_file_that_two_wheels_have_is_that_of_the_last(tmp_path: Path) -> None:
    """As build_backend.py, which FlashInfer and torch-c-dlpack-ext ship."""
    (tmp_path / "made").mkdir()
    (tmp_path / "lock.txt").write_text(third(tmp_path))
    ours = make_wheel(tmp_path / "ours", files={"third.py": b"here = 'ours'\n"})
    venv = install(tmp_path, ours)
    (path,) = venv.glob("lib/*/site-packages/third.py")
    assert path.read_bytes() == b"here = 'ours'\n"
