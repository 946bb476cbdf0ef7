"""Patch files and series: how they are read, and every rule of form."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.core import plain
from sparkforge.core.errors import SeriesError
from sparkforge.pins.types import PathRule
from sparkforge.series import lint as patchlint
from sparkforge.series import series
from sparkforge.series.patchfile import check_shadows, read_patch, slug
from tests.support import BODY

GOOD = f"""\
From {"0" * 40} Mon Sep 17 00:00:00 2001
From: Ada <ada@example.invalid>
Date: Tue, 14 Nov 2023 22:13:20 +0000
Subject: Change the twentieth line

{BODY}
diff --git a/pkg/mod.py b/pkg/mod.py
index {"1" * 40}..{"2" * 40} 100644
--- a/pkg/mod.py
+++ b/pkg/mod.py
@@ -1 +1 @@
-x
+y
"""
NAME = "change-the-twentieth-line.patch"


def write(folder: Path, text: str = GOOD, name: str = NAME) -> Path:
    """Write a series of one patch, and the test that it names."""
    patches = folder / "patches" / "demo"
    patches.mkdir(parents=True, exist_ok=True)
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_it.py").write_text("def test_it() -> None: ...\n")
    (patches / name).write_text(text, newline="")
    (patches / "series").write_text(f"{name}\n")
    return patches


def lint(folder: Path, text: str = GOOD, name: str = NAME) -> list[str]:
    return patchlint.lint(series.read(write(folder, text, name)), folder)


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def test_a_good_patch_is_clean(tmp_path: Path) -> None:
    assert lint(tmp_path) == []


STATUS, TEST, DROP = "Status: Pending", "test_it.py::test_it", "test; upstream has it"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("twentieth line\n", f"{'a' * 62}\n", "subject"),
        ("Subject: Change the", "Subject: Changed the", "rename to changed-the-twentieth-line"),
        (BODY.split("\n\n")[0], "Too short.", "body"),
        ("Upstream-Status: Pending\n", "", "trailer Upstream-Status"),
        ("Drop-when: test; upstream has it\n", "", "trailer Drop-when"),
        (DROP, "upstream has it", "Drop-when"),
        (DROP, "test;", "Drop-when"),
        ("Risk: build\n", "", "trailer Risk"),
        ("Test: tests/test_it.py::test_it\n", "", "trailer Test"),
        ("Risk: build\n", "Risk: build\nSigned-off-by: Ada\n", "trailer Signed-off-by"),
        ("Risk: build", "Risk: none", "Risk"),
        (STATUS, "Status: Sent", "Upstream-Status"),
        (STATUS, "Status: Inappropriate", "Upstream-Status"),
        (TEST, "gone.py::test_it", "Test: tests/gone.py"),
        (TEST, "test_it.py", "Test"),
        (TEST, "test_it.py::test_gone", "Test: tests/test_it.py has no test_gone"),
        ("tests/test_it.py::test_it", "../../../etc/passwd::root", "Test"),
        ("tests/test_it.py::test_it", "tests/\x1b::x", "Test"),
        ("Risk: build", "Some prose among trailers", "trailer Risk"),
    ],
)
def test_each_fault_of_form_is_named_with_its_file(
    tmp_path: Path, old: str, new: str, place: str
) -> None:
    problems = lint(tmp_path, changed(old, new))
    assert any(f": {place}" in one for one in problems) or place in problems[0], problems
    assert all(one.startswith(f"{tmp_path}/patches/demo/{NAME}: ") for one in problems)
    assert all(plain.printable(one) and len(one) < 400 for one in problems)


BUILD = (PathRule(repo="pkg/", wheel="pkg/"), PathRule(repo="CMake.txt", wheel=None, build=True))


@pytest.mark.parametrize(
    ("path", "trailer", "problem"),
    [
        ("CMake.txt", "", "trailer Native: missing: it changes CMake.txt: list"),
        ("CMake.txt", "Native: _C, _moe_C\n", None),
        ("CMake.txt", "Native: none\n", None),
        ("CMake.txt", "Native: _C and _moe_C\n", "Native: '_C and _moe_C'"),
        ("CMake.txt.in", "", None),  # a rule that names a file is for that file
        ("pkg/mod.py", "", None),
        ("pkg/mod.py", "Native: _C\n", "it changes no build rules"),
    ],
)
def test_changed_rules_of_compiling_tell_which_targets_they_concern(
    tmp_path: Path, path: str, trailer: str, problem: str | None
) -> None:
    text = changed("Risk: build\n", f"Risk: build\n{trailer}").replace("pkg/mod.py", path)
    read = series.read(write(tmp_path, text))
    found = patchlint.lint(read, tmp_path, BUILD)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
    if trailer == "Native: _C, _moe_C\n":
        assert read.patches[0].natives == ("_C", "_moe_C")
    elif problem is None:
        assert read.patches[0].natives == ()


# -- reading -----------------------------------------------------------------------------


INDEX = f"index {'1' * 40}..{'2' * 40}"
DIFF = "diff --git a/pkg/mod.py b/pkg/mod.py"


def refused(folder: Path, text: str) -> str:
    with pytest.raises(SeriesError) as caught:
        series.read(write(folder, text))
    assert all(plain.printable(said) for said in str(caught.value).splitlines())
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("From: Ada <ada@example.invalid>\n", ""),
        ("diff --git", "diff"),
        ("b/pkg/mod.py\nindex", "b/pkg/new.py\nrename from pkg/mod.py\nindex"),
        ("diff --git a/pkg/mod.py b/", "diff --git a/pkg/old.py b/"),
        ("pkg/mod.py b", "mod.py b"),
        # links and submodules
        (f"{INDEX} 100644", f"{INDEX} 160000"),
        (f"{INDEX} 100644", f"{INDEX} 120000"),
        (f"{INDEX} 100644", f"new file mode 120000\nindex {'0' * 40}..{'2' * 40}"),
        (f"{INDEX} 100644", f"old mode 100644\nnew mode 100600\n{INDEX}"),
    ],
)
def test_what_is_no_patch_of_ours_is_refused(tmp_path: Path, old: str, new: str) -> None:
    assert NAME in refused(tmp_path, changed(old, new))


NAMES = [r'"{}/\q"', '"{}/x', "{}/../../etc/evil", "{}//etc/evil", "{}/"]
NAMES += [r'"{}/a\nerror: forged"', r'"{}/a\033[31mred"', "{}/" + "x" * 5000, "{}/.gitattributes"]
NAMES += ["{}/pkg/.gitmodules", "{}/.git/hooks/post-checkout"]
UNREAD = "mod.cpython-311-x86_64-linux-gnu.so mod.pyd mod.pyc evil.pth __pycache__/mod.py"


@pytest.mark.parametrize("name", [*NAMES, *(f"{{}}/pkg/{name}" for name in UNREAD.split())])
def test_a_path_that_no_patch_may_change_is_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path, changed(DIFF, f"diff --git {name.format('a')} {name.format('b')}"))


@pytest.mark.parametrize(
    "hunk",
    ["GIT binary patch\nliteral 1\nIcmZPo000310RR91\n\n", "Binary files a/x and b/x differ\n"],
)
def test_a_binary_change_is_refused(tmp_path: Path, hunk: str) -> None:
    assert "pkg/mod.py" in refused(tmp_path, GOOD.partition("--- a/pkg")[0] + hunk)
    # in a hunk it is text
    series.read(write(tmp_path, changed("\n+y\n", f"\n+{hunk.partition(chr(10))[0]}\n")))


@pytest.mark.parametrize(
    ("new", "there"),
    [
        ("pkg/mod/__init__.py", "pkg/mod.py"),
        ("pkg/mod/data.txt", "pkg/mod.abi3.so"),
        ("pkg/mod.py", "pkg/mod/__init__.py"),
        ("pkg/mod.py", "pkg/mod/deep/er.py"),
    ],
)
def test_a_new_file_that_hides_a_module_is_refused(new: str, there: str) -> None:
    with pytest.raises(SeriesError, match="Python would import"):
        check_shadows({new}, [there, new], "demo")
    check_shadows(set(), [there, new], "demo")  # as upstream has it


ODD = ["\n", "\n\n", "diff --git ", '"', "\\", "\\377", "a/", "b/", "../", "--- ", "+++ ", "@@ "]
ODD += ["rename from x\n", "old mode 100644\n", "new file mode 120000\n", "index ", "0" * 40]
ODD += [
    "..",
    "From ",
    "Subject: =?utf-8?q?=ff?=\n",
    "Subject: =?x?b?!?=\n",
    "Subject: =?utf-8?b?a?=\n",
    "GIT binary patch\n",
]
ODD += ["\r", "Test: "]
PIECES = st.one_of(st.text(max_size=20), st.sampled_from(ODD))


@given(st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 60), PIECES), max_size=4))
@settings(max_examples=200)
def test_whatever_is_written_into_a_patch_is_read_or_refused(
    edits: list[tuple[int, int, str]],
) -> None:
    text = GOOD
    for at, gone, piece in edits:
        text = text[:at] + piece + text[at + gone :]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            problems = lint(folder, text)
        except SeriesError as error:
            problems = str(error).splitlines()
        assert all(plain.printable(line) for one in problems for line in one.splitlines())


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"just words\n", GOOD.replace("\n", "\r\n").encode()]
)
def test_any_other_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.patch"
    path.write_bytes(data)
    with pytest.raises(SeriesError):
        read_patch(path)


def test_series_and_files_must_agree_and_all_is_said_at_once(tmp_path: Path) -> None:
    patches = write(tmp_path)
    (patches / "extra.patch").write_text(GOOD)
    (patches / "a\n::x.patch").write_text(GOOD)
    (patches / "series").write_text(f"# order\n{NAME}\n\ngone.patch\n{NAME}\n../demo/{NAME}\n")
    with pytest.raises(SeriesError) as caught:
        series.read(patches)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert all(plain.printable(line) for line in lines)


# -- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("Fix the thing", "fix-the-thing.patch"),
        ("[MoE] Add bf16_dequant (CPU)", "moe-add-bf16-dequant-cpu.patch"),
        ("../../etc/passwd", "etc-passwd.patch"),
        ("x" * 63 + " y", "x" * 63 + ".patch"),
        ("\u00dcber", "ber.patch"),
    ],
)
def test_file_names_come_from_subjects(subject: str, name: str) -> None:
    assert slug(subject) == name


def test_the_digest_follows_the_order(tmp_path: Path) -> None:
    patches = write(tmp_path)
    (patches / "other.patch").write_text(changed("Change the", "Change another"))
    (patches / "series").write_text(f"{NAME}\nother.patch\n")
    both = series.read(patches)
    (patches / "series").write_text(f"other.patch\n{NAME}\n")
    assert series.read(patches).sha256 != both.sha256


@pytest.mark.parametrize(
    ("text", "versions", "holds"),
    [
        ("vllm>=0.33.0; as upstream does", {"vllm": "0.33.0"}, True),
        ("vllm>=0.33.0", {"vllm": "0.34.0rc1"}, True),
        ("vllm>=0.33.0; as upstream does", {"vllm": "0.32.1"}, False),
        ("flashinfer>=0.7.2; as upstream does", {"flashinfer": "0.7.2.post1"}, True),
        ("triton_kernels>=3.6,<4", {"triton-kernels": "3.7"}, True),
        ("vllm>=0.33.0", {"triton": "3.8.0"}, False),
        ("test; upstream has it", {"vllm": "9.9"}, False),  # its test says so, no version
    ],
)
def test_a_condition_is_evaluated(text: str, versions: dict[str, str], holds: bool) -> None:
    assert patchlint.holds(text, versions) is holds
