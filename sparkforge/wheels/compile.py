"""The compiled wheel: built from the patched tree in the builder, without a network.

Native files that no patch touches are the release's own (``--native patched``). What was begun
stays in the store's work area until it is finished: a killed build goes on where it stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from sparkforge import git, makers
from sparkforge.compiling.builder import PYTHON, user
from sparkforge.compiling.externals import Fetched
from sparkforge.disk import disk_errors
from sparkforge.engine import Engine
from sparkforge.errors import CommandError, CompileError
from sparkforge.log import log
from sparkforge.pins import rule_of
from sparkforge.run import call
from sparkforge.series import Patched
from sparkforge.wheels import archive, natives, overlay
from sparkforge.wheels.recipe import Recipe, container, container_name

_GATE = Path(__file__).with_name("gate.py")
_STEP = re.compile(r"^\[(\d+)/(\d+)\] ")
_SHOWN_LINES = 40
_ELF = b"\x7fELF"


@dataclass(frozen=True)
class Sources:
    """What is unpacked for a compile.

    Attributes:
        tree: commit of the patched tree, in ``repo``.
        supplement: (commit, path) of what the tree lacks and the source file has.
        externals: by folder below ``/build/externals``.
        carried: (repository, COMMIT:FOLDER) of carried upstreams, by folder there.
    """

    repo: Path
    tree: str
    supplement: tuple[tuple[str, str], ...] = ()
    externals: Mapping[str, Fetched] = field(default_factory=dict)
    carried: Mapping[str, tuple[Path, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a compile happens: the builder image, and folders of this machine."""

    engine: Engine
    image: str
    work: Path
    ccache: Path


@dataclass(frozen=True)
class Made:
    """What a compile left: the wheel, and natives by their path in it."""

    wheel: Path
    natives: Mapping[str, Path]


def run(recipe: Recipe, sources: Sources, place: Place) -> Made:
    """Unpack the sources, and run every step in its container.

    Raises:
        CompileError: a step failed; its own words are shown, all of them are in a file.
    """
    makers.sweep(place.engine)
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
                place.image, name, str(place.work), str(place.ccache), owner, variables, words,
                {makers.LABEL: makers.mark()},
            )  # fmt: skip
            _step(title, command, place.work / "log.txt")
            if once:
                done.touch()
    finally:
        _remove(place.engine, name)
    if (took := cost(place.work / "gate" / "slots" / "units.tsv")) is not None:
        log.info(took)
    wheels = list((place.work / "out").glob("*.whl"))
    if len(wheels) != 1:
        msg = f"the build left {len(wheels)} wheels in {place.work / 'out'}, not one"
        raise CompileError(msg, f"all that it said is in {place.work / 'log.txt'}")
    made = {}
    for native in recipe.decision.compiled:
        path = place.work / "out" / "native" / native.file
        if not path.is_file():
            msg = f"CMake's target {native.target} installed no {native.file}"
            raise CompileError(msg, "correct compile.natives in pins.yaml")
        made[native.file] = path
    return Made(wheels[0], made)


def finished(place: Place) -> None:
    """Remove the work area of a wheel that stands."""
    shutil.rmtree(place.work, ignore_errors=True)


def _prepare(sources: Sources, place: Place) -> None:
    """Unpack everything, once: a build that goes on must find the same files and dates."""
    work = place.work
    ready = work / "unpacked"
    with disk_errors(work):
        if ready.exists():
            log.info(f"going on with what stands in {work}")
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
        # this checkout's, which may be another than the one that began
        (work / "gate" / "gate.py").write_text(f"#!{PYTHON} -IS\n{_GATE.read_text()}")
        (work / "gate" / "gate.py").chmod(0o755)
        _own([work, place.ccache])


def _own(folders: Iterable[Path]) -> None:
    """Give folders to the user that compiles; only root has to."""
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
    """Remove a container of this name: one that a killed run left goes on compiling otherwise."""
    from docker.errors import NotFound

    try:
        engine.client.containers.get(name).remove(force=True, v=True)
    except NotFound:
        pass


