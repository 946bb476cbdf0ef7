"""A move with all that belongs to it, made and tried in a throw-away checkout before it lands.

Lists in requirements/ copy what wheels declare, so they follow a new wheel. Lines that are ours
stay: what the wheel declares and we left out is left out again, and a line that the wheel never
had is kept.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkforge.build.context import STAGES
from sparkforge.build.options import chosen_series
from sparkforge.build.packs.modules import LOCK
from sparkforge.build.stages.thirdparty import PYTHON
from sparkforge.core.disk import disk_errors, write_files
from sparkforge.core.errors import CommandError, RebaseStopped
from sparkforge.core.index import Index
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.maintain import drift, patchtests
from sparkforge.maintain.drift import exact, listed, name_of, read
from sparkforge.maintain.patchtests import Result
from sparkforge.pins import pins
from sparkforge.pins.pins import Pins, Upstream
from sparkforge.pins.types import Platform
from sparkforge.runtime import environment
from sparkforge.sources import sizes, wheelhouse
from sparkforge.sources.project import ROOT, Project
from sparkforge.sources.wheelhouse import Locked, Wanted
from sparkforge.store.store import Store

if TYPE_CHECKING:
    from sparkforge.maintain.job import Plan
    from sparkforge.maintain.landing import Files

_INPUT = re.compile(r"-r (requirements/[\w.-]+\.in)$", re.MULTILINE)
_ENVIRONMENTS = {".venv": "requirements/driver.txt", ".venv-dev": "requirements/dev.txt"}


@dataclass(frozen=True)
class Tried:
    """A move that was tried, and in which nothing failed."""

    files: Files
    """What ``landing.planned`` returned."""
    project: Project
    """The throw-away checkout."""
    requirements: Mapping[str, str]
    """Lists, locks and sizes that changed, by path in the checkout."""
    builds: Sequence[str]
    tests: Sequence[Result]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The tests, as a table."""
        head = ("patch", "its test", "without all patches")
        return [head, *((t.patch, t.whole.result, t.without.result) for t in self.tests)]


def tried(project: Project, files: Files, plan: Plan, folder: Path) -> Tried:
    """Make requirements, locks and sizes for a move, and try all of it; the checkout stays.

    Args:
        folder: for the throw-away checkout.
    """
    root, before = project.root, texts_of(project.root)
    hidden = {"dist", "dev", ".git", ".sparkforge", *_ENVIRONMENTS}
    with log.step("requirements"):
        lists = _followed(project, plan.moved, before)
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(
                root,
                folder,
                symlinks=True,
                ignore=lambda at, names: hidden & {*names} if Path(at) == root else (),
            )
        new = {folder / path.relative_to(root): data for path, data in files.items()}
        write_files(new | {folder / name: text.encode() for name, text in lists.items()})
        _lock(project, folder, lists, before)
        path = folder / project.pins_path.name
        here = replace(project, pins_path=path, pins=pins.load(path))
        if (folder / sizes.FILE).is_file():
            text = sizes_text(folder, here.pins, project.store)
            (folder / sizes.FILE).write_text(text, encoding="utf-8")
    fresh = {name: text for name, text in texts_of(folder).items() if text != before.get(name)}
    log.info(f"changed: {', '.join(fresh)}")
    for name, lock in _ENVIRONMENTS.items():  # lent where their locks are the same
        if (root / name).is_dir() and lock not in fresh:
            (folder / name).symlink_to((root / name).resolve())
    moved = {part.upstream for part in plan.parts}
    builds = [
        _built(here, name)
        for name, target in here.pins.targets.items()
        if moved & {*target.wheels, *(one for w in target.wheels.values() for one in w.carries)}
    ]
    done = Tried(files, here, fresh, builds, _tested(here, moved))
    log.table(done.rows)
    for one in done.tests:
        if one.verdict == "not noticed":
            log.warning(
                f"{one.upstream}: {one.patch}: upstream has it: its test passes without\n"
                f"    hint: drop it: build.py patches export --drop {one.patch}"
            )
    return done


def texts_of(root: Path) -> dict[str, str]:
    """Return the files of requirements/, by path in the checkout."""
    paths = sorted((root / "requirements").iterdir())
    return {f"requirements/{p.name}": p.read_text(encoding="utf-8") for p in paths if p.is_file()}


# -- requirements ----------------------------------------------------------------------------------


