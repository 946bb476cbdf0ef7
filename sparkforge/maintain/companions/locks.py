"""The lists and locks of requirements of a checkout, after a move of its pins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from sparkforge.core.errors import CommandError, RebaseStopped
from sparkforge.core.run import call
from sparkforge.maintain.companions import demands, inputs
from sparkforge.maintain.rebase import drift, metadata
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
    changes: Mapping[str, tuple[str, ...]]
    """What changed in each, for people."""
    ours: tuple[str, ...]
    """What a person has to decide."""


def follow(project: Project, moved: Mapping[str, Upstream]) -> tuple[dict[str, str], list[str]]:
    """Return the lists of requirements as the wheels of new releases declare them.

    Args:
        moved: the upstreams that move, as pins.yaml will have them.

    Returns:
        The lists that changed, by path, and what a person has to decide.
    """
    texts = texts_of(project.root, ".in")
    found = dict(texts)
    ours: dict[str, None] = {}
    for up, release in moved.items():
        pinned = project.pins.upstreams[up]
        for plan, platform, key in demands.moved_wheels(project, up, release):
            old = metadata.declared(project, pinned.files[key])
            new = metadata.declared(project, release.files[key])
            without = frozenset(map(canonicalize_name, plan.wheels[up].drop_requires))
            lock_text = (project.root / plan.requirements[platform]).read_text(encoding="utf-8")
            for name in _INPUT.findall(lock_text):
                # a list is the copy of what a wheel declares if it has most of it
                lines, plain = inputs.listed(texts[name]), inputs.plain(old)
                if 2 * sum(one in lines for one in plain) > len(plain):
                    text, left = inputs.follow(found[name], old, new, without)
                    found[name] = inputs.renamed(text, pinned.version, release.version)
                    ours |= dict.fromkeys(f"{name}: {what}" for what in left)
        packages = {str(canonicalize_name(file.project)) for file in release.files.values()}
        own = dict.fromkeys(packages, (pinned.version, release.version))
        found = {name: inputs.pinned(text, own) for name, text in found.items()}
    return {name: text for name, text in found.items() if text != texts[name]}, list(ours)


def lock(project: Project, here: Path, lists: Mapping[str, str], ours: list[str]) -> Relocked:
    """Lock lists again, in a checkout that has them, and those that pin what moved there.

    Args:
        here: a throw-away copy of the checkout, with the lists in it.

    Raises:
        RebaseStopped: they cannot be resolved.
    """
    before = texts_of(project.root)
    locks = {name: text for name, text in before.items() if name.endswith(".txt")}
    _run(here, locks, lists.keys())
    mains = {name for plan in project.pins.targets.values() for name in plan.requirements.values()}
    # the packages that wheels declare whose locked version moved
    named = {inputs.name_of(one) for text in lists.values() for one in inputs.listed(text)}
    moved: dict[str, tuple[str, str]] = {}
    for name in mains:
        old = drift.exact(locks[name])
        new = drift.exact((here / name).read_text(encoding="utf-8"))
        both = named & old.keys() & new.keys()
        moved |= {one: (old[one], new[one]) for one in both if old[one] != new[one]}
    # what copies a wheel follows that wheel alone
    copies = {name for main in mains for name in _INPUT.findall(locks[main])}
    others = set()
    for name, text in texts_of(here, ".in").items():
        if name not in copies and (fresh := inputs.pinned(text, moved)) != text:
            others.add(name)
            (here / name).write_text(fresh, encoding="utf-8")
    _run(here, locks, others)
    files = {name: text for name, text in texts_of(here).items() if text != before.get(name)}
    changes = {name: _differences(before.get(name, ""), text) for name, text in files.items()}
    return Relocked(files, changes, tuple(ours))


def texts_of(root: Path, suffix: str = "") -> dict[str, str]:
    """Return the files of requirements/ with a suffix, by path in the checkout."""
    paths = sorted((root / _FOLDER).glob(f"*{suffix}"))
    return {f"{_FOLDER}/{path.name}": path.read_text(encoding="utf-8") for path in paths}


def _differences(old: str, new: str) -> tuple[str, ...]:
    """Return the packages of a list or lock that changed, for people."""
    before, after = (
        drift.exact(text) | {inputs.name_of(one): str(one.specifier) for one in inputs.listed(text)}
        for text in (old, new)
    )
    return tuple(
        f"{name} {before.get(name, 'none') or 'any'} → {after.get(name, 'none') or 'any'}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def _run(here: Path, locks: Mapping[str, str], lists: Set[str]) -> None:
    """Lock what is made from some lists; what still fits keeps its version."""
    names = [Path(name).name for name, text in locks.items() if lists & {*_INPUT.findall(text)}]
    if not names:
        return
    env = {"UV": str(interpreter.uv_program()), "PYTHONPATH": str(ROOT)}
    try:
        call("bash", "scripts/lock.sh", *names, cwd=here, env=env, stream=True)
    except CommandError as error:
        msg = f"requirements cannot be locked: {', '.join(names)}\n{error}"
        remedy = "change the .in file in requirements/ of this checkout; then --continue"
        raise RebaseStopped(msg, remedy) from error
