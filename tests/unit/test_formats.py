"""The page of evidence about formats, and the bars in it, from the record of a run."""

import json

import pytest

from benchmarks import formats


def recorded() -> formats.Record:
    found: formats.Record = json.loads(formats.RECORD.read_bytes())
    return found


def test_the_page_is_that_of_the_record() -> None:
    """Else: PYTHON benchmarks/formats.py --page."""
    assert formats.PAGE.read_text(encoding="utf-8") == formats.page(recorded())


def test_bars_compare_the_profiles_formats() -> None:
    record = recorded()
    assert {row[-1] for row in formats.bars(record)} == {"yes"}
    fast = formats.row_of(record, formats.PROFILES["fast"])
    formats.row_of(record, "MXFP8")["kl"] = fast["kl"] * 3.9  # four times are wanted
    wanted = "KL at most 0.25 times MXFP8's"
    assert ("fast", "INT6", wanted, "0.256", "**no**") in formats.bars(record)
    assert formats.beaten(record, fast) == ""


def test_profiles_formats_are_served_too() -> None:
    record = recorded()
    assert [row["name"] for row in record["served"]] == list(formats.SERVED)
    exact, stored = record["served"][0], formats.row_of(record, "BF16")
    assert (exact["kl"], exact["same"]) == (0, 1)
    assert exact["perplexity"] == pytest.approx(stored["perplexity"], rel=0.01)
    assert all(row["covered"] > 0.9 for row in record["served"])
