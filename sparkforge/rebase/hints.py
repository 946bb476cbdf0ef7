"""What may help a person with a conflict: what upstream did there, and where the lines went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkforge import git
from sparkforge.patchfile import Patch
from sparkforge.rebase import verdicts
from sparkforge.rebase.workspace import Unmerged
from sparkforge.sources import Source

_PLACES = 3  # a line that stands in more places than that tells nothing
_LINES = 5  # so many of the longest lines are looked for …
_TELLING = 20  # … which have at least so many characters


def about(
    patch: Patch, diff: bytes, missing: Mapping[str, str | None], new: Source,
    unmerged: Sequence[Unmerged],
) -> list[str]:  # fmt: skip
    """Say, for each file in conflict, what the new release seems to have done there.

    Args:
        diff: the patch's, on the old release.
        missing: files that the new release lacks, with their new names (``Mover.missing``).
        unmerged: the files in conflict.
    """
    parts = verdicts.hunks(diff)
    by_path = {entry.path: part for entry, part in zip(patch.entries, parts, strict=False)}
    back = {to: path for path, to in missing.items() if to is not None}
    said = []
    for one in unmerged:
        part = by_path.get(one.path) or by_path.get(back.get(one.path, ""))
        if part is None or 2 not in one.blobs:
            continue
        # what an earlier patch of this rebase made lies in the workspace, not in the store
        there = git.git_ok(new.repo, "cat-file", "-e", one.blobs[2])
        now = git.blob(new.repo, one.blobs[2]) if there else b""
        hint = verdicts.reworded(part, now) or verdicts.reindented(part, now)
        said.append(f"{one.path}: {hint or _moved(new, one.path, part, now)}")
    return said


def _moved(new: Source, path: str, part: list[verdicts.Hunk], now: bytes) -> str:
    """Say where a line that the patch stands on is now, in other files."""
    lines = [line.decode(errors="replace") for line in verdicts.distinctive(part, now)]
    lines = [line for line in lines if len(line) >= _TELLING][:_LINES]
    # one look, and only at files of its kind in its part of the tree: each file is unpacked
    top, suffix = path.partition("/")[0] if "/" in path else "", Path(path).suffix
    where = f":(glob){top}/**/*{suffix}" if top else f":(glob)*{suffix}"
    code, listing = 1, ""
    if lines:
        code, listing = git.attempt(
            new.repo, "grep", "-F", "-z", "-I", "-n",
            *(word for line in lines for word in ("-e", line)), new.commit, "--", where,
        )  # fmt: skip
    places: dict[str, list[tuple[str, str]]] = {}
    for found in listing.splitlines() if code == 0 else ():
        name, number, text = found.split("\0", 2) if found.count("\0") >= 2 else ("", "", "")
        if text.strip() in lines and (file := name.partition(":")[2]) != path:
            places.setdefault(text.strip(), []).append((file, number))
    for line in lines:
        # a line that stands in many files says nothing about this one
        if line in places and len(places[line]) <= _PLACES:
            shown = ", ".join(f"{name}:{number}" for name, number in places[line])
            return f"what it stands on may have moved: `{line[:60]}` is at {shown} now"
    return "upstream changed the same lines"
