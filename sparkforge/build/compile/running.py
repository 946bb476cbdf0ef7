"""The steps of a compile: each in a container of the builder, without a network.

An unfinished compile stays in the store's work area, and the next build continues it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.build.compile.builder import PYTHON, user
from sparkforge.build.compile.externals import Fetched
from sparkforge.build.compile.recipe import Recipe, container, container_name
from sparkforge.core import git
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import CommandError, CompileError
from sparkforge.core.log import counted, log
from sparkforge.core.run import call
from sparkforge.runtime import containers
from sparkforge.runtime.engine import Engine

_GATE = Path(__file__).with_name("gate.py")
_STEP = re.compile(r"^\[(\d+)/(\d+)\] ")
_SHOWN_LINES = 40


@dataclass(frozen=True)
class Sources:
    """The sources that are unpacked for a compile."""

    repo: Path
    tree: str
    """Commit of the patched tree, in ``repo``."""
    supplement: tuple[tuple[str, str], ...] = ()
    """(commit, path) of files that only the release's source file has."""
    externals: Mapping[str, Fetched] = field(default_factory=dict)
    """By folder below ``/build/externals``."""
    carried: Mapping[str, tuple[Path, str]] = field(default_factory=dict)
    """(repository, COMMIT:FOLDER) of carried upstreams, by folder there."""


@dataclass(frozen=True)
class Place:
    """The place of a compile: the builder image, and folders of this machine."""

    engine: Engine
    image: str
    work: Path
    ccache: Path


@dataclass(frozen=True)
class Made:
    """Results of a compile: the wheel, and native files by their path in it."""

    wheel: Path
    natives: Mapping[str, Path]


def run(recipe: Recipe, sources: Sources, place: Place) -> Made:
    """Unpack the sources, and run every step in its container.

    Raises:
        CompileError: a step failed; its errors are shown, and a file has its whole output.
    """
    containers.sweep(place.engine)
    _prepare(sources, place)
    variables = {**recipe.environment(), **recipe.limits()}
    owner = ":".join(map(str, user()))
    name = container_name(place.work)
    _remove(place.engine, name)
    _empty(place.work / "out")
    _own([place.work / "out"])
    try:
        for title, words, once in recipe.steps():
            done = place.work / f"done-{title.replace(' ', '-')}"
            if once and done.exists():
                continue
            log.info(title)
            command = container(
                place.image,
                name,
                str(place.work),
                str(place.ccache),
                owner,
                variables,
                words,
                {containers.LABEL: containers.mark()},
            )
            _step(title, command, place.work / "log.txt")
            if once:
                done.touch()
    finally:
        _remove(place.engine, name)
    if (took := cost(place.work / "gate" / "slots" / "units.tsv")) is not None:
        log.info(took)
    wheels = list((place.work / "out").glob("*.whl"))
    if len(wheels) != 1:
        msg = f"expected one wheel in {place.work / 'out'}, found {len(wheels)}"
        raise CompileError(msg, f"see the log {place.work / 'log.txt'}")
    made = {}
    for native in recipe.decision.compiled:
        path = place.work / "out" / "native" / native.file
        if not path.is_file():
            msg = f"CMake's target {native.target} installed no {native.file}"
            raise CompileError(msg, "fix compile.natives in pins.yaml")
        made[native.file] = path
    return Made(wheels[0], made)


def finished(place: Place) -> None:
    """Remove the work area of a finished wheel."""
    shutil.rmtree(place.work, ignore_errors=True)


def _prepare(sources: Sources, place: Place) -> None:
    """Unpack everything once: a continued build needs the same files and dates."""
    work = place.work
    ready = work / "unpacked"
    with disk_errors(work):
        if ready.exists():
            log.info(f"continuing the build in {work}")
        else:
            _empty(work)
            for name in ("tree", "out", "cmake", "tmp", "externals", "gate/slots", "ccache"):
                (work / name).mkdir(parents=True)
            git.unpack(sources.repo, sources.tree, [], work / "tree")
            for commit, path in sources.supplement:
                git.unpack(sources.repo, commit, [path], work / "tree")
            for name, fetched in sources.externals.items():
                fetched.unpack(work / "externals" / name)
            for name, (repo, folder) in sources.carried.items():
                (work / "externals" / name).mkdir()
                git.unpack(repo, folder, [], work / "externals" / name)
            ready.touch()
        # of this checkout: another one may have begun the compile
        (work / "gate" / "gate.py").write_text(f"#!{PYTHON} -IS\n{_GATE.read_text()}")
        (work / "gate" / "gate.py").chmod(0o755)
        _own([work, place.ccache])


