"""`build.py proofs decode-kernels`: from the stage's files to a verdict and a record.

The compiler and the reader of machine code are made up; the listings are recorded ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sparkforge.build.options import OutputOptions
from sparkforge.core.errors import ProofError, StaleError, UsageError
from sparkforge.inspect.perf import kernelwork
from sparkforge.inspect.proofs import command, stagekernels, toolchain, units
from sparkforge.inspect.proofs.command import Options
from sparkforge.sources import project as projects
from sparkforge.sources.project import ProjectOptions
from tests.kernels import SOURCE, with_kernels
from tests.kernels import toolchain as compiler
from tests.project import Project
from tests.support import ROOT

DATA = ROOT / "tests" / "data" / "proofs"
DENSE = "dense_mxfp8_narrow_12_8"
CODE = f"kernel {DENSE} 80 6144 0 0\nkernel experts_combine 40 64 0 0\n".encode()
(UNIT,) = (unit for unit in units.UNITS if unit.stage)
BOTH = replace(UNIT, archs=("121a", "90a"))
KINDS = {"-sass": "sass", "--dump-resource-usage": "usage", "-elf": "elf"}


@dataclass(frozen=True)
class Recorded(toolchain.Readers):
    """Gives recorded listings for any cubin, with a change, and counts its calls."""

    change: tuple[str, str]
    asked: list[str]

    def dump(self, what: str, cubin: Path) -> str:
        assert cubin.is_file()
        self.asked.append(f"{cubin.name} {what}")
        text = (DATA / f"decode-121a.{KINDS[what]}").read_text()
        return text.replace("sm_121a", cubin.stem).replace(*self.change)


def reader(tmp_path: Path, change: tuple[str, str] = ("", "")) -> Recorded:
    return Recorded(tmp_path, f"recorded {change}", change, [])


@pytest.fixture
def opened(project: Project, tmp_path: Path) -> projects.Project:
    with_kernels(project, compiler(tmp_path / "compiler"), CODE)
    return projects.Project.open(ProjectOptions(project.root / "pins.yaml", project.store))


def test_what_the_stage_made_is_read_once(opened: projects.Project, tmp_path: Path) -> None:
    readers = reader(tmp_path)
    found = stagekernels.read(opened, readers)
    assert found.fresh
    assert found.manifest.compiler == "13.0.1"
    assert list(found.sources) == [SOURCE, "own/csrc/more.cuh"]
    assert len(readers.asked) == 2 * len(KINDS)
    verdicts = stagekernels.prove(found, BOTH)
    assert [(verdict.job.label, verdict.ok) for verdict in verdicts] == [
        ("decode-kernels 121a", True),
        ("decode-kernels 90a", True),
    ]
    again = stagekernels.read(opened, readers)
    assert not again.fresh, "nothing is compiled twice"
    assert again.decoded == found.decoded
    assert len(readers.asked) == 2 * len(KINDS)


def test_a_bad_kernel_fails_by_its_name(opened: projects.Project, tmp_path: Path) -> None:
    found = stagekernels.read(opened, reader(tmp_path, ("LDG.E.EF.128", "LDG.E.EF.64")))
    (verdict, _) = stagekernels.prove(found, BOTH)
    assert not verdict.ok
    assert all(problem.startswith(f"{DENSE}: ") for problem in verdict.problems)
    assert "weights come 16 bytes at a time" in verdict.problems[0]


def test_an_architecture_without_code_fails(opened: projects.Project, tmp_path: Path) -> None:
    found = stagekernels.read(opened, reader(tmp_path))
    (verdict,) = stagekernels.prove(found, replace(UNIT, archs=("120a",)))
    assert verdict.problems == ("no kernels",)


def test_a_kernel_without_a_rule_is_an_error(opened: projects.Project, tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="brand_new: 0 rules"):
        stagekernels.read(opened, reader(tmp_path, ("experts_combine", "brand_new")))


def test_a_project_without_kernels_is_an_error(project: Project, tmp_path: Path) -> None:
    bare = projects.Project.open(ProjectOptions(project.root / "pins.yaml", project.store))
    with pytest.raises(ProofError, match="there are no decode kernels"):
        stagekernels.read(bare, reader(tmp_path))


def test_the_command_writes_the_record_and_compares_it(
    opened: projects.Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers, file = reader(tmp_path), tmp_path / "record.json"

    def given(*_: object) -> Recorded:
        return readers

    def no_nvcc() -> str:
        pytest.fail("nvcc is not needed")

    monkeypatch.setattr(toolchain, "readers", given)
    monkeypatch.setattr(toolchain, "nvcc_identity", no_nvcc)
    monkeypatch.setattr(kernelwork, "FILE", file)
    monkeypatch.setattr(units, "UNITS", (BOTH,))
    options = Options(
        names=("decode-kernels",),
        ci=False,
        list=False,
        jobs=None,
        record=False,
        project=ProjectOptions(opened.pins_path, opened.store.root),
        output=OutputOptions(),
    )
    with pytest.raises(StaleError, match=r"record\.json"):
        command.run(options)
    assert command.run(replace(options, record=True)) == 0
    written = kernelwork.load(file)
    assert [work.name for work in written.kernels["90a"]] == [DENSE, "experts_combine"]
    assert written.sources == stagekernels.read(opened, readers).sources
    assert command.run(options) == 0
    report: Mapping[str, object] = json.loads(
        (opened.root / "dist" / "proofs" / "report.json").read_text()
    )
    assert report["ok"] is True
    file.write_text(file.read_text().replace('"weights": 2048', '"weights": 4096'))
    with pytest.raises(StaleError, match=r"record\.json"):
        command.run(options)


def test_recording_needs_the_proof(tmp_path: Path) -> None:
    options = Options(
        names=("block-scaled-mma",),
        ci=False,
        list=False,
        jobs=None,
        record=True,
        project=ProjectOptions(None, tmp_path),
        output=OutputOptions(),
    )
    with pytest.raises(UsageError, match="--record needs the proof decode-kernels"):
        command.run(options)
