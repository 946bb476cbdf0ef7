"""`tools.proofs decode-kernels`: from the stage's files to a verdict and a record.

The compiler and the reader of machine code are made up; the listings are recorded ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.check.perf import kernelrecord
from sparkforge.check.proofs import cuobjdump
from sparkforge.core.errors import CheckError, PinsError
from sparkforge.sources import project as projects
from sparkforge.sources.project import ProjectOptions
from tests.kernels import SOURCE, with_kernels
from tests.kernels import toolchain as compiler
from tests.project import Project
from tests.support import ROOT
from tools.proofs import __main__ as command
from tools.proofs import decode

DENSE = "dense_mxfp8_narrow_12_8"
CODE = f"kernel {DENSE} 80 6144 0 0\nkernel experts_combine 40 64 0 0\n".encode()


@dataclass(frozen=True)
class Recorded(cuobjdump.Readers):
    """Gives a recorded listing for any cubin."""

    def run(self, *words: str | Path, cwd: Path | None = None) -> str:
        assert words[0] == "--dump-resource-usage"
        assert Path(words[1]).is_file()
        return (ROOT / "tests" / "data" / "proofs" / "decode-121a.usage").read_text()


@pytest.fixture
def opened(project: Project, tmp_path: Path) -> projects.Project:
    with_kernels(project, compiler(tmp_path / "compiler"), CODE)
    return projects.Project.open(
        ProjectOptions(pins=project.root / "pins.yaml", store=project.store)
    )


def test_stage_matches_its_manifest(opened: projects.Project, tmp_path: Path) -> None:
    stage = decode.read(opened, Recorded(tmp_path, ""))
    assert list(stage.record.sources) == [SOURCE, "own/csrc/more.cuh"]
    assert stage.record.compiler == "13.0.1"
    assert set(stage.record.kernels) == {"121a", "90a"}
    assert [decode.problems(stage, arch) for arch in ("121a", "90a")] == [[], []]
    assert decode.problems(stage, "120a") == ["no machine code for sm_120a"]


def test_project_without_kernels_is_an_error(project: Project, tmp_path: Path) -> None:
    bare = projects.Project.open(
        ProjectOptions(pins=project.root / "pins.yaml", store=project.store)
    )
    with pytest.raises(CheckError):
        decode.read(bare, Recorded(tmp_path, ""))


def test_command_writes_the_record_and_compares_it(
    opened: projects.Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "record.json"
    monkeypatch.setattr(cuobjdump, "readers", lambda *_: Recorded(tmp_path, ""))
    monkeypatch.setattr(kernelrecord, "FILE", file)
    words = ["decode-kernels", "--store", str(opened.store.root), "--pins", str(opened.pins_path)]
    assert command.main(words) == PinsError.exit_code
    # 120a is not among this project's architectures
    assert command.main([*words, "--record"]) == CheckError.exit_code
    written = kernelrecord.load(file)
    assert [kernel.name for kernel in written.kernels["90a"]] == [DENSE, "experts_combine"]
    report = json.loads((opened.root / "dist" / "proofs" / "report.json").read_text())
    assert [one["ok"] for one in report["proofs"]] == [True, False, True]
