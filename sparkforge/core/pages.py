"""Generated pages, by jinja2: values are escaped, and a missing name is an error.

A template is stored beside the module that fills it. In ``NAME.md.j2`` values are escaped for
Markdown, in ``NAME.svg.j2`` for XML, in ``NAME.html.j2`` for HTML.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

_STYLE = """<style>
text { fill: #1f2328 } .paper { fill: #ffffff }
.grid { stroke: #d1d9e0 } .axis { stroke: #59636e } .open { fill: none; stroke: #59636e }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .paper { fill: #0d1117 }
.grid { stroke: #30363d } .axis { stroke: #9198a1 } .open { stroke: #9198a1 }
}
</style>"""
"""Style of pictures: text and lines for light and dark; other colours are readable on both."""
_SPECIAL = re.compile(r"([\\*_<>\[\]])")


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()


def escape(value: object) -> str:
    """Return a value escaped for Markdown, on one line, also in a table's cell.

    Code between backticks stays code.
    """
    if isinstance(value, Markdown):
        return value
    parts = " ".join(str(value).split()).split("`")
    # inside backticks only | is special; the last of an odd number of backticks is plain text
    plain = [
        part if i % 2 and i < len(parts) - 1 else _SPECIAL.sub(r"\\\1", part)
        for i, part in enumerate(parts)
    ]
    return Markdown("`".join(plain).replace("|", "\\|"))


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], right: Collection[int] = ()
) -> Markdown:
    """Return a Markdown table, its values escaped.

    Args:
        right: columns of numbers, from 0.
    """
    rule = [Markdown("---:" if i in right else "---") for i in range(len(head))]
    lines = ("| " + " | ".join(map(escape, row)) + " |" for row in (head, rule, *rows))
    return Markdown("\n".join(lines))


def render(template: Path, **values: object) -> str:
    """Return a template's page.

    Raises:
        jinja2.UndefinedError: a name in the template has no value.
    """
    import jinja2  # most commands write no page
    from markupsafe import Markup

    markdown = template.name.endswith(".md.j2")
    environment = jinja2.Environment(
        autoescape=not markdown,
        finalize=escape if markdown else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["table"] = table
    environment.globals["style"] = Markup(_STYLE)
    text = template.read_text(encoding="utf-8")
    return environment.from_string(text).render(values)
