"""Overlay wheels: what changes, what must not, and what other tools say of the result."""

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.parser import BytesParser
from pathlib import Path

import pytest

from sparkforge.core import git
from sparkforge.core.errors import BuildError, SeriesError
from sparkforge.pins.types import PathRule
from sparkforge.series import series
from sparkforge.series.series import Patched
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store
from sparkforge.wheels import overlay
from tests.support import BODY, EPOCH, Repo, make_wheel
from tests.unit.wheels.test_archive import packed

VERSION_FILE = b"__version__ = version = '1.0'\n__version_tuple__ = version_tuple = (1, 0)\n"
PACKAGE: Mapping[str, bytes] = {
    "demo/__init__.py": b"from ._version import version\nx = 1\n",
    "demo/mod.py": b"y = 1\n" * 50,
    "demo/old.py": b"z = 1\n",
    "demo/with space, and comma.txt": b"words\n",
    "demo/\u00fcn\u00ef.txt": b"words\n",
    "demo/run": b"#!/bin/sh\n",
}
REPO: Mapping[str, bytes | None] = {
    **PACKAGE,
    "csrc/kernel.cu": b"// native\n",
    "include/a.h": b"// header\n",
    "tests/test_a.py": b"\n",
}
RULES = (
    PathRule(repo="demo/", wheel="demo/"),
    PathRule(repo="include/", wheel="demo/data/include/"),
    PathRule(repo="tests/", wheel=None),
    PathRule(repo="cmake/", wheel=None, build=True),
)
TAG = "cp38-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64"


@dataclass
class Bench:
    store: Store
    repo: Repo
    base: str
    folder: Path
    request: overlay.Request

    def patched(self, files: Mapping[str, bytes | None], subject: str = "Change it") -> Patched:
        name = self.folder / "patches"
        name.mkdir(exist_ok=True)
        self.repo.commit(files, f"{subject}\n\n{BODY}")
        file, data = series.export(self.repo.path, "HEAD~1", "HEAD")[0]
        (name / file).write_bytes(data)
        with (name / "series").open("a") as listing:
            listing.write(f"{file}\n")
        bare = self.store.git_path("demo")
        with self.store.lock("git-demo"):
            git.init_bare(bare)
            if not git.has_commit(bare, self.base):
                git.fetch_commit(bare, str(self.repo.path), self.base)
        tree = self.repo("rev-parse", f"{self.base}^{{tree}}")
        source = Source("demo", "git", bare, self.base, tree, "test")
        return series.apply(self.store, series.read(name), source)

    def build(
        self, patched: Patched | None, folder: str = "out", **changed: object
    ) -> overlay.Overlaid:
        out = self.folder / folder
        out.mkdir(exist_ok=True)
        layers = [overlay.Layer(patched, RULES)] if patched else []
        return overlay.build(replace(self.request, **changed), layers, out)  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path, store: Store) -> Bench:
    repo = Repo(tmp_path / "repo")
    (repo.path / "demo").mkdir()
    base = repo.commit(dict(REPO))
    wheel = make_wheel(
        tmp_path / "release",
        "Demo_Pkg",
        "1.0",
        {
            **PACKAGE,
            "demo/_version.py": VERSION_FILE,
            "demo/native.so": bytes(range(256)) * 40,
            "demo/data/include/a.h": b"// header\n",
            "Demo_Pkg-1.0.data/scripts/demo-tool": b"#!python\nprint('tool')\n",
            "demo/_vendor/other-2.0.dist-info/RECORD": b"other,,\n",
        },
        tag=TAG,
        requires=["numpy>=1", "torchaudio==2.0", 'torchaudio; extra == "audio"'],
        info={
            "entry_points.txt": b"[console_scripts]\ndemo = demo:x\n",
            "RECORD.jws": b"signed",
            "RECORD.p7s": b"signed",
            "licenses/LICENSE": b"free\n",
        },
        executable=["demo/run", "Demo_Pkg-1.0.data/scripts/demo-tool"],
        stored=["demo/native.so"],
        descriptors=True,
    )
    request = overlay.Request(wheel, None, "spark.1", (), "demo/_version.py", EPOCH)
    return Bench(store, repo, base, tmp_path, request)


CHANGE: Mapping[str, bytes | None] = {
    "demo/mod.py": b"y = 2\n",
    "demo/new/__init__.py": b"n = 1\n",
    "demo/old.py": None,
    "include/a.h": b"// patched\n",
    "tests/test_a.py": b"# more\n",
}


