"""Compilers in an image that must have none, and the pack that its label names."""

from __future__ import annotations

import pytest

from sparkforge.build import image
from sparkforge.build.imagenote import ImageNote
from sparkforge.inspect.verify.imagecheck import _as_made, _check_absent
from sparkforge.inspect.verify.installed import Report
from sparkforge.inspect.verify.ociarchive import Entry
from sparkforge.inspect.verify.reading import Reading
from sparkforge.runtime.engine import BaseImage
from tests.results import context_of


def problems(target: str, *paths: str) -> list[str]:
    files = {path: Entry("", "", 0) for path in paths}
    report = Report("", target, "", "")
    _check_absent(report, Reading("", "", {}, files), context_of(target))
    assert ("excluded programs" in report.checked) is (target != "cpu")
    return report.problems


@pytest.mark.parametrize(
    "path",
    [
        "usr/bin/g++",
        "bin/cc",
        "usr/local/bin/clang",
        "opt/sparkforge/venv/bin/gcc",
        "usr/local/cuda-13.0/bin/nvcc",
    ],
)
def test_a_compiler_on_the_path_is_told(path: str) -> None:
    assert problems("spark", path) == [f"{path}: a program that targets.spark excludes"]
    assert problems("cpu", path) == []


def test_a_compiler_of_a_wheel_off_the_path_is_none() -> None:
    site = "opt/sparkforge/venv/lib/python3.12/site-packages"
    paths = (f"{site}/nvidia/cu13/bin/nvcc", "usr/share/bash-completion/completions/gcc")
    assert problems("rtx", *paths, "usr/bin/gcc-12-base") == []


@pytest.mark.parametrize("pack", [(), ("default", "--kv-cache-dtype fp8")])
def test_the_label_names_sets_and_options_of_the_pack(pack: tuple[str, ...]) -> None:
    context = context_of("spark", pack=pack)
    labels = image.labels(context, BaseImage("b", "b"))
    note = ImageNote("spark", {"labels": labels}, {}, {}, {})
    assert _as_made(context_of("spark"), note).pack == pack
