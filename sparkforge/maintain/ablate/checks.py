"""Checks of a reduced series other than patches' own tests: the smoke test, a command."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from sparkforge.build import executor
from sparkforge.build.context import Context
from sparkforge.build.executor import Build
from sparkforge.build.item import wheel_path
from sparkforge.build.options import host_platform, platform_of
from sparkforge.core import git
from sparkforge.core.errors import (
    CommandError,
    MachineError,
    SmokeError,
    SparkforgeError,
    UsageError,
)
from sparkforge.core.run import call
from sparkforge.maintain.ablate.outcome import Outcome, Result, missing
from sparkforge.maintain.ablate.reduced import Place
from sparkforge.pins import pins
from sparkforge.runtime.environment import python_path
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access

Provided = Literal["trees", "wheels", "environment"]
SKIP = 125
"""Exit code of a command that cannot judge, as for ``git bisect run``."""


class Check(Protocol):
    """A check that passes, fails or cannot judge, on any series."""

    @property
    def label(self) -> str: ...

    def run(self, place: Place) -> Outcome:
        """Run it with the patches of a place."""
        ...


@dataclass(frozen=True)
class Builder:
    """Builds a target at any place, in a virtual environment."""

    target: str | None
    """None: none was named."""
    access: Access

    def named(self, what: str) -> str:
        """Return the target's name; UsageError if none was named."""
        if self.target is None:
            raise UsageError(f"{what} needs a target", "add --target NAME")
        return self.target

    def build(self, place: Place, until: str) -> Build:
        """Build up to a stage; raises as a build does."""
        path = place.root / "pins.yaml"
        loaded = pins.load(path)
        target = loaded.target(self.named(until))
        if until in ("image", "smoke") and platform_of(target) != host_platform():
            msg = f"target {self.target} is for {platform_of(target)}; this machine is not"
            raise UsageError(
                msg, "build its wheels here (--provide wheels), or choose another target"
            )
        project = Project(path, loaded, place.store, self.access)
        context = Context.of(project, self.named(until), platform_of(target))
        context = replace(context, pack=())  # minutes of compilers for each place
        if until == "smoke" and target.smoke is None:
            msg = f"target {self.target} has no smoke test"
            raise UsageError(msg, "give a command after --, or choose another target")
        return executor.build(context, until)


@dataclass(frozen=True)
class Smoke:
    """The target's smoke test, on a build of the place's patches."""

    builder: Builder

    @property
    def label(self) -> str:
        return f"smoke test of {self.builder.named('the smoke test')}"

    def run(self, place: Place) -> Outcome:
        try:
            self.builder.build(place, "smoke")
        except SmokeError as error:
            return Outcome(failed=1, message=error.what.partition("\n")[0])
        except (UsageError, MachineError):
            raise
        except SparkforgeError as error:
            return Outcome(failed=1, message=error.what.partition("\n")[0], ours=True)
        return Outcome(passed=1)


class Trees:
    """Clones of the patched trees, moved from one commit to the next.

    Files that do not change between two commits keep their times, so that builds of a command
    there are incremental.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def at(self, place: Place) -> Path:
        """Return the folder that holds each upstream's tree, under the upstream's name."""
        for part in place.reduced:
            tree, repo = self.folder / part.upstream, part.source.repo
            if not tree.exists():
                git.clone_at(repo, tree, part.commit)
                continue
            git.git(tree, "fetch", "--quiet", str(repo), part.commit)
            # --force: a command's changes to our files must not reach the next one
            git.git(tree, "checkout", "--quiet", "--force", "-B", "sparkforge", part.commit)
        return self.folder


@dataclass(frozen=True)
class Command:
    """A command of the user's: exit code 0 passes, 125 cannot judge, others up to 127 fail.

    It gets these variables, and those of ``Place.env``:

        SPARKFORGE_TREES      folder with the patched tree of each upstream concerned
        SPARKFORGE_LEFT_OUT   names of the patches that are missing, with spaces between them
        SPARKFORGE_WHEELS     folder with the target's wheels (``provide`` wheels, environment)
        SPARKFORGE_PYTHON     interpreter that they are installed for (environment)
    """

    words: tuple[str, ...]
    trees: Trees
    provide: Provided
    builder: Builder

    @property
    def label(self) -> str:
        return shlex.join(self.words)

    def run(self, place: Place) -> Outcome:
        gone = [name for part in missing(place.reduced) for name in part]
        env = {
            **place.env,
            "SPARKFORGE_TREES": str(self.trees.at(place)),
            "SPARKFORGE_LEFT_OUT": " ".join(gone),
        }
        with place.store.temporary("ablate") as work:
            try:
                env |= self._provided(place, work)
            except (UsageError, MachineError):
                raise
            except SparkforgeError as error:
                return Outcome(failed=1, message=error.what.partition("\n")[0], ours=True)
            return self._run(env)

    def _provided(self, place: Place, work: Path) -> dict[str, str]:
        if self.provide == "trees":
            return {}
        build = self.builder.build(place, "wheels" if self.provide == "wheels" else "image")
        for item in build.graph.own:
            wheel = wheel_path(build.results.artefact(item))
            os.link(wheel, work / wheel.name)
        env = {"SPARKFORGE_WHEELS": str(work)}
        if self.provide == "environment":
            env["SPARKFORGE_PYTHON"] = str(
                python_path(build.results.artefact(build.graph.product).path)
            )
        return env

    def _run(self, env: Mapping[str, str]) -> Outcome:
        done = call(*self.words, env=env, stream=True, check=False)
        code = done.returncode
        if code == 0:
            return Outcome(passed=1)
        if code == SKIP:
            return Outcome(skipped=1, message=f"exit code {SKIP}: cannot judge")
        if code in (126, 127) or not 0 < code < 128:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            remedy = (
                "0 means good, 1 to 124 bad, 125 cannot judge; other codes mean that the command"
                " could not run: wrap it in a script that gives one of these"
            )
            raise CommandError(f"{self.label} {how}, which says nothing about a patch", remedy)
        return Outcome(failed=1, message=f"exit code {code}")


@dataclass(frozen=True)
class Shared:
    """A check that all patches share, unlike ``OwnTests``, the tests of each."""

    check: Check

    def whole(self, place: Place) -> dict[str, Outcome]:
        """Run it with the whole series."""
        return {self.check.label: self.check.run(place)}

    def without(self, place: Place, whole: Mapping[str, Outcome]) -> list[Result]:
        """Run it without the patches that a place lacks; one result."""
        start = time.monotonic()
        outcome = self.check.run(place)
        left_out, dependents = missing(place.reduced)
        return [
            Result(
                "+".join(part.upstream for part in place.reduced),
                " + ".join(left_out),
                self.check.label,
                left_out,
                dependents,
                whole[self.check.label],
                outcome,
                time.monotonic() - start,
            )
        ]