def _own(folders: Iterable[Path]) -> None:
    """Make the compiling user the owner of folders; only root has to."""
    if os.getuid() != 0:
        return
    uid, gid = user()
    for folder in folders:
        for where, _, files in os.walk(folder):
            os.chown(where, uid, gid)
            for name in files:
                os.chown(Path(where, name), uid, gid, follow_symlinks=False)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _remove(engine: Engine, name: str) -> None:
    """Remove a container of this name: one of a killed run would continue to compile."""
    from docker.errors import NotFound

    try:
        container = engine.client.containers.get(name)
    except NotFound:
        return
    containers.end(container)


# -- one step ---------------------------------------------------------------------


def _step(title: str, command: Sequence[str], log_file: Path) -> None:
    progress = Progress(title)
    output: list[str] = []
    with log_file.open("a", encoding="utf-8") as file:
        file.write(f"== {title}\n")

        def line(text: str) -> None:
            file.write(f"{text}\n")
            file.flush()
            output.append(text)
            progress.see(text)

        try:
            call(*command, stream=line, guarded=True)  # docker passes SIGTERM on to the container
        except CommandError as error:
            code = str(error).partition("\n")[0].rpartition(" ")[2]
            msg = f"{title} failed with exit code {code}:\n{excerpt(output)}"
            raise CompileError(msg, f"see the log {log_file}") from error


class Progress:
    """Estimates the remaining time from ninja's ``[n/m]`` lines."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start: tuple[float, int] | None = None

    def see(self, text: str) -> None:
        """Read one line of a build's output."""
        match = _STEP.match(text.strip())
        if match is None:
            log.detail(text)
            return
        done, total = int(match[1]), int(match[2])
        now = time.monotonic()
        if self._start is None:
            self._start = now, done
        log.progress(f"{self._title}{self.left(now, done, total)}", done, total, "steps")

    def left(self, now: float, done: int, total: int) -> str:
        """Return the remaining time as text; empty as long as it is unknown."""
        if self._start is None or done <= self._start[1]:
            return ""
        seconds = (now - self._start[0]) / (done - self._start[1]) * (total - done)
        return (
            f", about {seconds:.0f} s left"
            if seconds < 90
            else (f", about {seconds / 60:.0f} min left")
        )


def excerpt(output: Sequence[str]) -> str:
    """Return the output of the failed command: ninja's FAILED block, or the last lines."""
    starts = [i for i, text in enumerate(output) if text.strip().startswith("FAILED: ")]
    if starts:
        block = list(output[starts[-1] :])
        end = next((i for i, text in enumerate(block) if i and _STEP.match(text.strip())), None)
        kept = [ln for ln in block[:end] if not ln.strip().startswith("ninja: build stopped")]
        # the first lines name the file; the errors may be far below
        wrong = [ln for ln in kept[2:] if re.search(r"\berror\b|fatal", ln, re.IGNORECASE)]
        kept = kept if len(kept) <= _SHOWN_LINES else [kept[0], *(wrong or kept)[:_SHOWN_LINES]]
    else:
        kept = list(output[-_SHOWN_LINES:])
    return "\n".join(f"    {ln[:400]}" for ln in kept)


def cost(units: Path) -> str | None:
    """Return the time and memory of the compilers; None if ccache had everything."""
    if not units.exists():
        return None
    rows = [line.split("\t") for line in units.read_text(encoding="utf-8").splitlines()]
    mib, source = max((int(row[0]), Path(row[-1]).name) for row in rows)
    seconds = sum(float(row[1]) for row in rows)
    return (
        f"{counted(len(rows), 'file')} compiled in {seconds:.0f} s of CPU time; the largest took"
        f" {mib / 1024:.1f} GiB: {source}"
    )
