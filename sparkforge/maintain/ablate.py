"""``ablate``: leave each patch out and run its test, or find the patch that changes a command."""

from __future__ import annotations

import bisect
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from sparkforge.build.options import OutputOptions, chosen_series, command_options
from sparkforge.core import git
from sparkforge.core.errors import CheckError, CommandError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.maintain import patchtests
from sparkforge.maintain.patchtests import Outcome, Reduced, Result
from sparkforge.pins.compiling import Plugin
from sparkforge.series.series import Series
from sparkforge.sources.project import Project, ProjectOptions

_HEAD = ("patch", "its test", "left out, too", "verdict")
_OPTIONS = "VLLM_SPARKFORGE"
"""The variable that the plugin reads its options from."""


@command_options
class Options:
    """Options of ``ablate``."""

    patch: tuple[str, ...] = field(default=(), kw_only=False)
    """patches to leave out, or parts of the plugin to switch off, one at a time (default: each)"""
    bisect: str | None = None
    """find the patch at which this shell command starts to fail or to pass"""
    upstream: str | None = None
    """limit to the series of this upstream"""
    python: Path | None = None
    """Python with pytest (default: .venv-dev, created if missing)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def run(options: Options = Options()) -> int:
    """Leave patches out, or search for the one that changes the result; returns the exit code."""
    project = Project.open(options.project)
    every = chosen_series(options.upstream, project.root, project.pins)
    project.store.sweep()
    if options.bisect is not None:
        if options.patch:
            raise UsageError("--bisect and PATCH … conflict", "give only one")
        return _bisect(project, every, options.bisect)
    parts = parts_of(project.root, project.pins.plugin) if options.upstream is None else {}
    known = {patch.name for own in every for patch in own.patches}
    names = {f"{name.removesuffix('.patch')}.patch" for name in options.patch if name not in parts}
    if unknown := sorted(names - known):
        msg = f"{', '.join(unknown)}: no such patch"
        raise UsageError(msg, "see build.py patches list, and docs/plugin.md for the parts")
    python = options.python or patchtests.dev_python(project.root)
    results = _of_patches(project, every, python, names if options.patch else known)
    chosen = {n: test for n, test in parts.items() if not options.patch or n in options.patch}
    results += of_parts(project, python, chosen)
    log.document({"ablate": [result.as_json() for result in results]})
    rows = [
        (f"{one.upstream}: {one.patch}", one.test, ", ".join(one.dependents) or "-", one.verdict)
        for one in results
    ]
    log.table([_HEAD, *rows])
    bad = [result for result in results if result.verdict != "noticed"]
    for one in bad:
        message = one.whole.message or one.without.message
        log.error(f"{one.upstream}: {one.patch}: {one.test}: {one.verdict}: {message}")
    return CheckError.exit_code if bad else 0


def _of_patches(
    project: Project, every: Sequence[Series], python: Path, names: set[str]
) -> list[Result]:
    """Run the tests of patches with the whole series, and each without its patch."""
    chosen = [(own, patch) for own in every for patch in own.patches if patch.name in names]
    if nameless := [str(patch.path) for _, patch in chosen if not patch.trailers.get("Test")]:
        msg = f"{', '.join(nameless)}: has no test"
        raise SeriesError(msg, "add the trailer Test to the last paragraph")
    tests = [patch.trailers["Test"] for _, patch in chosen]
    with log.step("the whole series"):
        whole = patchtests.run(python, project, tests) if tests else {}
    results = []
    for (own, patch), test in zip(chosen, tests, strict=True):
        if whole[test].result != "passes":  # without the patch it says nothing, either
            results.append(Result(own.upstream, patch.name, test, whole[test], Outcome("skipped")))
            continue
        with log.step(f"without {patch.name}"):
            left = patchtests.without(project, own, patch.name)
            with patchtests.checkout(project, [left]) as here:
                cut = patchtests.run(python, project, [test], here)[test]
            found = Result(own.upstream, patch.name, test, whole[test], cut, left.dependents)
            results.append(found)
            log.info(found.verdict)
    return results


def parts_of(root: Path, plugin: Plugin | None) -> dict[str, str]:
    """Return the test's node id of each part, as the plugin's pyproject.toml names it."""
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
    whole = patchtests.run(python, project, list(tests.values())) if tests else {}
    results = []
    for part, test in tests.items():
        off = {_OPTIONS: json.dumps({"off": [part]})}
        with log.step(f"without {part}"):
            cut = patchtests.run(python, project, [test], env=off)[test]
        results.append(Result("plugin", part, test, whole[test], cut))
    return results


def _bisect(project: Project, every: Sequence[Series], command: str) -> int:
    """Find the patch with which a command begins to fail, or to pass.

    The search goes over prefixes of the series, which apply as they are even where patches need
    each other. Several upstreams count as one series.
    """
    patches = [(own.upstream, patch.name) for own in every for patch in own.patches]
    prefixes = [patchtests.prefixes(project, own) for own in every]

    def fails(at: int) -> bool:
        left, place = at, list[Reduced]()
        for own in prefixes:
            count = min(left, len(own) - 1)
            left -= count
            place.append(own[count])
        with (
            log.step(f"with {at} of {len(patches)} patches"),
            patchtests.checkout(project, place) as here,
            here.store.temporary("trees") as work,
        ):
            for part in place:
                git.clone_at(part.source.repo, work / part.source.upstream, part.commit)
            env = {**patchtests.variables(here), "SPARKFORGE_TREES": str(work)}
            code = call("sh", "-c", command, env=env, stream=True, check=False).returncode
            log.info("fails" if code else "passes")
        if not 0 <= code < 125:
            msg = f"{command}: ended with {code}, which says nothing about a patch"
            raise CommandError(msg, "0 means good, 1 to 124 bad: wrap it in a script")
        return code != 0

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
