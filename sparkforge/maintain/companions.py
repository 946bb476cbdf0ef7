"""A move with all that belongs to it, made and tried in a throw-away checkout before it lands.

Lists in requirements/ copy what wheels declare, so they follow a new wheel. Lines of our own stay,
and what we left out is left out again.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkforge.build.context import STAGES
from sparkforge.build.options import chosen_series
from sparkforge.core.disk import disk_errors, sha256_file, write_files
from sparkforge.core.errors import CommandError, RebaseStopped
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.maintain import ablate, releases
from sparkforge.maintain.releases import exactly, name_of, read
from sparkforge.pins import pins
from sparkforge.pins.pins import Upstream
from sparkforge.runtime import environment
from sparkforge.sources.project import ROOT, Project

if TYPE_CHECKING:
    from sparkforge.maintain.landing import Files
    from sparkforge.maintain.rebase import Plan

Declared = tuple[list[Requirement], list[Requirement]]
"""By the old wheels, and by the new ones."""
Trial = dict[str, dict[str, str]]
"""``tests``: the result of each; ``wheels``: the sha256 of each, by ``TARGET/FILE``."""

_INPUT = re.compile(r"-r (requirements/[\w.-]+\.in)$", re.MULTILINE)
_ENVIRONMENTS = {".venv": "requirements/driver.txt", ".venv-dev": "requirements/dev.txt"}


def tried(
    project: Project, files: Files, plan: Plan, folder: Path, *, trial: bool
) -> tuple[Project, dict[str, str], Trial]:
    """Make requirements and locks for a move in a throw-away checkout, and try all of it there.

    Returns it, and the files of requirements/ that changed. Without ``trial``, no code of the new
    release runs.
    """
    root, before = project.root, texts_of(project.root)
    hidden = shutil.ignore_patterns("dist", "dev", ".git", ".sparkforge", *_ENVIRONMENTS)
    with log.step("requirements"):
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(root, folder, symlinks=True, ignore=hidden)
        write_files({folder / path.relative_to(root): data for path, data in files.items()})
        _lock(project, folder, plan.moved)
        path = folder / project.pins_path.name
        here = replace(project, pins_path=path, pins=pins.load(path))
    fresh = {name: text for name, text in texts_of(folder).items() if text != before.get(name)}
    log.info(f"changed: {', '.join(fresh)}")
    for name, lock in _ENVIRONMENTS.items():  # lent where their locks are the same
        if (root / name).is_dir() and lock not in fresh:
            (folder / name).symlink_to((root / name).resolve())
    if not trial:
        return here, fresh, {}
    moved = {move.upstream for move in plan.moves}
    for name, target in here.pins.targets.items():
        if moved & {*target.wheels, *(one for w in target.wheels.values() for one in w.carries)}:
            _build(here, name)
    wheels = sorted((folder / "dist").glob("*/*.whl"))
    digests = {f"{path.parent.name}/{path.name}": sha256_file(path) for path in wheels}
    return here, fresh, {"tests": _tested(here, moved), "wheels": digests}


def texts_of(root: Path) -> dict[str, str]:
    """Return the files of requirements/, by path in the checkout."""
    paths = sorted((root / "requirements").iterdir())
    return {f"requirements/{p.name}": p.read_text(encoding="utf-8") for p in paths if p.is_file()}


def _declarations(project: Project, moved: Mapping[str, Upstream]) -> dict[str, Declared]:
    """Return what the old and the new wheels declare, by the list of the target that has them."""
    found: dict[str, Declared] = {}
    for up, release in moved.items():
        pinned = project.pins.upstreams[up]
        for plan, platform, key in releases.wheels_of(project, up, release):
            dropped = {*map(canonicalize_name, plan.wheels[up].drop_requires)}
            lock = project.root / plan.requirements[platform]
            for name in _INPUT.findall(lock.read_text(encoding="utf-8")):
                old, new = found.setdefault(name, ([], []))
                for into, file in ((old, pinned.files[key]), (new, release.files[key])):
                    into += [
                        one
                        for one in releases.declared(project, file)
                        if name_of(one) not in dropped and "extra ==" not in str(one.marker)
                    ]
    return found


def follow(
    text: str,
    old: Sequence[Requirement],
    new: Sequence[Requirement],
    pinned: Mapping[str, tuple[str, str]],
) -> str:
    """Return a list of requirements with what changed from old declarations to new ones.

    A line that nothing declared stays, and so does its place. Exact versions of ``pinned`` packages
    follow from the first to the second.
    """
    fresh = [one for one in dict.fromkeys(new) if one not in old]
    lines = []
    for line in text.splitlines():
        found = read(line)
        name = "" if found is None else name_of(found)
        if found in old and found not in new:
            lines += [str(one) for one in fresh if name_of(one) == name]
            fresh = [one for one in fresh if name_of(one) != name]
            continue
        before, after = pinned.get(name, ("", ""))
        exact = found is not None and str(found.specifier) == f"=={before}"
        lines.append(line.replace(f"=={before}", f"=={after}", 1) if exact else line)
    known = {name_of(one) for one in old}  # what we have left out of the old ones
    return "\n".join([*lines, *(str(one) for one in fresh if name_of(one) not in known)]) + "\n"


def _lock(project: Project, here: Path, moved: Mapping[str, Upstream]) -> None:
    """Change the lists of a checkout, and lock them again; what still fits keeps its version."""
    declared, before = _declarations(project, moved), texts_of(here)
    # exact pins of other lists follow: of our packages, and of what the wheels pin
    pins = {
        str(canonicalize_name(file.project)): (project.pins.upstreams[up].version, release.version)
        for up, release in moved.items()
        for file in release.files.values()
    }
    for pair in declared.values():
        was, now = ({name_of(one): exactly(one.specifier) for one in every} for every in pair)
        for package in was.keys() & now.keys():
            if (one := was[package]) and (other := now[package]) and one != other:
                pins[package] = (one.partition("+")[0], other.partition("+")[0])
    lists = {
        name: follow(text, *declared.get(name, ([], [])), pins)
        for name, text in before.items()
        if name.endswith(".in")
    }
    lists = {name: text for name, text in lists.items() if text != before[name]}
    write_files({here / name: text.encode() for name, text in lists.items()})
    locks = (name for name, text in before.items() if lists.keys() & {*_INPUT.findall(text)})
    if not (names := [Path(name).name for name in locks if name.endswith(".txt")]):
        return
    env = {"UV": str(environment.uv_program()), "PYTHONPATH": str(ROOT)}
    try:
        call("bash", "scripts/lock.sh", *names, cwd=here, env=env, stream=True)
    except CommandError as error:
        msg = f"requirements cannot be locked: {', '.join(names)}\n{error}"
        remedy = "change the .in file in requirements/ of this checkout; then --continue"
        raise RebaseStopped(msg, remedy) from error


def _build(here: Project, target: str) -> None:
    """Build a target as far as any machine can: with a smoke test where it has one."""
    until = STAGES[-1] if here.pins.targets[target].smoke is not None else "wheels"
    words = ["--target", target, "--engine", "none", "--until", until]
    places = ["--pins", str(here.pins_path), "--store", str(here.store.root)]
    command = f"build.py {shlex.join(words)}"
    env = {"PYTHONPATH": str(ROOT)}  # behind the code of that checkout
    with log.step(f"{command}, in the throw-away checkout"):
        words = ["-m", "sparkforge", "build", *words, *places]
        done = call(sys.executable, *words, cwd=here.root, env=env, stream=True, check=False)
    if done.returncode:
        msg = f"{command} ends with {done.returncode} on the new release: see above"
        raise RebaseStopped(msg, _remedy(here))


def _tested(here: Project, moved: Collection[str]) -> dict[str, str]:
    """Run the tests of the moved patches; returns the result of each."""
    every = chosen_series(None, here.root, here.pins)
    patches = [patch for own in every if own.upstream in moved for patch in own.patches]
    tests = [ablate.test_of(patch) for patch in patches]
    with log.step("the patches' tests"):
        python = ablate.dev_python(here.root) if tests else Path()
        found = ablate.run_tests(python, here, tests)
    log.table([("test", "result"), *((test, one.result) for test, one in found.items())])
    lines = [
        f"{patch.name}: {test} fails on the new release: {found[test].message}"
        for patch, test in zip(patches, tests, strict=True)
        if found[test].result in ("fails", "broken")
    ]
    if lines:
        raise RebaseStopped("\n".join(lines), _remedy(here))
    return {test: one.result for test, one in found.items()}


def _remedy(here: Project) -> str:
    return (
        f"fix the test in your checkout, or amend the patch's commit in {here.root.parent}/tree"
        " (another upstream's: tree-NAME); then --continue; or --abort"
    )