def _followed(
    project: Project, moved: Mapping[str, Upstream], texts: Mapping[str, str]
) -> dict[str, str]:
    """Return the lists that change with the new wheels."""
    found = {name: text for name, text in texts.items() if name.endswith(".in")}
    for up, release in moved.items():
        pinned = project.pins.upstreams[up]
        for wheel in drift.wheels_of(project, up, release):
            old, new = (
                # those that no extra asks for
                [one for one in drift.declared(project, file) if "extra ==" not in str(one.marker)]
                for file in (pinned.files[wheel.key], release.files[wheel.key])
            )
            without = {*map(canonicalize_name, wheel.plan.wheels[up].drop_requires)}
            for name in _INPUT.findall(texts[wheel.plan.requirements[wheel.platform]]):
                # a list is the copy of what a wheel declares if it has most of it
                lines = listed(texts[name])
                if 2 * sum(one in lines for one in old) > len(old):
                    found[name] = follow(found[name], old, new, without)
        packages = {str(canonicalize_name(file.project)) for file in release.files.values()}
        own = dict.fromkeys(packages, (pinned.version, release.version))
        found = {name: pinned_anew(text, own) for name, text in found.items()}
    return {name: text for name, text in found.items() if text != texts[name]}


def follow(
    text: str, old: Sequence[Requirement], new: Sequence[Requirement], without: Collection[str]
) -> str:
    """Return a list with what changed from one wheel's declarations to another's.

    ``without``: canonical names that a target leaves out.
    """
    fresh = [one for one in new if one not in old]
    known = {name_of(one) for one in old}
    lines: list[str] = []
    last = 0  # behind the last line that the wheel declares
    for line in text.splitlines():
        found = read(line)
        if found is not None and found in old and found not in new:
            to = next((one for one in fresh if name_of(one) == name_of(found)), None)
            if to is not None:
                fresh.remove(to)
                lines.append(str(to))
            last = len(lines)
        else:
            lines.append(line)
            last = len(lines) if found in old or found in new else last
    more = [one for one in fresh if name_of(one) not in {*known, *without}]
    lines[last:last] = [str(one) for one in more if one not in map(read, lines)]
    return "\n".join(lines) + "\n"


def pinned_anew(text: str, moved: Mapping[str, tuple[str, str]]) -> str:
    """Return a list whose exact pins of packages move with them, from an old to a new version."""
    lines = []
    for line in text.splitlines():
        found = read(line)
        old, to = moved.get(name_of(found), ("", "")) if found is not None else ("", "")
        same = found is not None and str(found.specifier) == f"=={old}"
        lines.append(line.replace(f"=={old}", f"=={to}", 1) if same else line)
    return "\n".join(lines) + "\n"


def _lock(
    project: Project, here: Path, lists: Mapping[str, str], before: Mapping[str, str]
) -> None:
    """Lock lists again in a checkout that has them, then those that pin what moved there."""
    locks = {name: text for name, text in before.items() if name.endswith(".txt")}
    _run(here, locks, lists)
    mains = {name for plan in project.pins.targets.values() for name in plan.requirements.values()}
    # the packages that wheels declare whose locked version moved
    named = {name_of(one) for text in lists.values() for one in listed(text)}
    moved: dict[str, tuple[str, str]] = {}
    for name in mains:
        old, new = exact(locks[name]), exact((here / name).read_text(encoding="utf-8"))
        both = named & old.keys() & new.keys()
        moved |= {one: (old[one], new[one]) for one in both if old[one] != new[one]}
    # what copies a wheel follows that wheel alone
    copies = {name for main in mains for name in _INPUT.findall(locks[main])}
    others = {
        name: fresh
        for name, text in texts_of(here).items()
        if name.endswith(".in") and name not in copies
        if (fresh := pinned_anew(text, moved)) != text
    }
    write_files({here / name: text.encode() for name, text in others.items()})
    _run(here, locks, others)


def _run(here: Path, locks: Mapping[str, str], lists: Mapping[str, str]) -> None:
    """Lock what is made from some lists; what still fits keeps its version."""
    made = [name for name, text in locks.items() if lists.keys() & {*_INPUT.findall(text)}]
    names = [Path(name).name for name in made]
    if not names:
        return
    env = {"UV": str(environment.uv_program()), "PYTHONPATH": str(ROOT)}
    try:
        call("bash", "scripts/lock.sh", *names, cwd=here, env=env, stream=True)
    except CommandError as error:
        msg = f"requirements cannot be locked: {', '.join(names)}\n{error}"
        remedy = "change the .in file in requirements/ of this checkout; then --continue"
        raise RebaseStopped(msg, remedy) from error


# -- builds and tests ------------------------------------------------------------------------------


