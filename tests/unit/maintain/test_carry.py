"""docs/carry.md, which is made with a network, agrees with the series without one."""

from __future__ import annotations

import re

import pytest

from sparkforge.pins import pins
from sparkforge.series import series
from tests.support import ROOT

PINS = pins.load(ROOT / "pins.yaml")
PAGE = (ROOT / "docs" / "carry.md").read_text(encoding="utf-8")
TABLES = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("upstream", PINS.upstreams)
def test_its_rows_are_the_series_and_its_columns_have_the_pin(upstream: str) -> None:
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLES[upstream].splitlines()
        if line.startswith("|")
    ]
    names = [
        patch.name.removesuffix(".patch")
        for patch in series.read(ROOT / "patches" / upstream).patches
    ]
    assert [row[0] for row in rows] == names, "build.py rebase --all --onto latest:3 --table"
    pinned = PINS.upstreams[upstream]
    owner = PINS.upstreams[pinned.source_in or upstream]
    assert f"{owner.version} (pinned)" in head
