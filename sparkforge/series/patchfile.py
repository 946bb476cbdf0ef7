"""One patch file: git's mail format with full blob ids → a typed ``Patch``."""

import hashlib
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from email.errors import MessageError
from email.header import decode_header, make_header
from pathlib import Path

from sparkforge.core import plain
from sparkforge.core.errors import SeriesError


@dataclass(frozen=True)
class Entry:
    """A file that a patch changes, or adds."""

    path: str
    added: bool


NATIVE = "Native"
"""Trailer of a patch that changes rules of compiling (``build`` in pins.yaml's paths)."""


@dataclass(frozen=True)
class Patch:
    """One patch file; its name is the slug of ``subject``, and ``body`` includes the trailers."""

    path: Path
    subject: str
    author: str
    body: str
    trailers: Mapping[str, str]
    entries: tuple[Entry, ...]
    sha256: str

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def why(self) -> str:
        """The first sentences of its message, on one line; more than one only after a short one."""
        first = " ".join(self.body.strip().partition("\n\n")[0].split())
        ends = (match.end() for match in _SENTENCE_END.finditer(first))
        return first[: next((end for end in ends if end >= 120), None)]

    @property
    def natives(self) -> tuple[str, ...]:
        """CMake targets that its build rules change; those of other changes follow from paths."""
        named = self.trailers.get(NATIVE, "none")
        return () if named == "none" else tuple(name.strip() for name in named.split(","))


def slug(subject: str) -> str:
    """Return the file name of a subject: lower case words joined by hyphens, ``.patch``."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", subject).lower().strip("-")
    return f"{words[:64].rstrip('-')}.patch"


_SUBJECT = re.compile(r"^Subject: (.*(?:\n[ \t].*)*)", re.MULTILINE)
_AUTHOR = re.compile(r"^From: (.*)$", re.MULTILINE)
_FILE = re.compile(r"^diff --git (.*)$", re.MULTILINE)
_FIRST = re.compile(r"^From [0-9a-f]{40} Mon Sep 17 00:00:00 2001$", re.MULTILINE)
_MODE = re.compile(
    r"^(?:(?:new|deleted) file mode|new mode|index [0-9a-f]+\.\.[0-9a-f]+) (\d+)$", re.MULTILINE
)
_BINARY = re.compile(r"^(GIT binary patch$|Binary files )", re.MULTILINE)
_MODULE = re.compile(r"\.(py|so)$")
# Python runs these without a source
_UNREAD = re.compile(r"(^|/)__pycache__/|\.(so|pyc|pyd|pth|egg-link)$")
# neither v0.7.0 nor "e.g. this" ends a sentence
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)(?<!cf)[.!?](?=\s|$)")


def read_patch(path: Path) -> Patch:
    """Read one patch file; SeriesError: no mail-format patch, or it changes a forbidden file."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: cannot read it as UTF-8 text: {error}"
        raise SeriesError(msg, "restore it from git, or export it again") from None
    head, _, rest = text.partition("\n\n")
    # with --no-stat only an empty line separates message and diff
    message, separator, diff = rest.partition("\ndiff --git ")
    message, diff = message.removesuffix("\n---\n"), f"diff --git {diff}"
    if len(_FIRST.findall(text)) > 1:
        raise SeriesError(f"{path}: contains more than one patch", "split it: one patch per file")
    subject, author = _SUBJECT.search(head), _AUTHOR.search(head)
    if not (subject and author and separator):
        msg = f"{path}: not a mail-format patch (From:, Subject:, message, diff)"
        raise SeriesError(msg, "create it with git format-patch; see docs/patches-howto.md")
    starts = [match.start() for match in _FILE.finditer(diff)] + [len(diff)]
    return Patch(
        path=path,
        subject=_decoded(subject[1]).strip(),  # a long word begins on the next line
        author=_decoded(author[1]),
        body=message,
        trailers=trailers_of(message),
        entries=tuple(_entry(path, diff[at:end]) for at, end in itertools.pairwise(starts)),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _entry(path: Path, part: str) -> Entry:
    """Read the diff of one file; refuse what is not text that can be read where it takes effect."""
    line = part.partition("\n")[0].removeprefix("diff --git ")
    # the two names only differ in a/ and b/, so the middle separates them, even with spaces
    name = line[len(line) // 2 + 1 :].removeprefix("b/")
    if line.startswith('"'):  # as git quotes a name beyond ASCII
        problem: str | None = "not a plain path"
    elif line != f"a/{name} b/{name}" or "\nrename from " in part or "\ncopy from " in part:
        problem = "a rename or copy: export with --no-renames, so that blobs can be compared"
    elif problem := plain.path_problem(name):
        problem = f"a path that {problem}"
    elif not {*_MODE.findall(part)} <= {"100644", "100755"}:
        problem = "a link, a submodule, or an unknown kind of file"
    elif not {".git", ".gitattributes", ".gitmodules"}.isdisjoint(name.split("/")):
        problem = "controls how git reads other files"
    elif _UNREAD.search(name) or _BINARY.search(part):
        problem = "a binary file, or one that Python runs without a source"
    if problem is not None:
        msg = f"{path}: {plain.escaped(line[:200])}: {problem}"
        raise SeriesError(msg, "a patch changes only text files inside the repository")
    return Entry(name, added="\nnew file mode " in part.partition("\n@@")[0])


def check_shadows(new: Collection[str], there: Collection[str], where: str) -> None:
    """Refuse new files that change which file Python imports for another's name: SeriesError.

    One is in a folder beside a module of that name, or the other way round. ``there``: all files.
    """
    modules = {re.sub(r"\.[^/]*$", "", name): name for name in there if _MODULE.search(name)}
    for name in there:
        for folder in itertools.accumulate(name.split("/")[:-1], "{}/{}".format):
            module = modules.get(folder)
            if module is not None and (name in new or module in new):
                msg = f"{where}: Python would import {name} or {module}, and one of them is new"
                raise SeriesError(msg, "give it another name")


def _decoded(header: str) -> str:
    """Return a mail header's text, unfolded and decoded."""
    unfolded = re.sub(r"\n[ \t]", " ", header)
    try:
        return str(make_header(decode_header(unfolded)))
    except (LookupError, ValueError, MessageError):  # an unknown encoding: unchanged
        return unfolded


def trailers_of(message: str) -> dict[str, str]:
    """Return the trailers of a message by key; of several with one key the last.

    They are the ``Key: value`` lines of the last paragraph; values may be folded.
    """
    found: dict[str, str] = {}
    key = None
    for line in message.strip().rpartition("\n\n")[2].splitlines():
        if match := re.match(r"^([A-Z][A-Za-z-]+): (.*)$", line):
            key = match[1]
            found[key] = match[2].strip()
        elif key is not None and line.startswith((" ", "\t")):
            found[key] += f" {line.strip()}"
        else:
            return {}  # prose, not a block of trailers
    return found
