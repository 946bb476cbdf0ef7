"""The section of a release in CHANGELOG.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = "CHANGELOG.md"
_HEAD = re.compile(r"^## (?P<version>\S+) \((?P<date>[^)]*)\)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """The changes of a release.

    Attributes:
        date: as the heading has it: YYYY-MM-DD, or ``unreleased``.
        text: below the heading.
    """

    version: str
    date: str
    text: str


def sections(text: str) -> list[Section]:
    """Return the sections of a changelog, newest first as in the file.

    A section begins with ``## VERSION (DATE)``.
    """
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return [
        Section(head["version"], head["date"], text[head.end() : end].strip())
        for head, end in zip(heads, ends, strict=True)
    ]
