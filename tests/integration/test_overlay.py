"""Overlay wheels: what changes, what must not, and what other tools say of the result."""

from __future__ import annotations

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
from tests.support import BODY, EPOCH, PATIENCE_S, Repo, make_wheel, python, sha256
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
    request = overlay.Request(
        wheel=wheel,
        name=None,
        local="spark.1",
        drop_requires=(),
        version_file="demo/_version.py",
        epoch=EPOCH,
    )
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
    made = bench.build(bench.patched(CHANGE))
    assert made.path.name == f"demo_pkg-1.0+spark.1-{TAG}.whl"
    assert (made.name, made.version) == ("Demo_Pkg", "1.0+spark.1")
    assert made.replaced == ("demo/mod.py", "demo/data/include/a.h")
    assert made.added == ("demo/new/__init__.py",)
    assert made.removed == ("demo/old.py",)
    assert made.left_out == ("tests/test_a.py",)
    members = read(made.path)
    assert members["demo/mod.py"] == b"y = 2\n"
    assert members["demo/new/__init__.py"] == b"n = 1\n"
    assert members["demo/data/include/a.h"] == b"// patched\n"
    assert "demo/old.py" not in members
    assert not any("csrc" in name or "test_a" in name for name in members)
    check_record(made.path)

    old, new = packed(bench.request.wheel), packed(made.path)
    info, data = "Demo_Pkg-1.0.dist-info/", "Demo_Pkg-1.0.data/"
    renamed = {
        name.replace(info, "demo_pkg-1.0+spark.1.dist-info/").replace(
            data, "demo_pkg-1.0+spark.1.data/"
        ): raw
        for name, raw in old.items()
    }
    different = {name for name in renamed.keys() | new.keys() if renamed.get(name) != new.get(name)}
    stem = "demo_pkg-1.0+spark.1.dist-info"
    assert different == {
        "demo/mod.py",
        "demo/old.py",
        "demo/new/__init__.py",
        "demo/data/include/a.h",
        "demo/_version.py",
        f"{stem}/METADATA",
        f"{stem}/WHEEL",
        f"{stem}/RECORD",
        f"{stem}/RECORD.jws",
        f"{stem}/RECORD.p7s",
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
    carried_repo = Repo(bench.folder / "carried")
    carried_repo.commit({"lib/old.py": PACKAGE["demo/old.py"]})
    carried_repo.commit({"lib/old.py": b"z = 2\n", "lib/tests/t.py": b""}, f"Theirs\n\n{BODY}")
    bare = bench.store.git_path("carried")
    git.init_bare(bare)
    base = carried_repo("rev-parse", "HEAD~1")
    for commit in (base, carried_repo("rev-parse", "HEAD")):
        git.fetch_commit(bare, str(carried_repo.path), commit)
    source = Source("carried", "git", bare, base, carried_repo("rev-parse", f"{base}^{{tree}}"), "")
    tree = carried_repo("rev-parse", "HEAD^{tree}")
    theirs = Patched(
        source, carried_repo("rev-parse", "HEAD"), tree, {"lib/old.py": "theirs.patch"}
    )
    rules = (PathRule(repo="lib/", wheel="demo/"), PathRule(repo="lib/tests/", wheel=None))
    out = bench.folder / "both"
    out.mkdir()
    layers = [overlay.Layer(own, RULES), overlay.Layer(theirs, rules)]
    made = overlay.build(bench.request, layers, out)
    assert made.replaced == ("demo/mod.py", "demo/old.py")
    assert made.left_out == ("lib/tests/t.py",)
    members = read(made.path)
    assert (members["demo/mod.py"], members["demo/old.py"]) == (b"y = 2\n", b"z = 2\n")
    check_record(made.path)


BUILD = """
import os, sys
from pathlib import Path
from sparkforge.wheels import overlay
os.umask(int(sys.argv[4], 8))
out = Path(sys.argv[2]); out.mkdir(parents=True)
made = overlay.build(overlay.Request(
    wheel=Path(sys.argv[1]), name=None, local="spark.1", drop_requires=(),
    version_file="demo/_version.py", epoch=int(sys.argv[3])), [], out)
print(made.path)
"""


def test_two_builds_elsewhere_at_another_hour_by_another_user_are_equal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    users = (("one", "022", "UTC", 1e9), ("a/b c", "077", "Asia/Tokyo", 2e9))
    for folder, mask, zone, mtime in users:
        monkeypatch.setenv("TZ", zone)
        wheel = bench.folder / "copies" / folder / bench.request.wheel.name
        wheel.parent.mkdir(parents=True)
        wheel.write_bytes(bench.request.wheel.read_bytes())
        os.utime(wheel, (mtime, mtime))
        child = python(BUILD, wheel, bench.folder / folder, str(EPOCH), mask)
        out, _ = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0, out
        paths.append(Path(out.strip()))
    first, second = (path.read_bytes() for path in paths)
    assert sha256(first) == sha256(second)


# -- refusals ---------------------------------------------------------------------------


BUILD_RULES = (
    *RULES,
    PathRule(repo="cmake/", wheel=None, build=True),
    PathRule(repo="CMakeLists.txt", wheel=None, build=True),
)


def test_rules_of_compiling_are_left_out_and_told(bench: Bench) -> None:
    files = {"cmake/a.cmake": b"# a\n", "CMakeLists.txt": b"# all\n", "demo/mod.py": b"y = 2\n"}
    layer = overlay.Layer(bench.patched(files), BUILD_RULES)
    made = overlay.build(bench.request, [layer], bench.folder)
    assert made.replaced == ("demo/mod.py",)
    assert made.added == ()
    assert made.left_out == made.compile_only == ("CMakeLists.txt", "cmake/a.cmake")
    assert not any("cmake" in name.lower() for name in read(made.path))


def test_native_sources_are_refused_and_the_patch_is_named(bench: Bench) -> None:
    bench.patched({"demo/mod.py": b"y = 2\n"}, "A change of Python alone")
    patched = bench.patched({"csrc/kernel.cu": b"// faster\n"}, "Make the kernel faster")
    with pytest.raises(BuildError, match=r"make-the-kernel-faster\.patch: csrc/kernel") as caught:
        bench.build(patched)
    assert caught.value.exit_code == 7
    assert "a-change-of-python" not in str(caught.value)


def test_a_wheel_of_another_release_is_refused(bench: Bench) -> None:
    bench.base = bench.repo.commit({"demo/mod.py": b"y = 'another release'\n"})
    with pytest.raises(
        BuildError, match=r"demo/mod\.py differs from the pinned source[\s\S]*same release"
    ):
        bench.build(bench.patched({"demo/mod.py": b"y = 2\n"}))


def test_a_file_that_the_wheel_lacks_is_refused(bench: Bench) -> None:
    bench.base = bench.repo.commit({"demo/not_shipped.py": b"\n"})
    with pytest.raises(BuildError):
        bench.build(bench.patched({"demo/not_shipped.py": b"x\n"}))


def test_a_folder_that_hides_native_code_is_refused(bench: Bench) -> None:
    with pytest.raises(SeriesError, match=r"import demo/native/x\.py or demo/native\.so"):
        bench.build(bench.patched({"demo/native/x.py": b"x = 1\n"}))


def test_dropping_what_is_not_required_is_refused(bench: Bench) -> None:
    with pytest.raises(BuildError, match=r"does not require torchvision[\s\S]*drop_requires"):
        bench.build(None, drop_requires=("torchaudio", "torchvision"))


def test_a_version_file_without_the_version_is_refused(bench: Bench) -> None:
    with pytest.raises(BuildError, match=r"does not state the version 1\.0"):
        bench.build(None, version_file="demo/mod.py")
    with pytest.raises(BuildError, match=r"has no demo/gone\.py"):
        bench.build(None, version_file="demo/gone.py")


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
    subprocess.run(
        [sys.executable, "-m", "wheel", "unpack", "--dest", tmp_path / "unpacked", made.path],
        check=True,
        stdout=subprocess.PIPE,
    )
    unpacked = tmp_path / "unpacked" / "renamed_demo-1.0+spark.1"
    assert (unpacked / "demo" / "mod.py").read_bytes() == b"y = 2\n"
    assert os.access(unpacked / "demo" / "run", os.X_OK)

    where = tmp_path / "venv"
    venv.create(where)
    inside = where / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(inside)]
    subprocess.run([*pip, "install", "-qq", "--no-index", "--no-deps", made.path], check=True)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.PIPE)
    out = subprocess.run(
        [
            inside,
            "-c",
            "import demo, demo.mod, importlib.metadata as m;"
            " print(demo.version, demo.mod.y, m.version('renamed-demo'))",
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert out.split() == ["1.0+spark.1", "2", "1.0+spark.1"]
