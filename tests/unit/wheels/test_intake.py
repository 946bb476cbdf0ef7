"""Wheels that somebody else made: what is taken, what is refused, and by one error each."""

from __future__ import annotations

import csv
import io
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkforge.core import plain
from sparkforge.core.errors import BuildError
from sparkforge.store.store import Store
from sparkforge.wheels import archive, intake, overlay
from tests.support import EPOCH, make_wheel, record_line, sha256

INFO = "demo-1.0.dist-info"
METADATA = b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n\nA demo.\n"
WHEEL = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def members(**changed: bytes | None) -> dict[str, bytes]:
    """Return a good wheel's members; RECORD last, and right unless it is given."""
    found: dict[str, bytes | None] = {
        "demo/__init__.py": b"x = 1\n",
        f"{INFO}/METADATA": METADATA,
        f"{INFO}/WHEEL": WHEEL,
        **changed,
    }
    kept = {name: data for name, data in found.items() if data is not None}
    if f"{INFO}/RECORD" not in found:
        out = io.StringIO()
        rows = [record_line(name, data) for name, data in kept.items()]
        csv.writer(out, lineterminator="\n").writerows([*rows, (f"{INFO}/RECORD", "", "")])
        kept[f"{INFO}/RECORD"] = out.getvalue().encode()
    return kept


def packed(
    files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, more: tuple[str, ...] = ()
) -> bytes:
    """Return an archive of files, and of empty members behind them."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as made:
        for name, data in files.items():
            made.writestr(zipfile.ZipInfo(name, (2020, 2, 2, 2, 2, 2)), data, method)
        for name in more:
            made.writestr(zipfile.ZipInfo(name, (2020, 2, 2, 2, 2, 2)), b"")
    return sink.getvalue()


def judged(folder: Path, data: bytes, name: str = "demo-1.0-py3-none-any.whl") -> int:
    """Check a wheel as a build does; returns how many members it has."""
    path = folder / name
    path.write_bytes(data)
    with archive.opened(path) as source:
        return intake.verify(source)


def record_of(change: Callable[[list[list[str]]], object]) -> dict[str, bytes]:
    """Return a good wheel's members with another RECORD."""
    files = members()
    rows = list(csv.reader(io.StringIO(files[f"{INFO}/RECORD"].decode())))
    change(rows)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return {**files, f"{INFO}/RECORD": out.getvalue().encode()}


def patched(data: bytes, head: bytes, offset: int, value: bytes) -> bytes:
    """Return an archive with bytes of the first header of a kind replaced."""
    at = data.index(head) + offset
    return data[:at] + value + data[at + len(value) :]


