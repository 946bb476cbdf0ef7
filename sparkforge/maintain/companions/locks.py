"""The lists and locks of requirements of a checkout, after a move of its pins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import typed
from sparkforge.core.disk import read_json, write_file
from sparkforge.core.errors import CommandError, RebaseStopped
from sparkforge.core.hashing import key_of
from sparkforge.core.run import call
from sparkforge.maintain.companions import demands, inputs
from sparkforge.maintain.companions.inputs import Followed
from sparkforge.maintain.rebase import drift
from sparkforge.pins.pins import Upstream
from sparkforge.runtime import interpreter
from sparkforge.sources.project import ROOT, Project

_FOLDER = "requirements"
_INPUT = re.compile(rf"-r ({_FOLDER}/[\w.-]+\.in)$", re.MULTILINE)


@dataclass(frozen=True)
class Relocked:
    """The requirements of a checkout after a move."""

    files: Mapping[str, str]
    """Lists and locks that changed, by path in the checkout."""
    lists: Mapping[str, tuple[str, ...]]
    """What changed in each list."""
    locks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What changed in each lock."""
    ours: tuple[str, ...] = ()
    """What a person has to decide."""


def follow(project: Project, moved: Mapping[str, Upstream]) -> Relocked:
    """Return the lists of requirements as the wheels of new releases declare them.

    Args:
        moved: the upstreams that move, as pins.yaml will have them.
    """
    texts = texts_of(project.root, ".in")
    found = dict(texts)
    lists: dict[str, tuple[str, ...]] = {}
    ours: list[str] = []

    def take(name: str, one: Followed) -> None:
        found[name] = one.text
        lists[name] = (*lists.get(name, ()), *one.changes)
        ours.extend(f"{name}: {what}" for what in one.ours)

    for up, release in moved.items():
        pinned = project.pins.upstreams[up]
        for plan, platform, key in demands.moved_wheels(project, up, release):
            old = demands.declared(project, pinned.files[key])
            new = demands.declared(project, release.files[key])
            without = frozenset(map(canonicalize_name, plan.wheels[up].drop_requires))
            for name in _inputs(_read(project.root, plan.requirements[platform])):
                if _copies(texts[name], old):
                    take(name, inputs.follow(found[name], old, new, without))
                    found[name] = inputs.renamed(found[name], pinned.version, release.version)
        own = {
            str(canonicalize_name(file.project)): (pinned.version, release.version)
            for file in release.files.values()
        }
        for name, text in tuple(found.items()):
            take(name, inputs.pinned(text, own))
    changed = {name: text for name, text in found.items() if text != texts[name]}
    return Relocked(changed, {name: lists[name] for name in changed}, ours=_once(ours))


def lock(project: Project, here: Path, lists: Relocked, kept: Path) -> Relocked:
    """Lock the lists again, in a checkout that has them, and those that pin what moved there.

    A run that was killed afterwards takes what is kept.

    Args:
        here: a throw-away copy of the checkout, with the lists in it.
        kept: a file that keeps the result.

    Raises:
        RebaseStopped: they cannot be resolved.
    """
    locks = texts_of(project.root, ".txt")
    key = key_of({"before": texts_of(project.root), "lists": dict(lists.files)})
    stored = read_json(kept) or {}
    if stored.get("key") == key and (again := typed.load(Relocked, stored["found"])) is not None:
        return again
    found = dict(lists.files)
    changes = dict(lists.lists)
    _run(here, locks, lists.files)
    moved = _moved(project, here, locks, lists.files)
    others = {}
    # what copies a wheel follows that wheel alone
    copies = {
        name
        for plan in project.pins.targets.values()
        for path in plan.requirements.values()
        for name in _inputs(locks[path])
    }
    for name, text in texts_of(here, ".in").items():
        if name not in copies:
            one = inputs.pinned(text, moved)
            if one.changes:
                others[name] = found[name] = one.text
                changes[name] = one.changes
                (here / name).write_text(one.text, encoding="utf-8")
    _run(here, locks, others)
    told = {}
    for name, old in locks.items():
        new = _read(here, name)
        if new != old:
            found[name] = new
            told[name] = differences(old, new)
    done = Relocked(found, changes, told, lists.ours)
    write_file(kept, json.dumps({"key": key, "found": typed.as_json(done)}).encode())
    return done


def texts_of(root: Path, suffix: str = "") -> dict[str, str]:
    """Return the files of requirements/ with a suffix, by path in the checkout."""
    return {name: _read(root, name) for name in _names(root, suffix)}


def differences(old: str, new: str) -> tuple[str, ...]:
    """Return the packages of a lock that changed, for people."""
    before, after = drift.exact(old), drift.exact(new)
    return tuple(
        f"{name} {before.get(name, 'none')} → {after.get(name, 'none')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def _run(here: Path, locks: Mapping[str, str], lists: Mapping[str, str]) -> None:
    """Lock what is made from some lists; what still fits keeps its version."""
    names = [Path(name).name for name, text in locks.items() if set(_inputs(text)) & lists.keys()]
    if not names:
        return
    env = {"UV": str(interpreter.uv_program()), "PYTHONPATH": str(ROOT)}
    try:
        call("bash", "scripts/lock.sh", *names, cwd=here, env=env, stream=True)
    except CommandError as error:
        msg = f"requirements cannot be locked: {', '.join(names)}\n{error}"
        remedy = "change the .in file in requirements/ of this checkout; then --continue"
        raise RebaseStopped(msg, remedy) from error


def _moved(
    project: Project, here: Path, locks: Mapping[str, str], lists: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the packages that wheels declare whose locked version moved."""
    named = {canonicalize_name(one.name) for text in lists.values() for one in inputs.listed(text)}
    found: dict[str, tuple[str, str]] = {}
    for plan in project.pins.targets.values():
        for name in plan.requirements.values():
            before, after = drift.exact(locks[name]), drift.exact(_read(here, name))
            found |= {
                package: (before[package], after[package])
                for package in named & before.keys() & after.keys()
                if before[package] != after[package]
            }
    return found


def _copies(text: str, declared: Sequence[Requirement]) -> bool:
    """Return whether a list is the copy of what a wheel declares: it has most of it."""
    lines, plain = inputs.listed(text), inputs.plain(declared)
    return 2 * sum(one in lines for one in plain) > len(plain)


def _inputs(lock: str) -> tuple[str, ...]:
    """Return the lists that a lock was made from, which uv names in it."""
    return _once(_INPUT.findall(lock))


def _names(root: Path, suffix: str) -> list[str]:
    return sorted(f"{_FOLDER}/{path.name}" for path in (root / _FOLDER).glob(f"*{suffix}"))


def _read(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


def _once(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
