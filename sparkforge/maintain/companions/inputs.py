"""requirements/*.in, which copy what wheels declare: the copies follow a new wheel.

Lines that are ours stay: what the wheel declares and we left out is left out again, and a line that
the wheel never had is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

_COMMENT = re.compile(r"\s#")


def follow(
    text: str, old: Sequence[Requirement], new: Sequence[Requirement], without: frozenset[str]
) -> tuple[str, list[str]]:
    """Return a list with what changed from one wheel's declarations to another's.

    Args:
        without: canonical names that a target leaves out (``drop_requires``).

    Returns:
        The list, and the requirements that changed in the wheel and of which the list has a form
        of its own, for people.
    """
    before, after = plain(old), plain(new)
    fresh = [one for one in after if one not in before]
    lines: list[str] = []
    last = 0  # behind the last line that the wheel declares
    for line in text.splitlines():
        found = read(line)
        if found in before and found not in after:
            to = next((one for one in fresh if name_of(one) == name_of(found)), None)
            last = len(lines)
            if to is not None:
                fresh.remove(to)
                lines.append(str(to))
                last += 1
            continue
        lines.append(line)
        if found in before or found in after:
            last = len(lines)
    have = {name_of(one): one for one in listed("\n".join(lines))}
    known = {name_of(one) for one in before}
    ours = []
    for one in fresh:
        name = name_of(one)
        if name in without or one in map(read, lines):
            continue
        if name not in known:
            lines.insert(last, str(one))
            last += 1
        elif name in have:  # else left out before, too
            ours.append(f"{have[name]}, where the wheel declares {one}")
    return "\n".join(lines) + "\n", ours


def pinned(text: str, moved: Mapping[str, tuple[str, str]]) -> str:
    """Return a list whose exact pins of moved packages move with them.

    Args:
        moved: old and new version by canonical name.
    """
    lines = []
    for line in text.splitlines():
        found = read(line)
        old, to = moved.get(name_of(found), ("", "")) if found is not None else ("", "")
        exact = found is not None and str(found.specifier) == f"=={old}"
        lines.append(line.replace(f"=={old}", f"=={to}", 1) if exact else line)
    return "\n".join(lines) + "\n"


def renamed(text: str, old: str, new: str) -> str:
    """Return a list whose comments name the new version of what it copies."""
    version = re.compile(rf"(?<![\w.]){re.escape(old)}(?![\w.]*\w)")
    lines = text.splitlines(keepends=True)
    return "".join(version.sub(new, line) if line.startswith("#") else line for line in lines)


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


def name_of(requirement: Requirement) -> str:
    """Return a requirement's canonical name."""
    return str(canonicalize_name(requirement.name))
