"""Wheels that somebody else made: what is taken, what is refused, and by one error each."""

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
from sparkforge.wheels import archive, intake
from tests.support import make_wheel, record_line, sha256

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


# names of members that are no plain paths inside the wheel
PLACES = ("../evil.py", "demo/../../evil.py", "/abs/evil.py", "demo\\evil.py", "demo/\x1b[31mred")
MORE = ("demo/" + "x" * 5000, "demo//x", "other-2.0.dist-info/METADATA")
WRONG_METADATA = [
    b"",
    METADATA.replace(b"Name", b"Nome"),
    METADATA.replace(b"Version: 1.0", b"Summary: x"),
    METADATA.replace(b"Name", b"Version: 1.0\nName"),
    METADATA.replace(b"demo", b"/abs/name"),
    METADATA.replace(b"1.0", b"1/0"),
    METADATA.replace(b"demo", b"other"),
    METADATA.replace(b"1.0", b"2.0"),
    METADATA.replace(b"demo", b"d\xe9mo"),
    METADATA.replace(b"\n\n", b"\nRequires-Dist: a b c ???\n\n"),
    None,
]
WRONG_RECORD = [b"demo/__init__.py\n", b"demo/__init__.py,sha256=x\n", b'"demo/__init__.py,,\n']
WRONG_RECORD += [b"d\xe9mo,,\n", b"demo/__init__.py,md5=abcd,\n"]
WRONG_RECORD += [b"demo/__init__.py,sha256=!,\n", b""]
REFUSED = [
    *(packed(members(**{place: b""})) for place in (*PLACES, *MORE)),
    *(packed(members(**{f"{INFO}/METADATA": text})) for text in WRONG_METADATA),
    *(packed({**members(), f"{INFO}/RECORD": text}) for text in WRONG_RECORD),
    *(packed(members(**{f"{INFO}/WHEEL": text})) for text in (None, b"Tag: \xe9\n")),
    *(packed(members(), method) for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)),
    b"<html>",
    GOOD[:-30],
    packed(members(), more=("demo/__inix__.py",)).replace(b"inix", b"init"),  # twice
    patched(GOOD, CENTRAL, 8, b"\1"),  # encrypted
    patched(GOOD, LOCAL, 30, b"evil"),  # from here on: the two headers differ
    patched(GOOD, LOCAL, 8, b"\0"),
    patched(GOOD, LOCAL, 22, struct.pack("<L", 7)),
    patched(GOOD, LOCAL, 46, b"\xff\xff"),
    packed(record_of(lambda rows: rows.pop(0))),
    packed(record_of(lambda rows: rows[0].__setitem__(1, rows[1][1]))),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_some_installer_refuses_is_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(BuildError) as caught:
        judged(tmp_path, REFUSED[number])
    assert plain.printable(caught.value.what)


LOWER = METADATA.replace(b"Name", b"name").replace(b"Version: 1.0", b"version: 1.0")


LICENCE = METADATA.replace(b"\n\n", b"\nLicense: a\ntext nobody indented\n\n")
ODD_NAMES = {"demo/\u00fcn\u00ef \u2603.txt": b"", "demo-1.0.data/scripts/x": b""}
TAKEN = {
    "plain": GOOD,
    "stored": packed(members(), zipfile.ZIP_STORED),
    "folders": packed(members(), more=("demo/", f"{INFO}/")),
    "lower-case": packed(members(**{f"{INFO}/METADATA": LOWER})),
    "crlf": packed(members(**{f"{INFO}/METADATA": METADATA.replace(b"\n", b"\r\n")})),
    "licence": packed(members(**{f"{INFO}/METADATA": LICENCE})),
    "names": packed(members(**ODD_NAMES)),
    "prefix": b"a program in front" + GOOD,
    "record-of-more": packed(record_of(lambda rows: rows.append(["gone.py", "sha256=AAAA", "1"]))),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_all_installers_take_is_taken(tmp_path: Path, name: str) -> None:
    assert judged(tmp_path, TAKEN[name]) >= 4
    assert judged(tmp_path, TAKEN[name], "Demo-1.0-py3-none-any.whl") >= 4


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