def read(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        return {info.filename: wheel.read(info) for info in wheel.infolist()}


def check_record(path: Path) -> None:
    """Hold every member against RECORD, written anew from the specification."""
    members = read(path)
    (record,) = [name for name in members if name.count("/") == 1 and name.endswith("/RECORD")]
    rows = list(csv.reader(io.StringIO(members[record].decode())))
    assert [row[0] for row in rows].count(record) == 1
    assert sorted(row[0] for row in rows) == sorted(members)
    for name, digest, size in rows:
        if name == record:
            assert (digest, size) == ("", "")
            continue
        kind, _, value = digest.partition("=")
        assert kind == "sha256"
        found = hashlib.sha256(members[name]).digest()
        assert base64.urlsafe_b64encode(found).rstrip(b"=").decode() == value
        assert int(size) == len(members[name])


def test_an_older_wheel_gives_its_native_files_and_requirements_alone(bench: Bench) -> None:
    newer = {**CHANGE, "demo/_version.py": VERSION_FILE.replace(b"1.0", b"2.0")}
    tree = bench.patched(newer)
    source = replace(tree.source, commit=tree.commit, tree=tree.tree)
    layer = overlay.Layer(Patched(source, source.commit, source.tree), RULES)
    request = replace(
        bench.request, local="natives.1.0", release="2.0", add_requires=("orjson>=3.11.6",)
    )
    made = overlay.renew(request, layer, bench.folder)
    assert made.version == "2.0+natives.1.0"
    check_record(made.path)
    old, new = read(bench.request.wheel), read(made.path)
    assert new["demo/native.so"] == old["demo/native.so"]
    assert new["demo/mod.py"] == b"y = 2\n"
    assert new["demo/data/include/a.h"] == b"// patched\n"
    assert b"'2.0+natives.1.0'" in new["demo/_version.py"]
    assert not {"demo/old.py", "demo/_vendor/other-2.0.dist-info/RECORD"} & new.keys()
    metadata = new["demo_pkg-2.0+natives.1.0.dist-info/METADATA"].decode()
    assert "Requires-Dist: torchaudio==2.0\n" in metadata
    assert "Requires-Dist: orjson>=3.11.6\n" in metadata

    # our series goes onto it as onto any release
    bench.request = replace(bench.request, wheel=made.path, local="cpu.spark.1")
    assert bench.build(None).version == "2.0+natives.1.0.cpu.spark.1"


def test_the_patched_files_are_in_place_and_the_rest_is_untouched(bench: Bench) -> None:
    made = bench.build(bench.patched({**CHANGE, "cmake/a.cmake": b"# a\n"}))
    assert made.path.name == f"demo_pkg-1.0+spark.1-{TAG}.whl"
    assert made.version == "1.0+spark.1"
    assert made.replaced == ("demo/mod.py", "demo/data/include/a.h")
    assert made.added == ("demo/new/__init__.py",)
    assert made.removed == ("demo/old.py",)
    assert made.left_out == ("cmake/a.cmake", "tests/test_a.py")
    assert made.compile_only == ("cmake/a.cmake",)
    members = read(made.path)
    assert members["demo/mod.py"] == b"y = 2\n"
    assert members["demo/new/__init__.py"] == b"n = 1\n"
    assert members["demo/data/include/a.h"] == b"// patched\n"
    check_record(made.path)

    old, new = packed(bench.request.wheel), packed(made.path)
    stem = "demo_pkg-1.0+spark.1.dist-info"
    renamed = {
        name.replace("Demo_Pkg-1.0.dist-info", stem).replace(
            "Demo_Pkg-1.0.data/", "demo_pkg-1.0+spark.1.data/"
        ): raw
        for name, raw in old.items()
    }
    different = {name for name in renamed.keys() | new.keys() if renamed.get(name) != new.get(name)}
    ours = ("METADATA", "WHEEL", "RECORD", "RECORD.jws", "RECORD.p7s")
    assert different == {
        *(made.replaced + made.added + made.removed),
        "demo/_version.py",
        *(f"{stem}/{name}" for name in ours),
    }


def test_the_metadata_says_name_version_and_requirements(bench: Bench) -> None:
    made = bench.build(None, name="other-name", drop_requires=("Torchaudio",))
    assert made.path.name == f"other_name-1.0+spark.1-{TAG}.whl"
    members = read(made.path)
    metadata = BytesParser().parsebytes(members["other_name-1.0+spark.1.dist-info/METADATA"])
    assert metadata["Name"] == "other-name"
    assert metadata["Version"] == "1.0+spark.1"
    assert metadata.get_all("Requires-Dist") == ["numpy>=1", 'torchaudio; extra == "audio"']
    assert metadata.get_payload() == "A demo.\n"
    wheel = BytesParser().parsebytes(members["other_name-1.0+spark.1.dist-info/WHEEL"])
    assert wheel.get_all("Tag") == [
        "cp38-abi3-manylinux_2_17_x86_64",
        "cp38-abi3-manylinux2014_x86_64",
    ]
    assert members["demo/_version.py"] == VERSION_FILE.replace(b"'1.0'", b"'1.0+spark.1'")
    assert "other_name-1.0+spark.1.data/scripts/demo-tool" in members
    check_record(made.path)


def test_modes_are_the_wheels_own_but_where_a_patch_sets_them(bench: Bench) -> None:
    (bench.repo.path / "demo/mod.py").chmod(0o755)
    patched = bench.patched({"demo/run": b"#!/bin/sh\necho\n"}, "Change the files' modes")
    made = bench.build(patched)
    with zipfile.ZipFile(made.path) as wheel:
        modes = {info.filename: info.external_attr >> 16 for info in wheel.infolist()}
    assert modes["demo/run"] == 0o100755  # 644 in the repository, but no patch says so
    assert modes["demo/mod.py"] == 0o100755
    assert modes["demo/__init__.py"] == 0o100644


def test_two_series_go_onto_one_wheel(bench: Bench) -> None:
    own = bench.patched({"demo/mod.py": b"y = 2\n"}, "Ours")
    carried = Repo(bench.folder / "carried")
    base = carried.commit({"lib/old.py": PACKAGE["demo/old.py"]})
    tip = carried.commit({"lib/old.py": b"z = 2\n", "lib/tests/t.py": b""}, f"Theirs\n\n{BODY}")
    source = Source("carried", "git", carried.path / ".git", base, "", "")
    theirs = Patched(source, tip, carried("rev-parse", "HEAD^{tree}"), {})
    rules = (PathRule(repo="lib/", wheel="demo/"), PathRule(repo="lib/tests/", wheel=None))
    layers = [overlay.Layer(own, RULES), overlay.Layer(theirs, rules)]
    made = overlay.build(bench.request, layers, bench.folder)
    assert made.replaced == ("demo/mod.py", "demo/old.py")
    assert made.left_out == ("lib/tests/t.py",)
    members = read(made.path)
    assert (members["demo/mod.py"], members["demo/old.py"]) == (b"y = 2\n", b"z = 2\n")
    check_record(made.path)


def test_two_builds_elsewhere_at_another_hour_by_another_user_are_equal(bench: Bench) -> None:
    found = []
    for folder, mask, mtime in (("one", 0o022, 1e9), ("a b c", 0o077, 2e9)):
        os.utime(bench.request.wheel, (mtime, mtime))
        before = os.umask(mask)
        try:
            found.append(bench.build(None, folder).path.read_bytes())
        finally:
            os.umask(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("base", "files", "error", "match"),
    [
        ({}, {"csrc/kernel.cu": b"// x\n"}, BuildError, r"change-it\.patch: csrc/kernel"),
        (
            {"demo/mod.py": b"y = 'another release'\n"},
            {"demo/mod.py": b"y = 2\n"},
            BuildError,
            r"demo/mod\.py differs from the pinned source[\s\S]*same release",
        ),
        ({}, {"demo/native/x.py": b"x\n"}, SeriesError, r"demo/native/x\.py or demo/native\.so"),
    ],
    ids=["native source", "another release", "hides native code"],
)
def test_a_change_that_no_overlay_can_have_is_refused(
    bench: Bench,
    base: Mapping[str, bytes | None],
    files: Mapping[str, bytes | None],
    error: type[Exception],
    match: str,
) -> None:
    bench.base = bench.repo.commit(base)
    bench.patched({"demo/__init__.py": b"from ._version import version\n"}, "Python alone")
    patched = bench.patched(files)
    with pytest.raises(error, match=match) as caught:
        bench.build(patched)
    assert "python-alone" not in str(caught.value)


def test_a_pin_that_does_not_fit_the_wheel_is_refused(bench: Bench) -> None:
    with pytest.raises(BuildError, match=r"does not state the version 1\.0") as caught:
        bench.build(None, version_file="demo/mod.py")
    assert caught.value.exit_code == 7


# -- other tools --------------------------------------------------------------------------


def test_wheel_unpacks_it_and_pip_installs_and_checks_it(bench: Bench, tmp_path: Path) -> None:
    plain = make_wheel(
        tmp_path / "plain",
        "demo",
        "1.0",
        {**PACKAGE, "demo/_version.py": VERSION_FILE},
        requires=["missing-thing"],
        executable=["demo/run"],
    )
    made = bench.build(
        bench.patched({"demo/mod.py": b"y = 2\n", "demo/new.py": b"", "demo/old.py": None}),
        wheel=plain,
        name="renamed-demo",
        drop_requires=("missing-thing",),
    )

    def run(*words: str | Path) -> str:
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout

    run(sys.executable, "-m", "wheel", "unpack", "--dest", tmp_path / "unpacked", made.path)
    unpacked = tmp_path / "unpacked" / "renamed_demo-1.0+spark.1"
    assert (unpacked / "demo" / "mod.py").read_bytes() == b"y = 2\n"
    assert os.access(unpacked / "demo" / "run", os.X_OK)

    venv.create(tmp_path / "venv")
    inside = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", inside)
    run(*pip, "install", "-qq", "--no-index", "--no-deps", made.path)
    run(*pip, "check")
    told = "print(demo.version, demo.mod.y, m.version('renamed-demo'))"
    out = run(inside, "-c", f"import demo, demo.mod, importlib.metadata as m; {told}")
    assert out.split() == ["1.0+spark.1", "2", "1.0+spark.1"]
