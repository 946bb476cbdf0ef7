"""The page of evidence about formats, and the bars in it, from the record of a run."""

from benchmarks import formats


def recorded() -> formats.Record:
    return formats.Record.model_validate_json(formats.RECORD.read_bytes())


def test_the_page_is_that_of_the_record() -> None:
    """Else: PYTHON benchmarks/formats.py --page."""
    assert formats.PAGE.read_text(encoding="utf-8") == formats.page(recorded())


def test_bars_are_judged_by_the_nearest_format_of_the_bytes() -> None:
    record = recorded()
    wanted = {bar.profile: bar.format for bar in formats.bars(record)}
    row = record.row(wanted["fast"])
    assert 6 <= row.bits <= 6.6
    row.kl = record.row("MXFP8").kl * 0.26  # of a quarter
    (bar,) = (bar for bar in formats.bars(record) if bar.profile == "fast")
    assert bar.format != row.name or (bar.found, bar.met) == ("0.26", False)
    assert record.beaten(row) not in ("", row.name)
