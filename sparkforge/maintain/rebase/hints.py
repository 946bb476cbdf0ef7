"""Hints for a person with a conflict: upstream's changes there, and the new place of the lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkforge.core import git, gitread
from sparkforge.maintain.rebase import diffs
from sparkforge.maintain.rebase.workspace import Unmerged
from sparkforge.series.patchfile import Patch
from sparkforge.sources.sources import Source

_PLACES = 3  # a line in more places tells nothing
_LINES = 5  # so many of the longest lines are looked for …
_TELLING = 20  # … which have at least so many characters


def for_conflict(
    patch: Patch,
    diff: bytes,
    missing: Mapping[str, str | None],
    old: Source,
    new: Source,
    unmerged: Sequence[Unmerged],
) -> list[str]:
    """Return hints for each file in conflict: the probable change of the new release.

    Args:
        diff: the patch's, on the old release.
        missing: files that the new release lacks, with their new names (``PatchRebaser.missing``).
        old, new: trees of one upstream, in one repository.
        unmerged: the files in conflict.
    """
    parts = diffs.hunks(diff)
    by_path = {entry.path: part for entry, part in zip(patch.entries, parts, strict=False)}
    back = {to: path for path, to in missing.items() if to is not None}
    lines = []
    with gitread.reading(new.repo) as reader:
        for file in unmerged:
            path, before_path = file.path, back.get(file.path, file.path)
            part = by_path.get(path) or by_path.get(before_path)
            if part is None or 2 not in file.blobs:
                continue
            # results of earlier patches are in the workspace, not in the store
            now = (reader.find(file.blobs[2]) or ("", b""))[1]
            before = reader.content(old.commit, path) or reader.content(old.commit, before_path)
            if b"\r\n" in now and b"\r\n" not in (before or b""):
                hint: str | None = "its lines now end in CR LF"
            else:
                hint = diffs.reworded(part, now, before or b"") or diffs.reindented(part, now)
            lines.append(f"{path}: {hint or _moved(old, new, path, part, now)}")
    return lines


def _moved(old: Source, new: Source, path: str, part: list[diffs.Hunk], now: bytes) -> str:
    """Return the other files in which a line of the patch's context is now."""
    lines = [line.decode(errors="replace") for line in diffs.distinctive(part, now)]
    lines = [line for line in lines if len(line) >= _TELLING][:_LINES]
    # one search, only in files of its kind in its part of the tree: each file is unpacked
    top, suffix = path.partition("/")[0] if "/" in path else "", Path(path).suffix
    where = f":(glob){top}/**/*{suffix}" if top else f":(glob)*{suffix}"
    found = _places(new, lines, where)
    known = _places(old, list(found), where)
    # a line that was there before has not moved there
    places = {
        line: [name for name in names if name not in known.get(line, ())]
        for line, names in found.items()
    }
    for line in lines:
        # a line in many files tells nothing about this one
        names = [name for name in places.get(line, ()) if name != path]
        if 0 < len(names) <= _PLACES:
            shown = ", ".join(f"{name}:{found[line][name]}" for name in names)
            return f"its context may have moved: `{line[:60]}` is now at {shown}"
    return "upstream changed the same lines"


def _places(source: Source, lines: Sequence[str], where: str) -> dict[str, dict[str, str]]:
    """Return the places of lines in a tree: by line, the files and the number in each."""
    if not lines:
        return {}
    wanted = [word for line in lines for word in ("-e", line)]
    grep = ("grep", "-F", "-z", "-I", "-n", *wanted, source.commit, "--", where)
    code, listing = git.attempt(source.repo, *grep)
    places: dict[str, dict[str, str]] = {}
    for hit in listing.splitlines() if code == 0 else ():
        name, number, text = hit.split("\0", 2) if hit.count("\0") >= 2 else ("", "", "")
        if text.strip() in lines:
            places.setdefault(text.strip(), {})[name.partition(":")[2]] = number
    return places
