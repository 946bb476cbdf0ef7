"""One patch file: git's mail format with full blob ids → a typed ``Patch``."""

import hashlib
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
_MODES = ("100644", "100755")
# they change git's handling of other files
_GITS_OWN = (".git", ".gitattributes", ".gitmodules")
_BINARY = re.compile(r"^(GIT binary patch$|Binary files )", re.MULTILINE)
_MODULE = re.compile(r"\.(py|so)$")
# Python runs these without a source
_UNREAD = re.compile(r"(^|/)__pycache__/|\.(so|pyc|pyd|pth|egg-link)$")


def read_patch(path: Path) -> Patch:
    """Read one patch file.

    SeriesError: it is not a mail-format patch, or it changes a forbidden file:
    outside of the repository, a submodule, git's own files, no text.
    """
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
    entries = []
    starts = [match.start() for match in _FILE.finditer(diff)] + [len(diff)]
    for start, end in itertools.pairwise(starts):
        part = diff[start:end]
        name = _file_name(path, part)
        if "\nrename from " in part or "\ncopy from " in part or name is None:
            line = plain.escaped(part.partition("\n")[0])
            msg = f"{path}: {line}: written as a rename or copy"
            raise SeriesError(msg, "export with --no-renames, so that blobs can be compared")
        _check_kind(path, part, name)
        entries.append(Entry(name, added="\nnew file mode " in part.partition("\n@@")[0]))
    return Patch(
        path=path,
        subject=_decoded(subject[1]).strip(),  # a long word begins on the next line
        author=_decoded(author[1]),
        body=message,
        trailers=trailers_of(message),
        entries=tuple(entries),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _file_name(path: Path, part: str) -> str | None:
    """Return the path of a file's diff; None where it has two (a rename or copy).

    The two names on the line only differ in a/ and b/, so its middle separates them, even with
    spaces.
    """
    names = part.partition("\n")[0].removeprefix("diff --git ")
    middle = len(names) // 2
    old, new = names[:middle], names[middle + 1 :]
    if names.startswith('"'):  # as git quotes a name beyond ASCII
        raise SeriesError(f"{path}: {plain.escaped(names)}: not a plain path", "rename that file")
    if not (old.startswith("a/") and new.startswith("b/") and old[2:] == new[2:]):
        return None
    name = new[2:]
    if problem := plain.path_problem(name):
        msg = f"{path}: a path {problem}: {plain.escaped(name)!r}"
        raise SeriesError(msg, "change only files inside the repository")
    return name


def _check_kind(path: Path, part: str, name: str) -> None:
    """Refuse what is not a text file that can be read where it takes effect."""
    if any(mode not in _MODES for mode in _MODE.findall(part)):
        problem = "a link, a submodule, or an unknown kind of file"
    elif not set(_GITS_OWN).isdisjoint(name.split("/")):
        problem = "controls how git reads other files"
    elif _UNREAD.search(name) or _BINARY.search(part):
        problem = "a binary file, or one that Python runs without a source"
    else:
        return
    raise SeriesError(f"{path}: {name}: {problem}", "a patch brings text only: remove it")


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
    except (LookupError, UnicodeDecodeError):  # an unknown encoding: unchanged
        return unfolded


def trailers_of(message: str) -> dict[str, str]:
    """Return the trailers of a message by key; of several with one key the last."""
    return dict(parted(message)[1])


def parted(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a text without its trailers, and these in order: (key, value).

    They are the ``Key: value`` lines of the last paragraph; values may be folded.
    """
    before, _, last = f"\n\n{text.strip()}".rpartition("\n\n")
    found: list[tuple[str, str]] = []
    for line in last.splitlines():
        match = re.match(r"^([A-Z][A-Za-z-]+): (.*)$", line)
        if match:
            found.append((match[1], match[2].strip()))
        elif found and line.startswith((" ", "\t")):
            key, value = found[-1]
            found[-1] = (key, f"{value} {line.strip()}")
        else:
            return text.strip(), []  # prose, not a block of trailers
    return before.strip(), found
