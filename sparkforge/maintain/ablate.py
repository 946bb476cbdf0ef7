"""``ablate``: leave each patch out and run its test, or find the patch that changes a command."""

from __future__ import annotations

import bisect
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cyclopts import Parameter

from sparkforge.build.context import Context
from sparkforge.build.graph import Build
from sparkforge.build.options import OutputOptions, chosen_series, platform_of
from sparkforge.core import git
from sparkforge.core.errors import CheckError, CommandError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.maintain import patchtests, reduced
from sparkforge.maintain.patchtests import MEANINGS, Result
from sparkforge.maintain.reduced import Reduced
from sparkforge.pins.compiling import Plugin
from sparkforge.runtime.environment import python_path
from sparkforge.series.series import Series
from sparkforge.sources.project import Project, ProjectOptions

_HEAD = ("patch", "its test", "left out, too", "verdict")
_OPTIONS = "VLLM_SPARKFORGE"
"""The variable that the plugin reads its options from."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``ablate``."""

    patch: tuple[str, ...] = field(default=(), kw_only=False)
    """patches to leave out, or parts of the plugin to switch off, one at a time (default: each)"""
    bisect: str | None = None
    """find the patch at which this shell command starts to fail or to pass"""
    upstream: str | None = None
    """limit to the series of this upstream"""
    target: str | None = None
    """build this target's environment for the command"""
    python: Path | None = None
    """Python with pytest (default: .venv-dev, created if missing)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def run(options: Options = Options()) -> int:
    """Leave patches out, or search for the one that changes the result; returns the exit code."""
    project = Project.open(options.project)
    if options.bisect is not None and options.patch:
        raise UsageError("--bisect and PATCH … conflict", "give only one")
    if options.target is not None and options.bisect is None:
        raise UsageError("--target needs --bisect", "add --bisect COMMAND")
    every = chosen_series(options.upstream, project.root, project.pins)
    every = [entry for entry in every if entry.patches]
    project.store.sweep()
    if options.bisect is not None:
        if options.target is not None:
            project.pins.target(options.target)
        return _bisect(project, every, options.bisect, options.target)
    parts = parts_of(project.root, project.pins.plugin) if options.upstream is None else {}
    names = {f"{name.removesuffix('.patch')}.patch" for name in options.patch if name not in parts}
    known = {patch.name for own in every for patch in own.patches}
    if unknown := sorted(names - known):
        msg = f"{', '.join(unknown)}: no such patch"
        raise UsageError(msg, "see build.py patches list, and docs/plugin.md for the parts")
    python = options.python or patchtests.dev_python(project.root)
    results = of_patches(project, every, python, names if options.patch else known)
    chosen = {n: test for n, test in parts.items() if not options.patch or n in options.patch}
    results += of_parts(project, python, chosen)
    log.document({"ablate": [result.as_json() for result in results]})
    rows = [
        (
            f"{one.upstream}: {one.patch.removesuffix('.patch')}",
            one.test,
            ", ".join(one.dependents) or "-",
            one.verdict,
        )
        for one in results
    ]
    log.table([_HEAD, *rows] if rows else [])
    bad = [result for result in results if result.verdict != "noticed"]
    for result in bad:
        message = result.whole.message or result.without.message
        what = f"{result.upstream}: {result.patch}: {result.test} {MEANINGS[result.verdict]}"
        log.error(f"{what}: {message}" if message else what)
    return CheckError.exit_code if bad else 0


def of_patches(
    project: Project, every: Sequence[Series], python: Path, names: set[str]
) -> list[Result]:
    """Run the tests of patches with the whole series, and each without its patch."""
    chosen = [(own, patch) for own in every for patch in own.patches if patch.name in names]
    if nameless := [str(patch.path) for _, patch in chosen if not patch.trailers.get("Test")]:
        msg = f"{', '.join(nameless)}: has no test"
        raise SeriesError(msg, "add the trailer Test to the last paragraph")
    tests = [patch.trailers["Test"] for _, patch in chosen]
    with log.step("the whole series"):
        whole = patchtests.run(python, project, tests, {}) if tests else {}
    results = []
    for (own, patch), test in zip(chosen, tests, strict=True):
        with log.step(f"without {patch.name}"):
            left = reduced.without(project.store, own, reduced.source(project, own), patch.name)
            if left.dependents:
                log.info(f"does not merge without it, left out, too: {', '.join(left.dependents)}")
            with reduced.checkout(project, [left]) as here:
                env = reduced.variables(here)
                cut = patchtests.run(python, project, [test], env, cut=True)
        result = Result(own.upstream, patch.name, test, whole[test], cut[test], left.dependents)
        log.info(result.verdict)
        results.append(result)
    return results


def parts_of(root: Path, plugin: Plugin | None) -> dict[str, str]:
    """Return the test's node id of each part, as the plugin's pyproject.toml names it.

    Raises:
        SeriesError: it names none.
    """
    if plugin is None:
        return {}
    path = root / plugin.folder / "pyproject.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(test) for name, test in document["tool"]["sparkforge"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise SeriesError(msg, "name each part's test in the table tool.sparkforge") from error


def of_parts(project: Project, python: Path, tests: Mapping[str, str]) -> list[Result]:
    """Run the tests of the plugin's parts with all parts, and each with its part switched off."""
    whole = patchtests.run(python, project, list(tests.values()), {}) if tests else {}
    results = []
    for part, test in tests.items():
        env = {**reduced.variables(project), _OPTIONS: json.dumps({"off": [part]})}
        with log.step(f"without {part}"):
            cut = patchtests.run(python, project, [test], env, cut=True)[test]
        results.append(Result("plugin", part, test, whole[test], cut))
    return results


