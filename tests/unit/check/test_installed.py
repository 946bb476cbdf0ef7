"""Installed files against RECORDs and, where a RECORD is wrong, against a known hash."""

import zipfile
from pathlib import Path

import pytest

from sparkforge.build.image import VENV
from sparkforge.check import verify
from tests.support import make_wheel, sha256

SITE = verify.site_of("3.11")
Baked = tuple[dict[str, str], dict[str, bytes]]


def files_of(*wheels: Path) -> Baked:
    """Return what an installer leaves of wheels: hashes, and RECORDs."""
    made, kept = verify.of_the_venv("3.11"), {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            for name in opened.namelist():
                data = opened.read(name)
                made[SITE + name] = sha256(data)
                if name.endswith("/RECORD"):
                    kept[SITE + name] = data
    return made, kept


def check(baked: Baked) -> list[str]:
    files, documents = baked
    return verify.installed(files, verify.records(documents, SITE), "3.11")[1]


def test_a_library_with_a_wrong_record_is_known_by_its_hash(tmp_path: Path) -> None:
    assert len(verify.CHANGED) == 4  # two libraries of one release, for two platforms
    sha, name = next(iter(verify.CHANGED.items()))
    path = f"PyNvVideoCodec/PyNvVideoCodec_{name}-linux-gnu.so"
    other = path.replace("121", "130")
    files, kept = files_of(make_wheel(tmp_path, "codec", files={path: b"1", other: b"1"}))
    assert check(({**files, SITE + path: sha}, kept)) == []
    for wrong in ({SITE + path: "f" * 64}, {SITE + other: sha}):
        assert len(check(({**files, **wrong}, kept))) == 1


def test_a_file_of_two_packages_may_be_of_either(tmp_path: Path) -> None:
    one = make_wheel(tmp_path, "one", files={"build_backend.py": b"one\n"})
    two = make_wheel(tmp_path, "two", files={"build_backend.py": b"two\n"})
    assert check(files_of(one, two)) == check(files_of(two, one)) == []
    files, kept = files_of(one, two)
    files[f"{SITE}build_backend.py"] = sha256(b"three\n")
    assert len(check((files, kept))) == 1


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
    files, kept = files_of(make_wheel(tmp_path, "one", files={"one.py": b""}))
    files[f"{SITE}__pycache__/one.cpython-311.pyc"] = "any"
    assert check((files, kept)) == []
    files[path] = f"link to {link}" if link else sha256(b"evil")
    (said,) = check((files, kept))
    assert said.startswith(f"{path}: ")


def test_byte_code_outside_of_pycache_is_compared(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "one", files={"one.pyc": b"1", "__pycache__/x.pyc": b"1"})
    files, kept = files_of(wheel)
    files |= {SITE + name: sha256(b"2") for name in ("one.pyc", "__pycache__/x.pyc")}
    (said,) = check((files, kept))
    assert said.startswith(f"{SITE}one.pyc: missing, or differs from")