def _built(here: Project, target: str) -> str:
    """Build a target as far as any machine can: with a smoke test where it has one."""
    start = time.monotonic()
    until = STAGES[-1] if here.pins.targets[target].smoke is not None else "wheels"
    words = ["--target", target, "--engine", "none", "--until", until]
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
    return f"`{command}`: {time.monotonic() - start:.0f} s"


def _tested(here: Project, moved: Collection[str]) -> list[Result]:
    """Run the tests of the moved patches with the series, and on the new release without any.

    One that passes there needs no patch: upstream has it.
    """
    every = chosen_series(None, here.root, here.pins)
    chosen = [own for own in every if own.upstream in moved and own.patches]
    patches = [(own.upstream, patch) for own in chosen for patch in own.patches]
    tests = [patch.trailers["Test"] for _, patch in patches]
    if not tests:
        return []
    python = patchtests.dev_python(here.root)
    with log.step("the patches' tests, with the series and without it"):
        whole = patchtests.run(python, here, tests)
        none = [patchtests.prefixes(here, own)[0] for own in chosen]
        with patchtests.checkout(here, none) as bare:
            without = patchtests.run(python, here, tests, bare)
    results = [
        Result(up, patch.name, test, whole[test], without[test])
        for (up, patch), test in zip(patches, tests, strict=True)
    ]
    if failed := [one for one in results if one.whole.result in ("fails", "broken")]:
        lines = [
            f"{one.upstream}: {one.patch}: {one.test} fails on the new release: {one.whole.message}"
            for one in failed
        ]
        raise RebaseStopped("\n".join(lines), _remedy(here))
    return results


def _remedy(here: Project) -> str:
    return (
        f"fix the test in your checkout, or amend the patch's commit in {here.root.parent}/tree"
        " (another upstream's: tree-NAME); then --continue; or --abort"
    )


# -- sizes of locked files ------------------------------------------------------------------------

_SIZES = "# Bytes of the locked files; made by scripts/sizes.py. Do not edit.\n"


def sizes_text(root: Path, pins: Pins, store: Store) -> str:
    """Return what the file of a checkout has to be."""
    known = sizes.read(root / sizes.FILE)
    lines = set()
    for wanted in _wheelhouses(root, pins):
        at = (wanted.python, wanted.platform)
        items = wheelhouse.applying(wheelhouse.read_lock(wanted.lock), wanted.tools, *at)
        named = [(item, wheelhouse.recorded(item, *at, known)) for item in items]
        lines |= {f"{one.sha256}  {one.size}  {one.name}\n" for _, one in named if one}
        if missing := [item for item, one in named if one is None]:
            _fetch_missing(store, missing, wanted)
        for item in missing:
            found = wheelhouse.in_store(store, item, *at)
            assert found is not None  # fetched just now
            lines.add(f"{found[0]}  {found[1].stat().st_size}  {found[1].name}\n")
    return _SIZES + "".join(sorted(lines))


def _wheelhouses(root: Path, pins: Pins) -> list[Wanted]:
    """Return everything that is fetched."""
    driver = wheelhouse.read_lock(root / "requirements" / "driver.txt")
    tools = tuple(one for one in driver if one.name == "uv")
    found = []
    for target in pins.targets.values():
        for platform, name in (*target.requirements.items(), *(target.builder or {}).items()):
            backend = target.torch_backend
            found.append(Wanted(root / name, tools, target.python, platform, backend))
    compilers = {LOCK} if pins.plugin is None else {LOCK, pins.plugin.requirements}
    paths = [root / lock for lock in sorted(compilers) if (root / lock).is_file()]
    every = [(path, platform) for path in paths for platform in get_args(Platform)]
    return found + [Wanted(path, (), PYTHON, platform, None) for path, platform in every]


def _fetch_missing(store: Store, missing: list[Locked], wanted: Wanted) -> None:
    """Fetch some lines of a lock into the store."""
    with store.temporary("sizes") as work:
        part, wheels = work / wanted.lock.name, work / "wheels"
        hashes = (
            " ".join(f"--hash=sha256:{sha}" for sha in sorted(one.sha256s)) for one in missing
        )
        lines = (f"{one.requirement} {of}\n" for one, of in zip(missing, hashes, strict=True))
        part.write_text("".join(lines), encoding="utf-8")
        wheels.mkdir()
        these = replace(wanted, lock=part, tools=())
        uv = environment.uv_program()
        wheelhouse.fill(store, these, Index(), uv, offline=False, into=wheels)
