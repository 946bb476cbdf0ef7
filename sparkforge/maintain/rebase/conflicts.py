"""Conflicts: their hunks by class, a provisional resolution, and hints about their cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge.core import git
from sparkforge.maintain.rebase.tree import Tree, Unmerged

Kind = Literal["imports", "both insert", "overlap"]
MARKER = re.compile(rb"^(<{7}|\|{7}|>{7})( |\r?$)", re.MULTILINE)  # ======= may be a heading
_HUNK = re.compile(
    rb"^<{7}[^\n]*\n(.*?)^\|{7}[^\n]*\n(.*?)^={7}\r?\n(.*?)^>{7}[^\n]*\n?", re.MULTILINE | re.DOTALL
)
_IMPORT = re.compile(rb"(from \S+ import\b|import\s|#\s*include\b|[\w.]+( as \w+)?,$|[()]+$)")
_PLACES = 3  # a line in more places tells nothing
_LINES = 5  # so many of the longest lines are looked for …
_TELLING = 20  # … which have at least so many characters


@dataclass(frozen=True)
class Hunk:
    """One conflict in a file: the lines of the new release, of the base and of the patch."""

    new: bytes
    base: bytes
    patch: bytes

    @property
    def kind(self) -> Kind:
        lines = [line for text in (self.new, self.base, self.patch) for line in _bare(text)]
        if all(map(_IMPORT.match, lines)):
            return "imports"
        return "overlap" if self.base.strip() else "both insert"


def hunks(text: bytes) -> list[Hunk]:
    """Return the conflicts that git marked in a file."""
    return [Hunk(*match.groups()) for match in _HUNK.finditer(text)]


def counted(found: Sequence[Hunk]) -> str:
    """Return the number of hunks of each class, for people."""
    kinds = Counter(hunk.kind for hunk in found)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def resolve_provisionally(tree: Tree) -> None:
    """Stage a guess, so that later patches can be tried: both sides, or where they overlap ours.

    rerere forgets it.
    """
    for file in tree.unmerged():
        path = tree.path / file.path
        if path.is_file() and not path.is_symlink():
            path.write_bytes(_HUNK.sub(_guess, path.read_bytes()))
    tree.git("add", "--all")
    tree.git("rerere", "clear")


def _guess(match: re.Match[bytes]) -> bytes:
    hunk = Hunk(*match.groups())
    return hunk.patch if hunk.kind == "overlap" else hunk.new + hunk.patch


# -- hints -------------------------------------------------------------------------------------


def hints(tree: Tree, old: str, new: str, files: Sequence[Unmerged]) -> Iterator[str]:
    """Yield a line for each text file in conflict: its hunks, and upstream's probable change.

    Args:
        old, new: commits of the two releases.
    """
    for file in files:
        path = tree.path / file.path
        found = hunks(path.read_bytes()) if path.is_file() and not path.is_symlink() else []
        if found:
            # the file as earlier patches of the series left it, on either release
            before, now = tree.blob(file.blobs.get(1)), tree.blob(file.blobs.get(2))
            hint = _hint(found, before, now) or _moved(tree, old, new, file.path, found, now)
            yield f"{file.path}: {counted(found)}: {hint}"


def _hint(found: Sequence[Hunk], before: bytes, now: bytes) -> str | None:
    if b"\r\n" in now and b"\r\n" not in before:
        return "its lines now end in CR LF"
    fresh = {*_bare(now)} - {*_bare(before)}
    added = [line for hunk in found for line in _bare(hunk.patch) if line not in _bare(hunk.base)]
    there = sum(line in fresh for line in added)
    if added and 2 * there >= len(added):
        return (
            f"{there} of the {len(added)} lines it adds already exist: upstream may have the same"
            " fix in another form"
        )
    if all(
        hunk.base.strip() and b"\n".join(_bare(hunk.base)) in b"\n".join(_bare(hunk.new))
        for hunk in found
    ):
        return "only white space of its context differs"
    return None


def _bare(text: bytes) -> list[bytes]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _moved(tree: Tree, old: str, new: str, path: str, found: Sequence[Hunk], now: bytes) -> str:
    """Return the other files in which a line that the patch stands on is now."""
    gone = {line for hunk in found for line in _bare(hunk.base)} - {*_bare(now)}
    lines = sorted(
        (line.decode(errors="replace") for line in gone if len(line) >= _TELLING),
        key=lambda line: (-len(line), line),
    )[:_LINES]
    # one search, only in files of its kind in its part of the tree: each file is unpacked
    top, suffix = path.partition("/")[0] if "/" in path else "", Path(path).suffix
    where = f":(glob){top}/**/*{suffix}" if top else f":(glob)*{suffix}"
    there, known = _places(tree, new, lines, where), _places(tree, old, lines, where)
    for line in lines:
        # a line that was there before has not moved there
        places = there.get(line, {}).items() - known.get(line, {}).items()
        shown = sorted(
            f"{name}:{number}" for name, number in places if name not in known.get(line, {})
        )
        if 0 < len(shown) <= _PLACES:
            return f"its context may have moved: `{line[:60]}` is now at {', '.join(shown)}"
    return "upstream changed the same lines"


def _places(tree: Tree, commit: str, lines: Sequence[str], where: str) -> dict[str, dict[str, str]]:
    """Return the places of lines in a tree: by line, the files and the number in each."""
    wanted = [word for line in lines for word in ("-e", line)]
    grep = ("grep", "-F", "-z", "-I", "-n", *wanted, commit, "--", where)
    code, listing = git.attempt(tree.path, *grep) if lines else (1, "")
    places: dict[str, dict[str, str]] = {}
    for hit in listing.splitlines() if code == 0 else ():
        name, number, text = hit.split("\0", 2) if hit.count("\0") >= 2 else ("", "", "")
        if text.strip() in lines:
            places.setdefault(text.strip(), {})[name.partition(":")[2]] = number
    return places
