"""``ablate``: options → the patches to leave out, and the check to run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkforge.build.options import OutputOptions, chosen_series
from sparkforge.core.command import Entry, argument, behind, option, switch
from sparkforge.core.errors import UsageError
from sparkforge.maintain.ablate import job
from sparkforge.maintain.ablate.checks import Builder, Check, Command, Shared, Smoke, Trees
from sparkforge.maintain.ablate.job import Job
from sparkforge.maintain.ablate.parts import tests_of
from sparkforge.sources.project import Project, ProjectOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``ablate``."""

    patch: tuple[str, ...] = argument(
        "patches to leave out, or parts of the plugin to switch off, one at a time (default: each)",
        default=(),
        nargs="*",
    )
    without: str | None = option("leave these patches out together", metavar="A,B")
    bisect: str | None = option(
        "find the patch at which a command starts to fail or to pass: a"
        " shell command, the arguments after --, or --smoke",
        nargs="?",
        const="",
        metavar="COMMAND",
    )
    """Command of the shell; "" for the one after ``--``, or --smoke."""
    upstream: str | None = option("limit to the series of this upstream", metavar="NAME")
    merge_only: bool = switch("only check that the other patches still merge; run no tests")
    smoke: bool = switch("run the target's smoke test instead of the patches' tests")
    target: str | None = option(
        "target whose wheels, environment or smoke test to use", metavar="NAME"
    )
    provide: Literal["trees", "wheels", "environment"] = option(
        "what to build before the command runs (default: trees)",
        default="trees",
        choices=("trees", "wheels", "environment"),
    )
    good: str | None = option(
        "good with the patches up to this one; or none, all", needs="--bisect", metavar="PATCH"
    )
    bad: str | None = option(
        "bad with the patches up to this one; or none, all", needs="--bisect", metavar="PATCH"
    )
    again: bool = switch("ignore the results of an interrupted run", needs="--bisect")
    python: Path | None = option(
        "Python with pytest (default: .venv-dev, created if missing)", type=Path, metavar="FILE"
    )
    arguments: tuple[str, ...] = behind()
    """The command after ``--``."""
    project: ProjectOptions
    output: OutputOptions


def run(options: Options) -> int:
    """Leave patches out, or search for the one that changes the result; returns the exit code."""
    command = _command(options)
    _check_together(options, command)
    project = Project.open(options.project)
    builder = Builder(options.target, project.access)
    if options.target is not None:
        project.pins.target(options.target)
    own = not (command or options.smoke or options.merge_only or options.without)
    names, parts = _parts(options, project) if own else (options.patch, {})
    if options.without is not None:
        names = job.as_list(options.without)
    with ExitStack() as stack:
        check: Check | None = None
        if command:
            if options.provide != "trees":
                builder.named(f"--provide {options.provide}")
            work = stack.enter_context(project.store.temporary("trees"))
            check = Command(command, Trees(work / "trees"), options.provide, builder)
        elif options.smoke:
            builder.named("--smoke")
            check = Smoke(builder)
        every = chosen_series(options.upstream, project.root, project.pins)
        series = [entry for entry in every if entry.patches]
        wanted = Job(
            project,
            python=options.python,
            series=series if names or not options.patch else [],
            names=names,
            together=options.without is not None,
            checks=Shared(check) if check is not None else None,
            parts=parts,
        )
        if options.bisect is not None:
            from sparkforge.maintain.ablate.bisect import Bisection

            assert check is not None
            identity = {
                "command": _identity(command),
                "smoke": options.smoke,
                "target": options.target,
                "provide": options.provide,
                "good": options.good,
                "bad": options.bad,
            }
            return Bisection(
                wanted, check, identity, options.good, options.bad, options.again
            ).run()
        if options.merge_only:
            return job.merge(wanted)
        return job.run(wanted)


def _parts(options: Options, project: Project) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the patches among the names, and the test of each part among them, or of all."""
    if options.upstream is not None:
        return options.patch, {}
    tests = tests_of(project.root, project.pins.plugin)
    if not options.patch:
        return (), tests
    patches = tuple(name for name in options.patch if name not in tests)
    return patches, {name: tests[name] for name in options.patch if name in tests}


def _command(options: Options) -> tuple[str, ...]:
    """Return the words of the command to run; the shell runs a text after --bisect."""
    if options.bisect and options.arguments:
        raise UsageError(f"--bisect {options.bisect!r} and a command after --", "give only one")
    if options.bisect:
        return ("sh", "-c", options.bisect)
    return options.arguments


def _check_together(options: Options, command: Sequence[str]) -> None:
    """Refuse options that contradict each other."""
    bisects = options.bisect is not None
    ways = {"PATCH …": options.patch, "--without": options.without is not None, "--bisect": bisects}
    runs = {"--smoke": options.smoke, "a command": command, "--merge-only": options.merge_only}
    for choice in (ways, runs):
        clash = [name for name, given in choice.items() if given]
        if len(clash) > 1:
            raise UsageError(f"{' and '.join(clash)} conflict", "give only one")
    if bisects and options.merge_only:
        raise UsageError(
            "--bisect and --merge-only conflict", "the first patches of a series always merge"
        )
    if bisects and not (options.smoke or command):
        raise UsageError(
            "--bisect without a command", "--bisect COMMAND, or -- COMMAND…, or --smoke"
        )


def _identity(command: Sequence[str]) -> list[Any]:
    """Return the command with the hash of each file that it names: a script may change."""
    found = []
    for word in command:
        path = Path(word)
        try:
            data = path.read_bytes() if path.is_file() else None
        except OSError:  # not a valid file name
            data = None
        found.append([word, hashlib.sha256(data).hexdigest() if data is not None else None])
    return found


COMMANDS = (Entry("ablate", Options, run),)
