"""Generated pages: values are escaped, names that are missing are errors."""

from pathlib import Path

import jinja2
import pytest

from sparkforge.core import pages


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lm_head*2", r"lm\_head\*2"),
        ("a|b `c_d|e`", r"a\|b `c_d\|e`"),
        ("<f> [g]", r"\<f\> \[g\]"),
        ("two\nlines", "two lines"),
        (7, "7"),
        (pages.Markdown("**bold**"), "**bold**"),
    ],
)
def test_a_value_is_shown_as_it_is(text: object, shown: str) -> None:
    assert pages.escape(text) == shown


def test_a_table_escapes_cells_and_aligns_numbers() -> None:
    text = pages.table(("a_b", "n"), [("x|y", 1)], right=(1,))
    assert text.splitlines() == [r"| a\_b | n |", "| --- | ---: |", r"| x\|y | 1 |"]


def test_what_a_template_shows_is_escaped_in_its_language(tmp_path: Path) -> None:
    for name, shown in (("md", r"*kept* a\_b\<c\>"), ("svg", "*kept* a_b&lt;c&gt;")):
        template = tmp_path / f"page.{name}.j2"
        template.write_text("*kept* {{ value }}\n")
        assert pages.render(template, value="a_b<c>") == f"{shown}\n"
        with pytest.raises(jinja2.UndefinedError):
            pages.render(template)
