"""The code that makes an item, as a part of its key: a module with all that it imports.

Found by reading, so that no list of files has to follow a module that moves or is split. Reading
is by regular expressions: ``ast`` takes 15 ms a module, and a build in which nothing changed asks
for the closures of all stages. ``tests/unit/test_codekey.py`` compares the two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
PASSED_OVER = {
    "core.errors": "words for people",
    "core.log": "words for people",
    "core.run": "starts the programs it is given, and fails where they do",
    "core.programs": "finds programs; words for people",
    "core.disk": "words for people, and files that are complete or absent",
    "core.parallel": "the same calls, several at once",
    "sources.download": "what it brings is used only with the pinned sha256",
    "core.index": "finds where a file is; only the pinned sha256 is taken from there",
    "core.typed": "reads records; what it cannot read is made again",
    "build.results": "types of records; one that does not load as its type is made again",
    "core.hashing": "names what others made; other names are other keys by themselves",
    "store.artefact": "a record of what was made",
    "store.store": "keeps what was made, and hashes it again",
    "store.marker": "tells which folder is a store",
    "runtime.serverlog": "words for people",
    "sources.sizes": "sizes for people; nothing is checked by them",
    "store.codekey": "this module",
}
"""Modules that decide no byte of any item, with reasons: a change of them makes nothing anew."""

_TYPES_ONLY = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+[^\n]*\n|\n)+", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(sparkforge[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+(sparkforge[\w., \t]*))",
    re.MULTILINE,
)
# what a module reads beside itself: Path(__file__).with_name("gate.py"), .parent / "include"; in a
# folder above: Path(__file__).parents[1] / "serving"
_BESIDE = re.compile(r"\bPath\(__file__\)(?:\.parents\[(\d)\])?[^\n\"]*\"([\w./-]+)\"")


def code_of(module: str) -> str:
    """Return one digest of a module of sparkforge, all that it imports and the files beside it.

    Args:
        module: its full name, e.g. ``__name__``.
    """
    digest = hashlib.sha256()
    for path in closure(module):
        name = path.relative_to(_ROOT).as_posix()
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@cache
def closure(module: str) -> tuple[Path, ...]:
    """Return the files that decide what a module makes, less ``PASSED_OVER``, in order."""
    found: set[Path] = set()
    waiting = list(_files(module))
    while waiting:
        path = waiting.pop()
        name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
        if path not in found and name not in PASSED_OVER:
            found.add(path)
            waiting += _needs(path)
    return tuple(sorted(found))


def _files(name: str) -> Iterator[Path]:
    """Give the file of a module, with those of its packages; a name inside one means that one."""
    folder = _ROOT
    for part in name.split(".")[1:]:
        if (folder / f"{part}.py").is_file():
            yield folder / f"{part}.py"
            return
        folder /= part
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"


@cache
def _needs(path: Path) -> tuple[Path, ...]:
    """Return the files that one names, whether it imports them at its top or later."""
    if path.suffix != ".py":
        return ()
    text = _TYPES_ONLY.sub("", path.read_text(encoding="utf-8"))
    found: list[Path] = []
    for package, names, modules in _IMPORT.findall(text):
        for word in filter(str.strip, (names or modules).strip("()").split(",")):
            name = word.split()[0]  # less what "as" calls it
            found += _files(f"{package}.{name}" if package else name)
    for beside in (path.parents[int(up or 0)] / name for up, name in _BESIDE.findall(text)):
        found += sorted(beside.glob("*.*")) if beside.is_dir() else [beside] * beside.is_file()
    return tuple(found)
