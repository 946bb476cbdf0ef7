"""What people need to know of a merge: verdict, kinds of conflicts, and what git cannot see.

Git merges text: a patch whose own lines call a function merges silently into a tree in which that
function has another name.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from sparkforge.core import git
from sparkforge.core.run import call
from sparkforge.pins.types import PathRule, rule_of


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


Unmerged = Mapping[str, dict[int, str]]
"""The files in conflict: blobs by stage (1 base, 2 the new release, 3 the patch)."""


def blob(repo: Path, name: str | None) -> bytes:
    """Return a blob's content; without a name, nothing."""
    return git.isolated(repo, "cat-file", "blob", name).stdout if name else b""


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

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{5,}")
_LINE = re.compile(rb"^([-+])(?!-- |\+\+ )(.*)$", re.MULTILINE)


def of_merged(
    tree: Path,
    ruff: str | None,
    rules: Sequence[PathRule],
    releases: tuple[str, str],
    moved: Sequence[tuple[str, str]],
) -> dict[str, list[str]]:
    """Return what git cannot see in patches that merged, as lines, by their new commits.

    Names that a patch uses and the new release lacks, and what is wrong with Python files.

    Args:
        ruff: the program; None: Python files are only compiled.
        rules: the upstream's ``paths``: tests and docs, which do not ship, keep old names for long.
        releases: commits of the old and the new release.
        moved: pairs of a patch's commit on the old release and on the new one.
    """

    def ships(path: str) -> bool:
        rule = rule_of(rules, path)
        return rule is None or rule.wheel is not None or rule.build

    used = {}
    for _, new in moved:
        files = [change.path for change in git.changes(tree, f"{new}^", new) if ships(change.path)]
        words = ("--literal-pathspecs", "diff-tree", "-p", "--no-renames", f"{new}^", new)
        used[new] = _names(git.isolated(tree, *words, "--", *files).stdout) if files else set()
    others = [f":(exclude,literal){rule.repo}" for rule in rules if not ships(rule.repo)]
    lost = _vanished(tree, set().union(*used.values()), others, *releases)
    found = {}
    for old, new in moved:
        gone = sorted(map(bytes.decode, used[new] & lost))
        found[new] = [f"uses {name}, which the new release no longer has" for name in gone]
        found[new] += _broken(tree, ruff, old, new)
    return found


def _names(diff: bytes) -> set[bytes]:
    """Return the words of a diff's added lines that look like names of code, not like prose."""
    added = (line[2] for line in _LINE.finditer(diff) if line[1] == b"+")
    words = {word for text in added for word in _WORD.findall(text)}
    return {word for word in words if b"_" in word or word[1:] != word[1:].lower()}


def _vanished(tree: Path, wanted: set[bytes], but: list[str], old: str, new: str) -> set[bytes]:
    """Return those names that the old release has and the new one lacks."""
    words = ("diff-tree", "-p", "-U0", "--no-renames", old, new, "--", ".", *but)
    sides: dict[bytes, set[bytes]] = {b"-": set(), b"+": set()}
    for line in _LINE.finditer(git.isolated(tree, *words).stdout) if wanted else ():
        sides[line[1]] |= wanted.intersection(_WORD.findall(line[2]))
    gone = sides[b"-"] - sides[b"+"]  # removed somewhere, and not added elsewhere
    if not gone:
        return set()
    named = [part for word in sorted(gone) for part in ("-e", word.decode())]
    grep = ("grep", "-h", "-o", "-w", "-F", "-I", *named, new, "--", ".", *but)
    code, listing = git.attempt(tree, *grep)
    return gone - ({line.encode() for line in listing.splitlines()} if code == 0 else set())


def _broken(tree: Path, ruff: str | None, old: str, new: str) -> list[str]:
    """Return what is wrong with Python files after a patch and was not before it."""
    lines = []
    for change in git.changes(tree, f"{new}^", new):
        if change.path.endswith(".py") and change.status != "D":
            found = _problems(ruff, blob(tree, change.new_blob))
            if found and change.status != "A":
                found -= _problems(ruff, blob(tree, change.old_blob))
            if found:  # on the old release, too?
                was = git.blobs_at(tree, old, [change.path]).get(change.path)
                found -= _problems(ruff, blob(tree, was))
            lines += [f"{change.path}: {what}" for what in found]
    return lines


def _problems(ruff: str | None, data: bytes) -> Counter[str]:
    """Return what is wrong with a Python file, without line numbers: each patch moves them."""
    found: Counter[str] = Counter()
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