# -- one step ---------------------------------------------------------------------


def _step(title: str, command: Sequence[str], log_file: Path) -> None:
    progress = Progress(title)
    said: list[str] = []
    with log_file.open("a", encoding="utf-8") as file:
        file.write(f"== {title}\n")

        def line(text: str) -> None:
            file.write(f"{text}\n")
            file.flush()
            said.append(text)
            progress.see(text)

        try:
            call(*command, stream=line)
        except CommandError as error:
            code = str(error).partition("\n")[0].rpartition(" ")[2]
            msg = f"{title} ended with exit code {code}:\n{excerpt(said)}"
            raise CompileError(msg, f"all that it said is in {log_file}") from error


class Progress:
    """Reads ninja's ``[n/m]`` lines and says how long the rest will take, at the pace so far."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start: tuple[float, int] | None = None

    def see(self, text: str) -> None:
        """Look at one line of a build's output."""
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
        """Return the time left, in words; empty where nothing is known of the pace yet."""
        if self._start is None or done <= self._start[1]:
            return ""
        seconds = (now - self._start[0]) / (done - self._start[1]) * (total - done)
        return f", about {seconds:.0f} s left" if seconds < 90 else (
            f", about {seconds / 60:.0f} min left")  # fmt: skip


def excerpt(said: Sequence[str]) -> str:
    """Return the words of the command that failed: ninja's FAILED block, or the end of it all."""
    starts = [i for i, text in enumerate(said) if text.strip().startswith("FAILED: ")]
    if starts:
        block = list(said[starts[-1] :])
        end = next((i for i, text in enumerate(block) if i and _STEP.match(text.strip())), None)
        kept = [ln for ln in block[:end] if not ln.strip().startswith("ninja: build stopped")]
        # the first lines say which file, the errors themselves may stand far below
        wrong = [ln for ln in kept[2:] if re.search(r"\berror\b|fatal", ln, re.IGNORECASE)]
        kept = kept if len(kept) <= _SHOWN_LINES else [kept[0], *(wrong or kept)[:_SHOWN_LINES]]
    else:
        kept = list(said[-_SHOWN_LINES:])
    return "\n".join(f"    {ln[:400]}" for ln in kept)


def cost(units: Path) -> str | None:
    """Return what compilers took, as the gate noted it; None where ccache had everything."""
    if not units.exists():
        return None
    rows = [line.split("\t") for line in units.read_text(encoding="utf-8").splitlines()]
    mib, source = max((int(row[0]), Path(row[-1]).name) for row in rows)
    seconds = sum(float(row[1]) for row in rows)
    return (f"{len(rows)} file(s) compiled in {seconds:.0f} s of CPU time; the largest took"
            f" {mib / 1024:.1f} GiB: {source}")  # fmt: skip


# -- the wheel ----------------------------------------------------------------------


@dataclass(frozen=True)
class Assembled:
    """A finished wheel.

    Attributes:
        natives: sha256 of each native file, and where it is from: ``compiled`` or ``release``.
        differs: files that no patch touches, and that are not what the release ships.
    """

    wheel: overlay.Overlaid
    natives: Mapping[str, Mapping[str, str]]
    differs: tuple[str, ...]


