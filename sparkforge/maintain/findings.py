"""What people need to know of a merge: verdict, kinds of conflicts, and what git cannot see.

Git merges text: a patch whose own lines call a function merges silently into a tree in which that
function has another name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparkforge.core import git
from sparkforge.core.run import call

if TYPE_CHECKING:
    from sparkforge.maintain.releases import Move


class Verdict(StrEnum):
    """The verdict on a patch; each patch gets exactly one (docs/rebase.md says what they mean)."""

    CLEAN = "clean"
    CONTEXT_ONLY = "context-only"
    CHANGED = "changed"
    UPSTREAMED = "upstreamed"
    CONFLICT = "conflict"
    TARGET_RENAMED = "target-renamed"
    TARGET_DELETED = "target-deleted"


@dataclass(frozen=True)
class PatchResult:
    """The result of one patch."""

    patch: str
    verdict: Verdict
    stops: bool = False
    """A person must resolve it (or skip it)."""
    detail: tuple[str, ...] = ()
    """Findings for people, as lines."""
    files: tuple[str, ...] = ()
    """In conflict."""
    commit: str | None = None
    """The moved commit; None where there is none (stopped, dropped, skipped)."""
    answer: str = ""
    """``resolved by hand``, ``dropped by hand``, ``remembered``, or nothing."""

    def row(self) -> tuple[str, str]:
        """Return it as a row of a table."""
        shown = f"{'! ' if self.stops else ''}{self.verdict}"
        shown += f" ({self.answer})" if self.answer else ""
        return self.patch.removesuffix(".patch"), shown


HEAD = ("patch", "verdict")


# -- conflicts -----------------------------------------------------------------------------------

MARKER = re.compile(rb"^(<{7}|\|{7}|>{7})( |\r?$)", re.MULTILINE)  # ======= may be a heading
_HUNK = re.compile(
    rb"^<{7}[^\n]*\n(.*?)^\|{7}[^\n]*\n(.*?)^={7}\r?\n(.*?)^>{7}[^\n]*\n?", re.MULTILINE | re.DOTALL
)
_IMPORT = re.compile(rb"(from \S+ import\b|import\s|#\s*include\b|[\w.]+( as \w+)?,$|[()]+$)")


def _kind(hunk: re.Match[bytes]) -> Literal["imports", "both insert", "overlap"]:
    """Return the kind of a hunk: lines of the new release, of the base and of the patch."""
    if all(
        map(_IMPORT.match, filter(None, map(bytes.strip, b"".join(hunk.groups()).splitlines())))
    ):
        return "imports"
    return "overlap" if hunk[2].strip() else "both insert"


def resolve_provisionally(tree: Path, files: Iterable[str]) -> None:
    """Write a guess into files in conflict: both sides, or where they overlap the patch's."""

    def guess(match: re.Match[bytes]) -> bytes:
        return match[3] if _kind(match) == "overlap" else match[1] + match[3]

    for path in (tree / file for file in files):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(_HUNK.sub(guess, path.read_bytes()))


def hints(tree: Path, files: Iterable[str]) -> Iterator[str]:
    """Yield a line for each text file in conflict: its hunks by kind."""
    for name in files:
        path = tree / name
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if kinds := Counter(map(_kind, _HUNK.finditer(data))):
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            yield f"{name}: {counts}"


# -- what merged ---------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{5,}")


def of_merged(tree: Path, root: Path, move: Move, moved: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what git cannot see in patches that merged, as lines, by their new commits.

    Names that a patch uses and the new release lacks, and what is wrong with Python files.

    Args:
        root: the checkout, whose own environment of tests has ruff.
        moved: the new commits of patches by their commits on the old release.
    """
    # tests and docs, which do not ship, keep old names for long
    others = [rule.repo for rule in move.target.paths if rule.wheel is None and not rule.build]
    within = ("--", ".", *(f":(exclude,literal){folder}" for folder in others))
    used = {}
    for new in moved.values():
        diff = git.git(tree, "diff-tree", "-p", "--no-renames", f"{new}^", new, *within)
        added = re.findall(r"^\+(?!\+\+ )(.*)", diff, re.MULTILINE)
        words = {word for line in added for word in _WORD.findall(line)}
        # names of code, not prose
        used[new] = {word for word in words if "_" in word or word[1:] != word[1:].lower()}
    there = _present(tree, set().union(*used.values()), move.old.commit, within)
    lost = there - _present(tree, there, move.new.commit, within)
    ruff = shutil.which("ruff", path=f"{root}/.venv-dev/bin:{os.environ.get('PATH', '')}")
    found = {}
    for old, new in moved.items():
        gone = sorted(used[new] & lost)
        found[new] = [f"uses {name}, which the new release no longer has" for name in gone]
        found[new] += _broken(tree, ruff, old, new)
    return found


def _present(tree: Path, names: set[str], commit: str, within: Iterable[str]) -> set[str]:
    """Return those names that a commit has as words."""
    if not names:
        return set()
    # one pattern: many are slow
    _, listing = git.attempt(tree, "grep", "-howIE", "|".join(sorted(names)), commit, *within)
    return names & {*listing.splitlines()}


def _broken(tree: Path, ruff: str | None, old: str, new: str) -> list[str]:
    """Return what is wrong with Python files after a patch and was not before it."""
    lines = []
    for change in git.changes(tree, f"{new}^", new):
        if change.path.endswith(".py") and change.status != "D":
            found = _problems(tree, ruff, change.new_blob)
            if found and change.status != "A":
                found -= _problems(tree, ruff, change.old_blob)
            if found and (was := git.blobs_at(tree, old, [change.path])):
                found -= _problems(tree, ruff, was[change.path])  # on the old release, too
            lines += [f"{change.path}: {what}" for what in found]
    return lines


def _problems(tree: Path, ruff: str | None, blob: str) -> Counter[str]:
    """Return what is wrong with a Python file, without line numbers: each patch moves them."""
    found: Counter[str] = Counter()
    data = git.git_bytes(tree, "cat-file", "blob", blob)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "file", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        found[f"does not compile: {getattr(error, 'msg', error)}"] += 1
    if ruff is not None:
        how = ("--isolated", "--select=F821,F811", "--output-format=json", "--exit-zero")
        done = call(ruff, "check", "--no-cache", *how, "--stdin-filename=file.py", "-", stdin=data)
        for one in json.loads(done.stdout):
            if one["code"] in ("F821", "F811"):
                found[re.sub(r" from line \d+", "", one["message"])] += 1
    return found
