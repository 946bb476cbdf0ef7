"""``ablate``: leave each patch out and run its test, or find the patch that changes a command."""

import bisect
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from sparkforge.build.options import OutputOptions, chosen_series, command_options
from sparkforge.core import git
from sparkforge.core.errors import CheckError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.maintain import patchtests
from sparkforge.maintain.patchtests import Outcome, Result
from sparkforge.series.series import Series
from sparkforge.sources.project import Project, ProjectOptions

_HEAD = ("patch", "its test", "left out, too", "verdict")


@command_options
class Options:
    """Options of ``ablate``."""

    patch: tuple[str, ...] = field(default=(), kw_only=False)
    """patches to leave out, one at a time (default: each)"""
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
    known = {patch.name for own in every for patch in own.patches}
    names = {f"{name.removesuffix('.patch')}.patch" for name in options.patch}
    if unknown := sorted(names - known):
        raise UsageError(f"{', '.join(unknown)}: no such patch", "see build.py patches list")
    python = options.python or patchtests.dev_python(project.root)
    results = _of_patches(project, every, python, names or known)
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
    for _, patch in chosen:
        if not patch.trailers.get("Test"):
            raise SeriesError(f"{patch.path}: has no test", "see build.py patches check")
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


def _bisect(project: Project, every: Sequence[Series], command: str) -> int:
    """Find the patch with which a command begins to fail, or to pass.

    The search goes over the first N patches of the whole series, which apply as they are. Several
    upstreams count as one series.
    """
    patches = [(own.upstream, patch.name) for own in every for patch in own.patches]
    prefixes = [patchtests.prefixes(project, own) for own in every]

    def fails(at: int) -> bool:
        place = []
        left = at
        for own in prefixes:
            place.append(own[min(left, len(own) - 1)])
            left -= min(left, len(own) - 1)
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
        return code != 0

    first = fails(0)
    at = bisect.bisect_left(range(len(patches)), True, key=lambda at: fails(at + 1) != first)
    if at == len(patches):
        raise CheckError(f"{command}: no patch makes a difference", "try it in a work tree")
    upstream, name = patches[at]
    verb = "fixes" if first else "breaks"
    log.document({"bisect": {"what": verb, "upstream": upstream, "patch": name}})
    log.heading(f"{upstream}: {name} {verb} {command}")
    return 0
