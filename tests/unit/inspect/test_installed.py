"""Installed files against RECORDs and, where a RECORD is wrong, against the wheel itself."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sparkforge.build.image import VENV
from sparkforge.inspect.verify import installed
from sparkforge.inspect.verify.installed import Report
from sparkforge.inspect.verify.ociarchive import Entry
from sparkforge.sources.wheelhouse import Locked
from sparkforge.store.store import Store
from tests.support import make_wheel, record_line, sha256

SITE = installed.site_of("3.11")
REAL, STATED = b"what is packed\n", b"what RECORD means\n"


def files_of(wheel: Path) -> dict[str, Entry]:
    """What an installer leaves of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        contents = {name: opened.read(name) for name in opened.namelist()}
    made = {path: Entry(sha, "", 0) for path, sha in installed._of_the_venv("3.11").items()}
    return made | {
        SITE + name: Entry(sha256(data), "", len(data), data if name.endswith("/RECORD") else None)
        for name, data in contents.items()
    }


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A wheel whose RECORD has another hash of one of its files."""
    wheel = make_wheel(tmp_path, "codec", files={"codec.so": STATED})
    with zipfile.ZipFile(wheel) as opened:
        contents = {name: opened.read(name) for name in opened.namelist()}
    contents["codec.so"] = REAL
    with zipfile.ZipFile(wheel, "w") as fresh:
        for name, data in contents.items():
            fresh.writestr(name, data)
    return wheel


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def check(files: dict[str, Entry], store: Store, *wheels: Path) -> Report:
    locked = [
        Locked(wheel.name.partition("-")[0], "1.0", frozenset({sha256(wheel.read_bytes())}))
        for wheel in wheels
    ]
    report = Report("", "", "", "")
    installed.check(report, files, "3.11", locked, store, "fetch it")
    return report


def keep(store: Store, wheel: Path) -> None:
    path = store.download_path(sha256(wheel.read_bytes()), wheel.name)
    path.parent.mkdir(parents=True)
    path.write_bytes(wheel.read_bytes())


def test_a_file_that_is_as_in_its_locked_wheel_is_right(wrong: Path, store: Store) -> None:
    keep(store, wrong)
    found = check(files_of(wrong), store, wrong)
    assert found.problems == []
    assert found.checked["of them match a wheel whose RECORD is wrong"] == 1


def test_without_the_wheel_it_is_told_what_would_fetch_it(wrong: Path, store: Store) -> None:
    (problem,) = check(files_of(wrong), store, wrong).problems
    assert problem.startswith(f"{SITE}codec.so: differs from codec-1.0.dist-info/RECORD; ")
    assert problem.endswith(": fetch it")


def test_a_third_content_is_a_problem_with_the_wheel_at_hand(wrong: Path, store: Store) -> None:
    keep(store, wrong)
    files = {**files_of(wrong), f"{SITE}codec.so": Entry(sha256(b"evil\n"), "", 5)}
    (problem,) = check(files, store, wrong).problems
    assert problem.endswith("differs from codec-1.0.dist-info/RECORD")


def test_a_damaged_wheel_proves_nothing(wrong: Path, store: Store) -> None:
    keep(store, wrong)
    sha = sha256(wrong.read_bytes())
    with store.download_path(sha, wrong.name).open("ab") as file:
        file.write(b"more")
    assert len(check(files_of(wrong), store, wrong).problems) == 1


def test_of_a_file_of_two_packages_either_may_be_there(tmp_path: Path, store: Store) -> None:
    one = make_wheel(tmp_path, "one", files={"build_backend.py": b"one\n"})
    two = make_wheel(tmp_path, "two", files={"build_backend.py": b"two\n"})
    for first, second in ((one, two), (two, one)):
        files = {**files_of(first), **files_of(second)}
        assert check(files, store).problems == []
    files[f"{SITE}build_backend.py"] = Entry(sha256(b"three\n"), "", 6)
    assert len(check(files, store).problems) == 1


def test_without_a_hash_only_the_wheel_can_tell(tmp_path: Path, store: Store) -> None:
    files = files_of(make_wheel(tmp_path, "one", files={"one.py": b""}))
    line = ",".join(record_line("one.py", b""))
    record = files[f"{SITE}one-1.0.dist-info/RECORD"]
    assert record.data is not None
    text = record.data.decode().replace(line, "one.py,,")
    files[f"{SITE}one-1.0.dist-info/RECORD"] = Entry("", "", 0, text.encode())
    (said,) = check(files, store).problems
    assert said.startswith(f"{SITE}one.py: differs from one-1.0.dist-info/RECORD; to compare")


@pytest.mark.parametrize(
    "path",
    [
        *("opt", "opt/sparkforge", VENV, f"{VENV}/lib", f"{VENV}/lib/python3.11", SITE[:-1]),
        *(f"{SITE}one.so", f"{SITE}one/__init__.py", f"{SITE}sitecustomize.pyc", f"{SITE}a/b.pyc"),
        *(f"{SITE}_virtualenv.py", f"{SITE}_virtualenv.pth", f"{SITE}__pycache__"),
        *(f"{SITE}__pycache__/x.py", f"{SITE}__pycache__/x.pyc/y", f"{SITE}__pycache__x/y.pyc"),
        *(f"{VENV}/bin/{name}" for name in ("gcc", "python", "python3", "python3.11", "activate")),
        *(f"{VENV}/pyvenv.cfg", f"{VENV}/lib64", f"{VENV}/lib/python3.12/site-packages/x.py"),
    ],
)
@pytest.mark.parametrize("link", ["/evil", None])
def test_whatever_no_build_writes_is_told(
    tmp_path: Path, store: Store, path: str, link: str | None
) -> None:
    files = files_of(make_wheel(tmp_path, "one", files={"one.py": b""}))
    files[f"{SITE}__pycache__/one.cpython-311.pyc"] = Entry("any", "", 9)
    assert check(files, store).problems == []
    files[path] = Entry(f"link to {link}" if link else sha256(b"evil"), "", 4)
    (said,) = check(files, store).problems
    assert said.startswith(f"{path}: ")


def test_byte_code_that_a_record_lists_is_compared(tmp_path: Path, store: Store) -> None:
    files = files_of(
        make_wheel(tmp_path, "one", files={"one.pyc": b"1", "__pycache__/x.pyc": b"1"})
    )
    for name in ("one.pyc", "__pycache__/x.pyc"):
        files[SITE + name] = Entry(sha256(b"2"), "", 1)
    (said,) = check(files, store).problems
    assert said.startswith(f"{SITE}one.pyc: differs from")