# -- bisecting ---------------------------------------------------------------------------------


def _bisect(project: Project, every: Sequence[Series], command: str, target: str | None) -> int:
    """Find the patch with which a command begins to fail, or to pass.

    The search goes over prefixes of the series, which apply as they are even where patches need
    each other. Several upstreams count as one series.
    """
    patches = [(own.upstream, patch.name) for own in every for patch in own.patches]
    places: list[list[Reduced]] = []
    prefixes = [reduced.prefixes(project.store, own, reduced.source(project, own)) for own in every]
    for at in range(len(patches) + 1):
        left, place = at, []
        for own in prefixes:
            count = min(left, len(own) - 1)
            left -= count
            place.append(own[count])
        places.append(place)

    def fails(at: int) -> bool:
        name = f"with {at} of {len(patches)} patches"
        with log.step(name), reduced.checkout(project, places[at]) as here:
            failed = _fails(here, places[at], command, target)
            log.info("fails" if failed else "passes")
        return failed

    first, last = fails(0), fails(len(patches))
    if first == last:
        msg = f"{command}: {'fails' if first else 'passes'} without patches, and with all of them"
        raise CheckError(msg, "no patch makes a difference")
    inner = range(1, len(patches))
    at = bisect.bisect_left(inner, True, key=lambda at: fails(at) != first) + 1
    upstream, name = patches[at - 1]
    verb = "fixes" if first else "breaks"
    log.document({"bisect": {"what": verb, "upstream": upstream, "patch": name}})
    log.heading(f"{upstream}: {name} {verb} {command}")
    return 0


def _fails(here: Project, place: Sequence[Reduced], command: str, target: str | None) -> bool:
    """Run a command on a reduced series.

    Raises:
        CommandError: its exit code says nothing about a patch.
    """
    with here.store.temporary("trees") as work:
        env = {**reduced.variables(here), "SPARKFORGE_TREES": str(work)}
        for part in place:
            git.clone_at(part.source.repo, work / part.source.upstream, part.commit)
        if target is not None:
            context = Context.of(here, target, platform_of(here.pins.target(target)))
            # without packs: minutes of compilers for each step
            build = Build(replace(context, pack=()))
            build.run("image")
            env["SPARKFORGE_PYTHON"] = os.fspath(python_path(build.graph.product.path))
        code = call("sh", "-c", command, env=env, stream=True, check=False).returncode
    if not 0 <= code < 125:
        msg = f"{command}: ended with {code}, which says nothing about a patch"
        raise CommandError(msg, "0 means good, 1 to 124 bad: wrap it in a script that gives these")
    return code != 0
