"""A move with all that belongs to it, made and tried in a throw-away checkout before it lands."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.build.context import STAGES
from sparkforge.build.options import chosen_series
from sparkforge.core import git
from sparkforge.core.disk import disk_errors, write_files
from sparkforge.core.errors import RebaseStopped
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.maintain import patchtests, reduced
from sparkforge.maintain.companions import filesizes, locks
from sparkforge.maintain.companions.locks import Relocked
from sparkforge.maintain.patchtests import Result
from sparkforge.maintain.rebase.drift import Drift
from sparkforge.pins import pins
from sparkforge.pins.pins import Upstream
from sparkforge.sources import sizes
from sparkforge.sources.project import ROOT, Project

HEAD = ("patch", "its test", "without all patches")
_ENVIRONMENTS = {".venv": "requirements/driver.txt", ".venv-dev": "requirements/dev.txt"}


@dataclass(frozen=True)
class Built:
    """A build that succeeded."""

    command: str
    seconds: float


@dataclass(frozen=True)
class Move:
    """A move that was tried, and in which nothing failed."""

    files: Mapping[Path, bytes | None]
    """What the rebase itself writes."""
    before: Mapping[str, str]
    """The files of requirements/ that it began with."""
    relocked: Relocked
    requirements: Mapping[str, str]
    """Lists, locks and sizes, by path in the checkout."""
    builds: tuple[Built, ...]
    tests: tuple[Result, ...]
    drift: tuple[Drift, ...]
    """What no longer agrees in spite of all that."""


def make(
    project: Project,
    files: Mapping[Path, bytes | None],
    moved: Mapping[str, Upstream],
    series: Collection[str],
    folder: Path,
    drifting: Callable[[Project], list[Drift]],
) -> Move:
    """Make requirements, locks and sizes for a move, and try all of it; the checkout stays.

    Args:
        files: what the rebase writes into the checkout.
        moved: the upstreams with another release, as pins.yaml will have them.
        series: the upstreams whose series moved.
        folder: of the rebase; it gets the throw-away checkout.
        drifting: what does not agree in a checkout.

    Raises:
        RebaseStopped: the requirements cannot be locked, or a build or a test fails.
    """
    root, there = project.root, folder / "checkout"
    before = locks.texts_of(root)
    with log.step("requirements"):
        lists, ours = locks.follow(project, moved)
        _copy(root, there)
        write_files({there / path.relative_to(root): data for path, data in files.items()})
        _write(there, lists)
        relocked = locks.lock(project, there, lists, ours)
        path = there / project.pins_path.name
        here = replace(project, pins_path=path, pins=pins.load(path))
        requirements = dict(relocked.files)
        if (there / sizes.FILE).is_file():
            text = filesizes.text(there, here.pins, project.store)
            if text != (root / sizes.FILE).read_text(encoding="utf-8"):
                requirements[sizes.FILE] = text
                _write(there, {sizes.FILE: text})
    for name, changes in relocked.changes.items():
        log.info(f"{name}: {'; '.join(changes)}")
    for what in relocked.ours:
        log.warning(f"to decide: {what}")
    for name, lock in _ENVIRONMENTS.items():  # lent where their locks are the same
        if (root / name).is_dir() and (root / lock).read_bytes() == (there / lock).read_bytes():
            (there / name).symlink_to((root / name).resolve())
    built = tuple(_built(here, target) for target in _targets(here, series))
    tests = _tested(here, series)
    left = drifting(replace(project, pins_path=path))
    return Move(files, before, relocked, requirements, built, tests, tuple(left))


def _copy(root: Path, folder: Path) -> None:
    """Copy a checkout, without what git ignores."""
    if git.git_ok(root, "rev-parse", "--is-inside-work-tree"):
        words = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
        names = [name for name in git.git(root, *words).split("\0") if name]
    else:
        hidden = {"dist", ".git", ".sparkforge", *_ENVIRONMENTS}
        paths = (path.relative_to(root) for path in root.rglob("*") if not path.is_dir())
        names = [str(path) for path in paths if path.parts[0] not in hidden]
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        for name in names:
            if os.path.lexists(root / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    write_files({folder / name: text.encode() for name, text in texts.items()})


def _targets(here: Project, moved: Collection[str]) -> list[str]:
    return [
        name
        for name, plan in here.pins.targets.items()
        if {*plan.wheels, *(c for wheel in plan.wheels.values() for c in wheel.carries)} & {*moved}
    ]


def _built(here: Project, target: str) -> Built:
    """Build a target as far as any machine can: with a smoke test where it has one."""
    start = time.monotonic()
    whole = here.pins.targets[target].smoke is not None
    words = ["--target", target, "--engine", "none", "--until", STAGES[-1] if whole else "wheels"]
    places = ["--pins", str(here.pins_path), "--store", str(here.store.root)]
    command = f"build.py {shlex.join(words)}"
    # the code of that checkout, where it has any
    env = {} if (here.root / "sparkforge").is_dir() else {"PYTHONPATH": str(ROOT)}
    with log.step(f"{command}, in the throw-away checkout"):
        words = ["-m", "sparkforge", "build", *words, *places]
        done = call(sys.executable, *words, cwd=here.root, env=env, stream=True, check=False)
    if done.returncode:
        msg = f"{command} ends with {done.returncode} on the new release: see above"
        raise RebaseStopped(msg, _remedy(here))
    return Built(command, time.monotonic() - start)


def _tested(here: Project, moved: Collection[str]) -> tuple[Result, ...]:
    """Run the tests of the moved patches with the series, and on the new release without any.

    One that passes there needs no patch: upstream has it.
    """
    every = chosen_series(None, here.root, here.pins)
    chosen = [own for own in every if own.upstream in moved and own.patches]
    patches = [(own.upstream, patch) for own in chosen for patch in own.patches]
    tests = [patch.trailers["Test"] for _, patch in patches]
    if not tests:
        return ()
    python = patchtests.dev_python(here.root)
    with log.step("the patches' tests, with the series and without it"):
        whole = patchtests.run(python, here, tests, reduced.variables(here), cut=True)
        none = [reduced.prefixes(here.store, own, reduced.source(here, own))[0] for own in chosen]
        with reduced.checkout(here, none) as bare:
            without = patchtests.run(python, here, tests, reduced.variables(bare), cut=True)
    results = tuple(
        Result(up, patch.name, test, whole[test], without[test])
        for (up, patch), test in zip(patches, tests, strict=True)
    )
    log.table([HEAD, *map(row, results)])
    if failed := [result for result in results if result.whole.failed]:
        lines = [
            f"{one.upstream}: {one.patch}: {one.test} fails on the new release: {one.whole.message}"
            for one in failed
        ]
        raise RebaseStopped("\n".join(lines), _remedy(here))
    return results


def row(result: Result) -> tuple[str, str, str]:
    """Return a patch's test as a row of a table."""
    whole, without = result.whole, result.without
    fails = "fails" if without.failed else "passes" if without.passed else "skipped"
    if whole.failed:
        return result.patch.removesuffix(".patch"), f"FAILS: {whole.message}", fails
    shown = "passes" if whole.passed else "skipped: it proves nothing here"
    if result.verdict == "not noticed":
        fails = "passes: upstream has it"
    return result.patch.removesuffix(".patch"), shown, fails


def _remedy(here: Project) -> str:
    trees = here.root.parent
    return (
        f"fix the test in your checkout, or amend the patch's commit in {trees}/tree (another"
        " upstream's: tree-NAME); then --continue; or --abort"
    )
