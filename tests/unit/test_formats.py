"""The page of evidence about formats, and the bars in it, from the record of a run."""

from benchmarks import formats


def recorded() -> formats.Record:
    return formats.Record.model_validate_json(formats.RECORD.read_bytes())


def test_the_page_is_that_of_the_record() -> None:
    """Else: PYTHON benchmarks/formats.py --page."""
    assert formats.PAGE.read_text(encoding="utf-8") == formats.page(recorded())


def test_bars_are_judged_by_the_nearest_format_of_the_bytes() -> None:
    record = recorded()
    fast = [bar for bar in formats.bars(record) if bar.profile == "fast"]
    rows = [record.row(bar.format) for bar in fast]
    assert [row.name.endswith(formats.WITH) for row in rows] == [False, True]
    for row in rows:
        assert 6 <= row.bits <= 6.6
        row.kl /= 1000
    assert all(bar.met for bar in formats.bars(record) if bar.profile == "fast")
    record.row("MXFP8").kl = rows[0].kl * 3.9  # four times are wanted
    assert not formats.bars(record)[-4].met
    assert formats.bars(record)[-4].found == "0.256"
    assert record.beaten(rows[0]) in ("", rows[1].name)
