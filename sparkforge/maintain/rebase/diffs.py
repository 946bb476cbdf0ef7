"""Diffs read as hunks: a patch's own lines, and hints about a conflict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FILE = re.compile(rb"^diff --git ", re.MULTILINE)


@dataclass(frozen=True)
class Hunk:
    """One hunk: its removed, added and context lines, each without its mark."""

    before: tuple[bytes, ...]
    """Context and removed lines, in order: the text that must be there."""
    own: tuple[bytes, ...]
    """Added and removed lines with their marks, in order."""

    @property
    def added(self) -> tuple[bytes, ...]:
        return tuple(line[1:] for line in self.own if line.startswith(b"+"))

    @property
    def removed(self) -> tuple[bytes, ...]:
        return tuple(line[1:] for line in self.own if line.startswith(b"-"))


def hunks(diff: bytes) -> list[list[Hunk]]:
    """Return the hunks of each file of a diff, in order; a mode counts as one."""
    return [_hunks(part) for part in _FILE.split(diff)[1:]]


def _hunks(part: bytes) -> list[Hunk]:
    head, *rest = re.split(rb"^@@ [^\n]*\n", part, flags=re.MULTILINE)
    if not rest:  # a mode: no lines, so all of it counts
        return [Hunk((), tuple(b"+" + line for line in head.splitlines()[1:]))]
    hunks = []
    for text in rest:
        lines = [line for line in text.split(b"\n") if line[:1] in (b" ", b"+", b"-")]
        before = tuple(line[1:] for line in lines if not line.startswith(b"+"))
        hunks.append(Hunk(before, tuple(line for line in lines if not line.startswith(b" "))))
    return hunks


def own_lines(diff: bytes) -> list[list[bytes]]:
    """Return the added and removed lines of each file, in order, the files' names left out."""
    return [[line for hunk in file for line in hunk.own] for file in hunks(diff)]


# -- hints about a conflict --------------------------------------------------------------


def plain(lines: Sequence[bytes]) -> list[bytes]:
    """Return the lines without indentation, and without trivial ones (braces, blanks)."""
    bare = (line.strip() for line in lines)
    return [line for line in bare if len(re.findall(rb"\w", line)) > 3]


def reworded(diff_of_file: Sequence[Hunk], now: bytes, before: bytes) -> str | None:
    """Return whether the new release added most of the lines that a patch adds."""
    have = set(plain(now.splitlines())) - set(plain(before.splitlines()))
    added = plain([line for hunk in diff_of_file for line in hunk.added])
    there = [line for line in added if line in have]
    if len(added) and 2 * len(there) >= len(added):
        return (
            f"{len(there)} of the {len(added)} lines it adds already exist: upstream may have"
            " the same fix in another form"
        )
    return None


def reindented(diff_of_file: Sequence[Hunk], now: bytes) -> str | None:
    """Return whether a patch's context exists with other white space."""
    lines = now.splitlines()
    bare = [line.strip() for line in lines]
    for hunk in diff_of_file:
        expected = [line.strip() for line in hunk.before]
        if len(plain(expected)) < 2:
            continue
        for at in range(len(bare) - len(expected) + 1):
            if bare[at : at + len(expected)] == expected and lines[at : at + len(expected)] != list(
                hunk.before
            ):
                return f"only white space of its context differs, at line {at + 1}"
    return None


def distinctive(diff_of_file: Sequence[Hunk], now: bytes) -> list[bytes]:
    """Return lines that a patch needs and the new file lacks, the longest first."""
    have = set(plain(now.splitlines()))
    gone = {
        line
        for hunk in diff_of_file
        for line in plain(hunk.before)
        if line not in have and not line.startswith((b"from ", b"import ", b"#"))
    }
    return sorted(gone, key=lambda line: (-len(line), line))
