"""Names that a series uses and a new release no longer has.

Git merges text: a patch whose own lines call a function merges silently into a tree in which that
function has another name. So the words of a patch's added code are looked for in both trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sparkforge.core import git, gitread
from sparkforge.core.gitread import Reader
from sparkforge.maintain.rebase import diffs
from sparkforge.pins.pathmap import PathRule, rule_of
from sparkforge.sources.sources import Source

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{5,}")
_STRING = re.compile(rb"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'")
_COMMENT = re.compile(rb"(?:#(?!\s*(?:if|define|include|elif|ifdef|ifndef)\b)|//).*$")
# a name that the line itself defines is not used from elsewhere
_MADE = re.compile(
    rb"\b(?:def|class|struct|for|as)\s+(\w+)|^\s*(?:auto\s+|const\s+)?(\w+)\s*(?::[^=]+)?=(?!=)"
)
_SUBMODULE = "160000"


def words(diff: bytes, paths: Iterable[str]) -> set[bytes]:
    """Return the names that the added code of a diff uses: no comments, strings or prose.

    Args:
        paths: of the diff's files, in order; None of them is a name's place.
    """
    used: set[bytes] = set()
    made: set[bytes] = set()
    for path, part in zip(paths, diffs.hunks(diff), strict=False):
        if not path:
            continue
        for line in (line for hunk in part for line in hunk.added):
            code = _COMMENT.sub(b"", _STRING.sub(b"''", line))
            made |= {name for names in _MADE.findall(code) for name in names if name}
            for match in _WORD.finditer(code):
                around = (
                    code[match.start() - 1 : match.start()] + code[match.end() : match.end() + 1]
                )
                if _like_code(match[0]) or b"." in around or b"(" in around:
                    used.add(match[0])
    return used - made


def _like_code(word: bytes) -> bool:
    """Return whether a word looks like an identifier, not like prose."""
    return b"_" in word or word[1:] != word[1:].lower()


def ships(rules: Iterable[PathRule], path: str) -> bool:
    """Return whether a file belongs to the program: tests and docs keep old names for long."""
    rule = rule_of(rules, path)
    return rule is None or rule.wheel is not None or rule.build


def vanished(wanted: set[bytes], rules: Iterable[PathRule], old: Source, new: Source) -> set[bytes]:
    """Return those words that the old tree has and the new one lacks.

    Args:
        rules: the upstream's ``paths``.
        old, new: trees of one upstream, in one repository.
    """
    rules = list(rules)
    changed = [
        change
        for change in git.changes(new.repo, old.commit, new.commit)
        if ships(rules, change.path) and _SUBMODULE not in (change.old_mode, change.new_mode)
    ]
    with gitread.reading(new.repo) as reader:
        before = _among(wanted, reader, (change.old_blob for change in changed))
        left = before - _among(before, reader, (change.new_blob for change in changed))
    if not left:
        return set()
    # few by now: also in files that did not change
    code, listing = git.attempt(
        new.repo,
        "grep",
        "-h",
        "-o",
        "-w",
        "-F",
        "-I",
        *(part for word in sorted(left) for part in ("-e", word.decode())),
        new.commit,
        "--",
        ".",
        *(
            f":(exclude,literal){rule.repo}"
            for rule in rules
            if rule.wheel is None and not rule.build
        ),
    )
    return left - ({line.encode() for line in listing.splitlines()} if code == 0 else set())


def _among(words: set[bytes], reader: Reader, blobs: Iterable[str]) -> set[bytes]:
    """Return those words that any of some blobs has."""
    present: set[bytes] = set()
    for blob in blobs:
        data = b"" if blob == git.ABSENT else reader.blob(blob)
        if b"\0" not in data:
            present |= words.intersection(_WORD.findall(data))
    return present