LOCAL, CENTRAL = b"PK\3\4", b"PK\1\2"
GOOD = packed(members())


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (b"<html>", "not a readable wheel"),
        (GOOD[:-30], "not a readable wheel"),
        (packed(members(**{"../evil.py": b""})), "points outside its folder"),
        (packed(members(**{"demo/../../evil.py": b""})), "points outside its folder"),
        (packed(members(**{"/abs/evil.py": b""})), "absolute path"),
        (packed(members(**{"demo\\evil.py": b""})), "backslash"),
        (packed(members(**{"demo/\x1b[31mred": b""})), "control character"),
        (packed(members(**{"demo/" + "x" * 5000: b""})), "too long"),
        (packed(members(**{"demo//x": b""})), "empty part"),
        (packed(members(), more=("demo/__inix__.py",)).replace(b"inix", b"init"), "occurs twice"),
        (packed(members(demo=b"")), "is both a file and a folder"),
        (packed(members(**{"demo-1.0.data/evil/x": b""})), "unknown place for an installer"),
        (packed(members(**{"demo-1.0.data/data/../../../x": b""})), "points outside"),
        (packed(members(**{"other-1.0.data/data/x": b""})), "its .data folder is not named"),
        (packed(members(**{"other-2.0.dist-info/METADATA": b""})), "has 2 .dist-info folders"),
        (packed(members(), zipfile.ZIP_LZMA), "uses compression method 14"),
        (packed(members(), zipfile.ZIP_BZIP2), "uses compression method 12"),
        (patched(GOOD, CENTRAL, 8, b"\1"), "is encrypted"),
        (patched(GOOD, LOCAL, 30, b"evil"), "two headers differ"),
        (patched(GOOD, LOCAL, 8, b"\0"), "two headers differ"),
        (patched(GOOD, LOCAL, 22, struct.pack("<L", 7)), "two headers differ"),
        (patched(GOOD, LOCAL, 46, b"\xff\xff"), "demo/__init__.py: "),
        (packed(members(**{f"{INFO}/METADATA": None})), "has no demo-1.0.dist-info/METADATA"),
        (packed(members(**{f"{INFO}/WHEEL": None})), "has no demo-1.0.dist-info/WHEEL"),
        *(
            (packed(members(**{f"{INFO}/METADATA": text})), fragment)
            for text, fragment in [
                (b"", "states Name 0 times"),
                (METADATA.replace(b"Name", b"Nome"), "states Name 0 times"),
                (METADATA.replace(b"Version: 1.0", b"Summary: x"), "states Version 0 times"),
                (METADATA.replace(b"Name", b"Version: 1.0\nName"), "states Version 2 times"),
                (METADATA.replace(b"demo", b"/abs/name"), "invalid"),
                (METADATA.replace(b"1.0", b"1/0"), "Invalid version"),
                (METADATA.replace(b"demo", b"other"), "METADATA is of other 1.0"),
                (METADATA.replace(b"1.0", b"2.0"), "METADATA is of demo 2.0"),
                (METADATA.replace(b"demo", b"d\xe9mo"), "not UTF-8"),
                (b"\xef\xbb\xbf" + METADATA, "byte order mark"),
                (METADATA.replace(b"\n\n", b"\nRequires-Dist: a b c ???\n\n"), "METADATA: "),
            ]
        ),
        (packed(members(**{f"{INFO}/WHEEL": b"Wheel-Version: 9.0\n"})), "is not 1.x"),
        (packed(members(**{f"{INFO}/WHEEL": b"Tag: \xe9\n"})), "not UTF-8"),
        *(
            (packed({**members(), f"{INFO}/RECORD": text}), fragment)
            for text, fragment in [
                (b"demo/__init__.py\n", "line of 1 columns"),
                (b"demo/__init__.py,sha256=x\n", "line of 2 columns"),
                (b'"demo/__init__.py,,\n', "cannot read RECORD"),
                (b"d\xe9mo,,\n", "not UTF-8"),
                (b"x" * 200_000 + b",,\n", "cannot read RECORD"),
                (b"demo/__init__.py,md5=abcd,\n", "by md5"),
                (b"demo/__init__.py,sha256=!,\n", "cannot read RECORD"),
                (b"", "has no hash in its RECORD"),
            ]
        ),
        (packed(record_of(lambda rows: rows.append(rows[0]))), "lists demo/__init__.py twice"),
        (packed(record_of(lambda rows: rows.pop(0))), "demo/__init__.py has no hash"),
        (
            packed(record_of(lambda rows: rows[0].__setitem__(1, rows[1][1]))),
            "demo/__init__.py differs from its RECORD",
        ),
    ],
)
def test_what_some_installer_refuses_is_refused(tmp_path: Path, data: bytes, fragment: str) -> None:
    with pytest.raises(BuildError) as caught:
        judged(tmp_path, data)
    assert fragment in caught.value.what
    assert plain.printable(caught.value.what)
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    "name", ["demo.whl", "demo-1.0-1-py3-none-any.whl", "de\x1bmo-1.0-py3-none-any.whl"]
)
def test_a_file_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildError, match="NAME-VERSION-PYTHON-ABI-PLATFORM"):
        judged(tmp_path, GOOD, name)


