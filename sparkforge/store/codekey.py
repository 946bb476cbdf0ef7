"""The code that makes an item, as a part of its key: a module with all of its imports.

The imports are read from the files, so there is no list to maintain. Regular expressions read them:
``ast`` takes 15 ms for each module, and a build without changes needs the closures of all stages.
``tests/unit/store/test_codekey.py`` compares both.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from os.path import isfile
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
"""Modules that affect no byte of any item, with reasons; their changes do not change keys."""

# "\n" and no "^": an expression that begins with a plain character is five times as fast
_TYPES_ONLY = re.compile(r"\nif TYPE_CHECKING:(?:\n[ \t]+[^\n]*|\n(?=\n))+")
_IMPORT = re.compile(
    r"\n[ \t]*(?:from[ \t]+(sparkforge[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+(sparkforge[\w., \t]*))"
)
# files next to a module that it reads: Path(__file__).with_name("gate.py"), .parent / "include";
# in a folder above: Path(__file__).parents[1] / "serving"
_BESIDE = re.compile(r"Path\(__file__\)(?:\.parents\[(\d)\])?[^\n\"]*\"([\w./-]+)\"")


def code_of(module: str) -> str:
    """Return one digest of a module of sparkforge, all that it imports and the files next to it."""
    digest = hashlib.sha256()
    above = len(f"{_ROOT}/")
    for path in closure(module):
        digest.update(str(path)[above:].encode() + b"\0" + _digest(path))
    return digest.hexdigest()[:16]


@cache
def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@cache
def closure(module: str) -> tuple[Path, ...]:
    """Return the files that a module's results depend on, without ``PASSED_OVER``, sorted."""
    passed_over = {f"{_ROOT}/{name.replace('.', '/')}.py" for name in PASSED_OVER}
    found: set[str] = set()  # texts: comparing Paths takes ten times as long
    waiting = list(_files(module))
    while waiting:
        path = waiting.pop()
        if path not in found and path not in passed_over:
            found.add(path)
            waiting += _needs(path)
    return tuple(sorted(map(Path, found)))


@cache
def _files(name: str) -> tuple[str, ...]:
    """Return the files of a module and of its packages; a name in a module counts as the module."""
    folder = str(_ROOT)
    found: list[str] = []
    for part in name.split(".")[1:]:
        folder += f"/{part}"
        found += filter(isfile, (f"{folder}.py", f"{folder}/__init__.py"))
    return tuple(found)


@cache
def _needs(file: str) -> tuple[str, ...]:
    """Return the files that a module names, whether it imports them at its top or later."""
    path = Path(file)
    if path.suffix != ".py":
        return ()
    text = _TYPES_ONLY.sub("", "\n" + path.read_text(encoding="utf-8"))
    found: list[str] = []
    for package, names, modules in _IMPORT.findall(text):
        for word in filter(str.strip, (names or modules).strip("()").split(",")):
            name = word.split()[0]  # without the name after "as"
            found += _files(f"{package}.{name}" if package else name)
    for beside in (path.parents[int(up or 0)] / name for up, name in _BESIDE.findall(text)):
        read = sorted(beside.glob("*.*")) if beside.is_dir() else [beside] * beside.is_file()
        found += map(str, read)
    return tuple(found)