def assemble(
    request: overlay.Request, recipe: Recipe, made: Made, own: Patched,
    carried: Sequence[overlay.Layer], folder: Path,
) -> Assembled:  # fmt: skip
    """Make our wheel of what was compiled, and of the release's files where nothing was.

    Args:
        request: of the release wheel.
        own: the upstream's patched tree.
        carried: series that go onto files of the release inside of this wheel.

    Raises:
        CompileError: the release has a file that nothing made and no rule of pins.yaml explains.
    """
    everything = recipe.decision.everything
    with archive.opened(request.wheel) as release, archive.opened(made.wheel) as ours:
        in_release = _payload(request.wheel, release)
        in_ours = _payload(made.wheel, ours)
        changed = _changed(own, recipe)
        taken, lost = natives.missing(
            recipe.upstream, in_release, {*in_ours, *made.natives}, everything=everything
        )
        if lost := [member for member in lost if changed.get(member) != git.ABSENT]:
            msg = f"{request.wheel.name}: the build made no {lost[0]} ({len(lost)} such files)"
            remedy = "name it in compile.from_release in pins.yaml, if it is not made of this tree"
            raise CompileError(msg, remedy)
        base = made.wheel if everything else request.wheel
        if everything:
            fresh = {member: release.read(member) for member in taken}
        else:
            layers = overlay.plan(request, carried, release)
            fresh = {**layers.fresh, **_different(release, ours, in_ours)}
            fresh |= {member: path.read_bytes() for member, path in made.natives.items()}
        removed = tuple(sorted(m for m, blob in changed.items()
                               if blob == git.ABSENT and m in in_release))  # fmt: skip
        plain = sorted(m for m in fresh if m not in made.natives and m != request.version_file)
        plan = overlay.Plan(
            fresh=fresh,
            # ours may set another mode than the release has
            executable={m: bool(ours.members[m].external_attr >> 16 & 0o100)
                        for m in fresh if m in in_ours},
            replaced=tuple(m for m in plain if m in in_release and m not in taken),
            added=tuple(m for m in plain if m not in in_release),
            removed=() if everything else removed,
        )  # fmt: skip
        asked = overlay.Request(
            wheel=base, name=request.name, local=request.local,
            drop_requires=request.drop_requires, version_file=request.version_file,
            epoch=request.epoch,
        )  # fmt: skip
        wheel = overlay.write(asked, ours if everything else release, plan, folder)
        patched = set(changed) | {m for layer in carried for m in _members(layer)}
        differs = tuple(m for m in (*plan.replaced, *plan.added) if m not in patched)
        return Assembled(wheel, _natives(release, ours, taken, made), differs)


def _payload(wheel: Path, source: archive.Source) -> set[str]:
    info = f"{overlay.info_folder(wheel, source)}/"
    return {member for member in source.members if not member.startswith(info)}


def _different(
    release: archive.Source, ours: archive.Source, members: set[str]
) -> dict[str, bytes]:
    """Return our members that are not the release's to the byte; the others are copied from it."""
    result = {}
    for member in members:
        info, known = ours.members[member], release.members.get(member)
        if known is None or (info.CRC, info.file_size) != (known.CRC, known.file_size):
            result[member] = ours.read(member)
    return result


def _changed(own: Patched, recipe: Recipe) -> dict[str, str]:
    """Return the wheel's members that the series changes, each with its blob afterwards."""
    result = {}
    for change in git.changes(own.source.repo, own.source.commit, own.commit):
        rule = rule_of(recipe.upstream.paths, change.path)
        if rule is not None and rule.wheel is not None:
            result[rule.wheel + change.path[len(rule.repo) :]] = change.new_blob
    return result


def _members(layer: overlay.Layer) -> list[str]:
    result = []
    for path in layer.patched.touched:
        rule = rule_of(layer.paths, path)
        if rule is not None and rule.wheel is not None:
            result.append(rule.wheel + path[len(rule.repo) :])
    return result


def _natives(
    release: archive.Source, ours: archive.Source, taken: Sequence[str], made: Made
) -> dict[str, dict[str, str]]:
    """Name every native file of the wheel by its sha256, and say where it is from."""
    found = {}
    for member in taken:
        data = release.read(member)
        if member not in made.natives and data.startswith(_ELF):
            found[member] = {"sha256": sha256(data).hexdigest(), "from": "release"}
    for member in ours.members:
        data = ours.read(member) if member.endswith(".so") else b""
        if data.startswith(_ELF):
            found[member] = {"sha256": sha256(data).hexdigest(), "from": "compiled"}
    for member, path in made.natives.items():
        found[member] = {"sha256": sha256(path.read_bytes()).hexdigest(), "from": "compiled"}
    return dict(sorted(found.items()))