LOWER = METADATA.replace(b"Name", b"name").replace(b"Version: 1.0", b"version: 1.0")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (GOOD, "demo-1.0-py3-none-any.whl"),
        (GOOD, "Demo-1.0-py3-none-any.whl"),
        (packed(members(), zipfile.ZIP_STORED), "demo-1.0-py3-none-any.whl"),
        (packed(members(), more=("demo/", f"{INFO}/")), "demo-1.0-py3-none-any.whl"),
        (packed(members(**{f"{INFO}/METADATA": LOWER})), "demo-1.0-py3-none-any.whl"),
        (
            packed(members(**{f"{INFO}/METADATA": METADATA.replace(b"\n", b"\r\n")})),
            "demo-1.0-py3-none-any.whl",
        ),
        (
            packed(
                members(
                    **{
                        f"{INFO}/METADATA": METADATA.replace(
                            b"\n\n", b"\nLicense: a\ntext nobody indented\n\n"
                        )
                    }
                )
            ),
            "demo-1.0-py3-none-any.whl",
        ),
        (
            packed(
                members(**{"demo/\u00fcn\u00ef \u2603.txt": b"", "demo-1.0.data/scripts/x": b""})
            ),
            "demo-1.0-py3-none-any.whl",
        ),
        (b"a program in front" + GOOD, "demo-1.0-py3-none-any.whl"),
        (
            packed(record_of(lambda rows: rows.append(["gone.py", "sha256=AAAA", "1"]))),
            "demo-1.0-py3-none-any.whl",
        ),
    ],
    ids=[
        "plain",
        "file-name",
        "stored",
        "folders",
        "lower-case",
        "crlf",
        "licence",
        "names",
        "prefix",
        "record-of-more",
    ],
)
def test_what_all_installers_take_is_taken(tmp_path: Path, data: bytes, name: str) -> None:
    assert judged(tmp_path, data, name) >= 4


def test_our_wheel_of_lower_case_headers_says_who_it_is(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "in", metadata=LOWER)
    (tmp_path / "out").mkdir()
    request = overlay.Request(wheel, "renamed-demo", "spark.1", (), None, EPOCH)
    made = overlay.build(request, [], tmp_path / "out")
    assert made.path.name == "renamed_demo-1.0+spark.1-py3-none-any.whl"
    with archive.opened(made.path) as source:
        found = intake.read(source)
        intake.verify(source)
    assert (found.name, found.version) == ("renamed-demo", "1.0+spark.1")


def test_nothing_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    for number, name in enumerate((b"/", b"../x", str(tmp_path / "evil").encode())):
        wheel = make_wheel(tmp_path / str(number), metadata=METADATA.replace(b"demo", name))
        (tmp_path / f"out{number}").mkdir()
        request = overlay.Request(wheel, None, "spark.1", (), None, EPOCH)
        with pytest.raises(BuildError):
            overlay.build(request, [], tmp_path / f"out{number}")
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"demo-1.0-py3-none-any.whl"}


def test_a_wheel_is_checked_once(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "in")
    intake.take(store, wheel, sha256(wheel.read_bytes()))
    monkeypatch.setattr(intake, "verify", lambda source: pytest.fail("checked again"))
    intake.take(store, wheel, sha256(wheel.read_bytes()))


EDITS = st.tuples(
    st.integers(0, len(GOOD) - 1),
    st.one_of(
        st.binary(min_size=1, max_size=8),
        st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", LOCAL, CENTRAL, b"PK\5\6"]),
    ),
)


@given(st.lists(EDITS, min_size=1, max_size=3), st.integers(0, len(GOOD)))
@example([(GOOD.index(CENTRAL) + 42, b"\xff\xff\xff\x7f")], len(GOOD))
@settings(max_examples=300)
def test_whatever_happens_to_its_bytes_it_is_taken_or_refused(
    edits: list[tuple[int, bytes]], length: int
) -> None:
    data = GOOD
    for at, value in edits:
        data = data[:at] + value + data[at + len(value) :]
    with tempfile.TemporaryDirectory() as folder:
        for one in (data, data[:length]):
            try:
                judged(Path(folder), one)
            except BuildError as error:
                assert plain.printable(error.what)


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                b"Name: demo\n",
                b"Version: 1.0\n",
                b"\n",
                b"name:",
                b": ",
                b" folded\n",
                b"Requires-Dist: x",
                b"; extra == 'y'",
                b"[",
                b"Wheel-Version: 1.0\n",
                b"\r",
                b"sha256=",
                b",",
                b'"',
                b"\xff",
                b"\0",
                b"../",
                b"demo/",
            ]
        ),
        st.binary(max_size=10),
    ),
    max_size=12,
).map(b"".join)


@given(TEXTS, st.sampled_from(["METADATA", "WHEEL", "RECORD"]))
@settings(max_examples=150)
def test_whatever_a_wheel_says_of_itself_is_taken_or_refused(text: bytes, which: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            judged(Path(folder), packed(members(**{f"{INFO}/{which}": text})))
        except BuildError as error:
            assert plain.printable(error.what)
