"""What people need to know of a merge: verdict, kinds of conflicts, and what git cannot see.

Git merges text: a patch whose own lines call a function merges silently into a tree in which that
function has another name.
"""

from __future__ import annotations

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
_TELLING = 20  # characters of a line that is looked for elsewhere …
_PLACES = 3  # … and that tells nothing in more places


Unmerged = Mapping[str, dict[int, str]]
"""The files in conflict: blobs by stage (1 base, 2 the new release, 3 the patch)."""


def blob(repo: Path, name: str | None) -> bytes:
    """Return a blob's content; without a name, nothing."""
    return git.git_bytes(repo, "cat-file", "blob", name) if name else b""


@dataclass(frozen=True)
class _Hunk:
    """One conflict in a file: the lines of the new release, of the base and of the patch."""

    new: bytes
    base: bytes
    patch: bytes

    @property
    def kind(self) -> Literal["imports", "both insert", "overlap"]:
        lines = [line for text in (self.new, self.base, self.patch) for line in _bare(text)]
        if all(map(_IMPORT.match, lines)):
            return "imports"
        return "overlap" if self.base.strip() else "both insert"


def _bare(text: bytes) -> list[bytes]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def resolve_provisionally(tree: Path, files: Iterable[str]) -> None:
    """Write a guess into files in conflict: both sides, or where they overlap the patch's."""

    def guess(match: re.Match[bytes]) -> bytes:
        hunk = _Hunk(*match.groups())
        return hunk.patch if hunk.kind == "overlap" else hunk.new + hunk.patch

    for path in (tree / file for file in files):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(_HUNK.sub(guess, path.read_bytes()))


def hints(tree: Path, old: str, new: str, files: Unmerged) -> Iterator[str]:
    """Yield a line for each text file in conflict: its hunks, and upstream's probable change.

    Args:
        old, new: commits of the two releases.
    """
    for name, blobs in files.items():
        path = tree / name
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if found := [_Hunk(*match.groups()) for match in _HUNK.finditer(data)]:
            kinds = Counter(hunk.kind for hunk in found)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            # the file as earlier patches of the series left it, on either release
            before, now = (blob(tree, blobs.get(stage)) for stage in (1, 2))
            hint = _hint(found, before, now) or _elsewhere(tree, old, new, name, found, now)
            yield f"{name}: {counts}: {hint or 'upstream changed the same lines'}"


def _hint(found: Sequence[_Hunk], before: bytes, now: bytes) -> str | None:
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
    texts = [(b"\n".join(_bare(hunk.base)), b"\n".join(_bare(hunk.new))) for hunk in found]
    if all(base and base in new for base, new in texts):
        return "only white space of its context differs"
    return None


def _elsewhere(
    tree: Path, old: str, new: str, path: str, found: Sequence[_Hunk], now: bytes
) -> str | None:
    """Return the other files in which the longest line that the patch stood on is now."""
    gone = {line for hunk in found for line in _bare(hunk.base)} - {*_bare(now)}
    line = max(sorted(gone), key=len, default=b"").decode(errors="replace")
    if len(line) < _TELLING:
        return None
    # only in files of its kind in its part of the tree: each file is unpacked
    top, suffix = path.partition("/")[0] if "/" in path else "", Path(path).suffix
    where = f":(glob){top}/**/*{suffix}" if top else f":(glob)*{suffix}"
    places = []
    for commit in (old, new):
        code, listing = git.attempt(tree, "grep", "-F", "-n", "-I", "-e", line, commit, "--", where)
        hits = (hit.split(":", 3) for hit in listing.splitlines() if code == 0)
        places.append({hit[1]: hit[2] for hit in hits})
    moved = [f"{name}:{at}" for name, at in places[1].items() if name not in places[0]]
    if 0 < len(moved) <= _PLACES:
        return f"its context may have moved: `{line[:60]}` is now at {', '.join(moved)}"
    return None


# -- what merged ---------------------------------------------------------------------------------

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{5,}")
_LINE = re.compile(rb"^([-+])(?!-- |\+\+ )(.*)$", re.MULTILINE)
_STRING = re.compile(rb"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'")
_COMMENT = re.compile(rb"(?:#(?!\s*(?:if|define|include|elif|ifdef|ifndef)\b)|//).*$")
# a name that the line itself defines is not used from elsewhere
_MADE = re.compile(
    rb"\b(?:def|class|struct|for|as)\s+(\w+)|^\s*(?:auto\s+|const\s+)?(\w+)\s*(?::[^=]+)?=(?!=)"
)


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
        used[new] = _names(git.git_bytes(tree, *words, "--", *files)) if files else set()
    others = [f":(exclude,literal){rule.repo}" for rule in rules if not ships(rule.repo)]
    lost = _vanished(tree, set().union(*used.values()), others, *releases)
    found = {}
    for old, new in moved:
        gone = sorted(map(bytes.decode, used[new] & lost))
        found[new] = [f"uses {name}, which the new release no longer has" for name in gone]
        found[new] += _broken(tree, ruff, old, new)
    return found


def _names(diff: bytes) -> set[bytes]:
    """Return the names that the added code of a diff uses: no comments, strings or prose."""
    used: set[bytes] = set()
    made: set[bytes] = set()
    for line in _LINE.finditer(diff):
        if line[1] == b"-":
            continue
        code = _COMMENT.sub(b"", _STRING.sub(b"''", line[2]))
        made |= {name for names in _MADE.findall(code) for name in names if name}
        for match in _WORD.finditer(code):
            word = match[0]
            around = code[match.start() - 1 : match.start()] + code[match.end() : match.end() + 1]
            like_code = b"_" in word or word[1:] != word[1:].lower()
            if like_code or b"." in around or b"(" in around:
                used.add(word)
    return used - made


def _vanished(tree: Path, wanted: set[bytes], but: list[str], old: str, new: str) -> set[bytes]:
    """Return those names that the old release has and the new one lacks."""
    words = ("diff-tree", "-p", "-U0", "--no-renames", old, new, "--", ".", *but)
    sides: dict[bytes, set[bytes]] = {b"-": set(), b"+": set()}
    for line in _LINE.finditer(git.git_bytes(tree, *words)) if wanted else ():
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
