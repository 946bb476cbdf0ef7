"""requirements/*.in, which copy what wheels declare: the copies follow a new wheel.

Lines that are ours stay: what the wheel declares and we left out is left out again, and a line that
the wheel never had is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

_COMMENT = re.compile(r"\s#")


@dataclass(frozen=True)
class Followed:
    """A list of requirements that follows a wheel."""

    text: str
    changes: tuple[str, ...]
    """Each line that changed, for people."""
    ours: tuple[str, ...]
    """Requirements that changed in the wheel, and of which the list has a form of its own."""


def follow(
    text: str, old: Sequence[Requirement], new: Sequence[Requirement], without: frozenset[str]
) -> Followed:
    """Return a list with what changed from one wheel's declarations to another's.

    Args:
        without: canonical names that a target leaves out (``drop_requires``).
    """
    before, after = plain(old), plain(new)
    gone = [one for one in before if one not in after]
    fresh = [one for one in after if one not in before]
    lines: list[str] = []
    changes, ours = [], []
    last = 0  # behind the last line that the wheel declares
    for line in text.splitlines():
        found = read(line)
        if found is not None and found in gone:
            to = next((one for one in fresh if _name(one) == _name(found)), None)
            changes.append(f"{_short(found)} → {_short(to) if to is not None else 'gone'}")
            if to is None:
                last = len(lines)
                continue
            fresh.remove(to)
        else:
            to = None
        lines.append(line if to is None else str(to))
        if found is not None and found in (*before, *after):
            last = len(lines)
    have = {_name(one): one for one in listed("\n".join(lines))}
    known = {_name(one) for one in before}
    for one in fresh:
        name = _name(one)
        if name in without or one in map(read, lines):
            continue
        if name in known and name not in have:
            continue  # left out before, too
        if name in have and name in known:
            ours.append(f"{_short(have[name])}, where the wheel declares {_short(one)}")
            continue
        lines.insert(last, str(one))
        last += 1
        changes.append(f"{_short(one)}: new")
    return Followed("\n".join(lines) + "\n", tuple(changes), tuple(ours))


def pinned(text: str, moved: Mapping[str, tuple[str, str]]) -> Followed:
    """Return a list whose exact pins of moved packages move with them.

    Args:
        moved: old and new version by canonical name.
    """
    lines, changes = [], []
    for line in text.splitlines():
        found = read(line)
        if found is not None:
            old, to = moved.get(_name(found), ("", ""))
            if old and str(found.specifier) == f"=={old}":
                changes.append(f"{_short(found)} → {to}")
                line = line.replace(f"=={old}", f"=={to}", 1)  # noqa: PLW2901
        lines.append(line)
    return Followed("\n".join(lines) + "\n", tuple(changes), ())


def renamed(text: str, old: str, new: str) -> str:
    """Return a list whose comments name the new version of what it copies."""
    version = re.compile(rf"(?<![\w.]){re.escape(old)}(?![\w.]*\w)")
    return "".join(
        version.sub(new, line) if line.startswith("#") else line
        for line in text.splitlines(keepends=True)
    )


def read(line: str) -> Requirement | None:
    """Return the requirement of a line; None where it is none."""
    try:
        return Requirement(_COMMENT.split(line.strip())[0].strip())
    except InvalidRequirement:
        return None


def listed(text: str) -> list[Requirement]:
    """Return the requirements of a list, in order."""
    return [found for line in text.splitlines() if (found := read(line)) is not None]


def plain(requirements: Sequence[Requirement]) -> list[Requirement]:
    """Return those that no extra asks for."""
    return [one for one in requirements if "extra ==" not in str(one.marker or "")]


def _short(requirement: Requirement) -> str:
    """Return a requirement without its marker, for people."""
    return str(requirement).partition(";")[0]


def _name(requirement: Requirement) -> str:
    return str(canonicalize_name(requirement.name))
