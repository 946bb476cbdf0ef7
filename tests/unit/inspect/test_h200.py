"""docs/h200.yaml: its tables and pictures say what it says, and a wrong file is one error."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from sparkforge.core.errors import UsageError
from sparkforge.inspect.perf import h200
from tests.support import ROOT

FILE = ROOT / "docs/h200.yaml"
SVG = "{http://www.w3.org/2000/svg}"


def test_tables_have_every_figure() -> None:
    speeds = h200.load(FILE)
    lines = h200.markdown(speeds).splitlines()
    (fast,) = (line for line in lines if line.startswith("| series, fast |"))
    assert "| `qkv,o,lm_head` | 59.40 | 469, **1.85×** | 874, **1.78×** |" in fast
    (last,) = (line for line in lines if line.startswith("| rotary embedding"))
    assert last.endswith("| 1.85× | 1.75× | 1.60× | 1.37× | 29.1 | 88.7 |")


def test_pictures_have_a_point_for_each_figure() -> None:
    speeds = h200.load(FILE)
    for picture, rows in zip(h200.pictures(speeds), (speeds.runs, speeds.steps), strict=True):
        root = ET.fromstring(picture)
        assert len(root.findall(f"{SVG}circle")) == len(rows) * len(speeds.batches)
        ticks = [one.text for one in root.findall(f"{SVG}text")]
        assert {str(batch) for batch in speeds.batches} <= set(ticks)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[253, 492, 972, 1907]", "[253, 492, 972]", "one figure for each batch"),
        ("[31.3, 94.1]", "[31.3]", "one figure for each prompt"),
        ("gib: 66.14", "gib: much", "gib"),
        ("steps:", "stairs:", "steps: Field required"),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = FILE.read_text()
    assert old in text
    (tmp_path / "h200.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=words):
        h200.load(tmp_path / "h200.yaml")
