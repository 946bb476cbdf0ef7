"""Parts of the plugin that are switched off: their tests must notice."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from sparkforge.core.index import Index
from sparkforge.maintain import ablate
from sparkforge.pins import pins
from sparkforge.pins.compiling import Plugin
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store
from tests.support import ROOT

TEST = """
import os, pytest

@pytest.mark.parametrize("part", ["other", "rotary"])
def test_it(part): assert f'"{part}"' not in os.environ.get("VLLM_SPARKFORGE", "")
def test_blind(): pass
"""


def _plugin(folder: str) -> Plugin:
    return Plugin(folder=folder, architectures=("90a",), requirements="requirements/kernels.txt")


def test_a_part_is_noticed_by_its_test_alone(tmp_path: Path) -> None:
    (tmp_path / "test_part.py").write_text(TEST, encoding="utf-8")
    (tmp_path / "test_gone.py").write_text("import no_such_module")  # the others run nevertheless
    tests = {"rotary": "test_part.py::test_it", "norms": "test_part.py::test_blind"}
    tests["gone"] = "test_gone.py::test_it"
    loaded = pins.load(ROOT / "pins.yaml")
    access = Access(Index(), {}, offline=True)
    here = Project(tmp_path / "pins.yaml", loaded, Store(tmp_path / "store"), access)
    rotary, norms, gone = ablate.of_parts(here, Path(sys.executable), tests)
    assert (rotary.patch, rotary.verdict) == ("rotary", "noticed")
    assert (norms.patch, norms.verdict) == ("norms", "not noticed")
    assert (gone.patch, gone.verdict) == ("gone", "fails in any case")


def test_each_part_that_can_be_switched_off_has_a_test() -> None:
    source = (ROOT / "kernels/vllm_sparkforge/options.py").read_text(encoding="utf-8")
    (line,) = (line for line in source.splitlines() if line.startswith("PARTS = "))
    named = ablate.parts_of(ROOT, _plugin("kernels/"))
    assert sorted(named) == sorted(ast.literal_eval(line.partition("=")[2].strip()))
    for test in named.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
