"""What git cannot see in a patch that merged: names that vanished, Python that no longer fits.

Git merges text: a patch whose own lines call a function merges silently into a tree in which that
function has another name.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.run import call
from sparkforge.maintain.rebase.tree import Tree
from sparkforge.pins.types import PathRule, rule_of

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{5,}")
_LINE = re.compile(rb"^([-+])(?!-- |\+\+ )(.*)$", re.MULTILINE)
_STRING = re.compile(rb"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'")
_COMMENT = re.compile(rb"(?:#(?!\s*(?:if|define|include|elif|ifdef|ifndef)\b)|//).*$")
# a name that the line itself defines is not used from elsewhere
_MADE = re.compile(
    rb"\b(?:def|class|struct|for|as)\s+(\w+)|^\s*(?:auto\s+|const\s+)?(\w+)\s*(?::[^=]+)?=(?!=)"
)


def words(diff: bytes) -> set[bytes]:
    """Return the names that the added code of a diff uses: no comments, strings or prose."""
    used: set[bytes] = set()
    made: set[bytes] = set()
    for line in _LINE.finditer(diff):
        if line[1] == b"-":
            continue
        code = _COMMENT.sub(b"", _STRING.sub(b"''", line[2]))
        made |= {name for names in _MADE.findall(code) for name in names if name}
        for match in _WORD.finditer(code):
            around = code[match.start() - 1 : match.start()] + code[match.end() : match.end() + 1]
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


def vanished(
    tree: Tree, wanted: set[bytes], rules: Sequence[PathRule], old: str, new: str
) -> set[bytes]:
    """Return those words that the old release has and the new one lacks.

    Args:
        rules: the upstream's ``paths``.
        old, new: commits of the two releases.
    """
    if not wanted:
        return set()
    others = [f":(exclude,literal){rule.repo}" for rule in rules if not ships([rule], rule.repo)]
    diff = git.git_bytes(
        tree.path, "diff-tree", "-p", "-U0", "--no-renames", old, new, "--", ".", *others
    )
    sides: dict[bytes, set[bytes]] = {b"-": set(), b"+": set()}
    for line in _LINE.finditer(diff):  # one at a time: a release changes much text
        sides[line[1]] |= wanted.intersection(_WORD.findall(line[2]))
    gone = sides[b"-"] - sides[b"+"]  # removed somewhere, and not added elsewhere
    if not gone:
        return set()
    named = [part for word in sorted(gone) for part in ("-e", word.decode())]
    grep = ("grep", "-h", "-o", "-w", "-F", "-I", *named, new, "--", ".", *others)
    code, listing = git.attempt(tree.path, *grep)
    return gone - ({line.encode() for line in listing.splitlines()} if code == 0 else set())


def broken(
    tree: Tree, ruff: str | None, commits: Sequence[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    """Return what is wrong with Python files after each patch and was not before it.

    Args:
        ruff: the program; None: files are only compiled.
        commits: pairs of a patch's commit on the old release and on the new one.

    Returns:
        By commit on the new release: ``FILE: message``.
    """
    folder = tree.path.with_name(f"{tree.path.name}.python")
    shutil.rmtree(folder, ignore_errors=True)
    places = []
    for old, new in commits:
        for change in git.changes(tree.path, f"{new}^", new):
            if change.path.endswith(".py") and change.status != "D":
                places.append((old, new, change.path))
    found: dict[Path, Counter[str]] = {}
    for old, new, path in places:
        for side, commit in (("old", old), ("before", f"{new}^"), ("after", new)):
            file = folder / new / side / path
            code, text = git.attempt(tree.path, "cat-file", "blob", f"{commit}:{path}")
            file.parent.mkdir(parents=True, exist_ok=True)
            data = text.encode(errors="surrogateescape") if code == 0 else b""
            file.write_bytes(data)
            found[file.resolve()] = Counter(_compiled(data))
    if ruff is not None and found:
        how = ("--isolated", "--select=F821,F811", "--output-format=json", "--exit-zero")
        told = json.loads(call(ruff, "check", "--no-cache", *how, folder).stdout)
        for one in told:
            if one["code"] in ("F821", "F811"):
                # the line that a redefinition names moves with each patch
                message = re.sub(r" from line \d+", "", one["message"])
                found[Path(one["filename"]).resolve()][message] += 1
    result: dict[str, tuple[str, ...]] = {}
    for _, new, path in places:
        old_side, before, after = (
            found[(folder / new / side / path).resolve()] for side in ("old", "before", "after")
        )
        fresh = after - before - old_side
        result[new] = (*result.get(new, ()), *(f"{path}: {what}" for what in fresh))
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _compiled(data: bytes) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "file", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return [f"does not compile: {getattr(error, 'msg', error)}"]
    return []
