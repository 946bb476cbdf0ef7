"""Work trees as importable packages: a folder of links, compiled files from the release wheel.

A wheel holds more than its repository: compiled modules, generated ones, files from elsewhere. So
a folder is a link into the work tree if all of the wheel's files in it come from there. Else it is
a real folder with a link for each of its entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparkforge.pins.types import PathRule


@dataclass(frozen=True)
class TreeOf:
    """One upstream's work tree, as a wheel sees it."""

    at: PurePosixPath
    """Its folder, as the importing program sees it."""
    rules: Sequence[PathRule]
    """Places of its files in the wheel."""
    base: Collection[str]
    """Paths of the pinned commit; a wheel's file that is among them is never taken from the wheel,
    so that a deleted one stays away."""
    files: Iterable[str]
    """Paths that are there now."""


def links(members: Iterable[str], trees: Sequence[TreeOf], site: PurePosixPath) -> dict[str, str]:
    """Return the links of the folder, by path in it, each with its target.

    Args:
        members: the files of the release wheel.
        site: the site-packages folder that the wheel is installed in.
    """
    rules = [(tree, rule, rule.wheel) for tree in trees for rule in tree.rules if rule.wheel]

    def owner(path: str) -> tuple[TreeOf, PathRule, str] | None:
        fitting = [one for one in rules if path.startswith(one[2])]
        return max(fitting, key=lambda one: len(one[2]), default=None)

    found: dict[str, PurePosixPath] = {}
    for tree, rule, prefix in rules:
        for file in tree.files:
            path = prefix + file[len(rule.repo) :]
            if file.startswith(rule.repo) and owner(path) == (tree, rule, prefix):
                found[path] = tree.at / file
    for member in members:
        if member.endswith("/") or member.partition("/")[0].endswith((".dist-info", ".data")):
            continue
        its = owner(member)
        if its is None or its[1].repo + member[len(its[2]) :] not in its[0].base:
            found.setdefault(member, site / member)
    folded: dict[str, str] = {}
    _fold("", {PurePosixPath(path).parts: target for path, target in found.items()}, folded)
    return folded


def _fold(prefix: str, files: Mapping[tuple[str, ...], PurePosixPath], out: dict[str, str]) -> None:
    """Link each entry of a folder: as one where all below it lies together, too."""
    entries: dict[str, dict[tuple[str, ...], PurePosixPath]] = {}
    for parts, target in files.items():
        entries.setdefault(parts[0], {})[parts[1:]] = target
    for name, below in entries.items():
        tops = {_top(rest, target) for rest, target in below.items()}
        if len(tops) == 1 and (top := tops.pop()) is not None:
            out[prefix + name] = str(top)
        else:
            _fold(f"{prefix}{name}/", below, out)


def _top(rest: tuple[str, ...], target: PurePosixPath) -> PurePosixPath | None:
    """Return the folder below which a target has the same path; None where it has another."""
    if not rest:
        return target
    return target.parents[len(rest) - 1] if target.parts[-len(rest) :] == rest else None


def write(folder: Path, wanted: Mapping[str, str]) -> None:
    """Make a folder hold exactly these links; those that are right stay: a program may use them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True):  # deeper entries first
        right = path.is_symlink() and wanted.get(str(path.relative_to(folder))) == str(
            path.readlink()
        )
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif not right:
            path.unlink()
    for name, target in wanted.items():
        if not (folder / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)
