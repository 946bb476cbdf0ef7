"""Installed files against RECORDs and, where a RECORD is wrong, against the wheel itself."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build.image import VENV
from sparkforge.check.verify import imagecheck
from sparkforge.check.verify.imagecheck import File
from sparkforge.store.store import Store
from tests.support import make_wheel, sha256

SITE = imagecheck.site_of("3.11")
REAL, STATED = b"what is packed\n", b"what RECORD means\n"


def files_of(wheel: Path) -> dict[str, File]:
    """Return what an installer leaves of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        contents = {name: opened.read(name) for name in opened.namelist()}
    made = {path: File(sha) for path, sha in imagecheck.of_the_venv("3.11").items()}
    return made | {
        SITE + name: File(sha256(data), data if name.endswith("/RECORD") else None)
        for name, data in contents.items()
    }


def check(files: dict[str, File], folder: Path, *wheels: Path) -> list[str]:
    """Check with a lock of wheels, and a store below the folder."""
    lock = folder / "lock.txt"
    lock.write_text(
        "".join(
            f"{wheel.name.partition('-')[0]}==1.0 --hash=sha256:{sha256(wheel.read_bytes())}\n"
            for wheel in wheels
        )
    )
    target = SimpleNamespace(python="3.11")
    context: Any = SimpleNamespace(
        target=target, lock=lock, store=Store(folder / "store"), target_name="tiny"
    )
    return imagecheck.installed(files, imagecheck.records(files, SITE), context)[1]


def test_a_wrong_record_is_overruled_by_the_locked_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "codec", files={"codec.so": STATED})
    with zipfile.ZipFile(wheel) as opened:
        contents = {name: opened.read(name) for name in opened.namelist()} | {"codec.so": REAL}
    with zipfile.ZipFile(wheel, "w") as fresh:
        for name, data in contents.items():
            fresh.writestr(name, data)
    files = files_of(wheel)
    (problem,) = check(files, tmp_path, wheel)  # the wheel is not in the store
    assert problem.startswith(f"{SITE}codec.so: ")
    kept = Store(tmp_path / "store").download_path(sha256(wheel.read_bytes()), wheel.name)
    kept.parent.mkdir(parents=True)
    kept.write_bytes(wheel.read_bytes())
    assert check(files, tmp_path, wheel) == []
    other = {**files, f"{SITE}codec.so": File(sha256(b"evil\n"))}
    assert len(check(other, tmp_path, wheel)) == 1
    kept.write_bytes(wheel.read_bytes() + b"damage")
    assert len(check(files, tmp_path, wheel)) == 1


def test_a_file_of_two_packages_may_be_of_either(tmp_path: Path) -> None:
    one = make_wheel(tmp_path, "one", files={"build_backend.py": b"one\n"})
    two = make_wheel(tmp_path, "two", files={"build_backend.py": b"two\n"})
    for first, second in ((one, two), (two, one)):
        files = {**files_of(first), **files_of(second)}
        assert check(files, tmp_path) == []
    files[f"{SITE}build_backend.py"] = File(sha256(b"three\n"))
    assert len(check(files, tmp_path)) == 1


@pytest.mark.parametrize(
    "path",
    [
        *("opt", VENV, SITE[:-1], f"{SITE}one.so", f"{SITE}sitecustomize.pyc"),
        *(f"{SITE}_virtualenv.pth", f"{SITE}__pycache__", f"{SITE}__pycache__/x.py"),
        *(f"{SITE}__pycache__/x.pyc/y", f"{SITE}__pycache__x/y.pyc", f"{VENV}/bin/python3"),
        *(f"{VENV}/bin/gcc", f"{VENV}/lib64", f"{VENV}/lib/python3.12/site-packages/x.py"),
    ],
)
@pytest.mark.parametrize("link", ["/evil", None])
def test_a_file_that_no_build_writes_is_named(tmp_path: Path, path: str, link: str | None) -> None:
    files = files_of(make_wheel(tmp_path, "one", files={"one.py": b""}))
    files[f"{SITE}__pycache__/one.cpython-311.pyc"] = File("any")
    assert check(files, tmp_path) == []
    files[path] = File(f"link to {link}" if link else sha256(b"evil"))
    (said,) = check(files, tmp_path)
    assert said.startswith(f"{path}: ")


def test_byte_code_outside_of_pycache_is_compared(tmp_path: Path) -> None:
    files = files_of(
        make_wheel(tmp_path, "one", files={"one.pyc": b"1", "__pycache__/x.pyc": b"1"})
    )
    for name in ("one.pyc", "__pycache__/x.pyc"):
        files[SITE + name] = File(sha256(b"2"))
    (said,) = check(files, tmp_path)
    assert said.startswith(f"{SITE}one.pyc: missing, or differs from")
