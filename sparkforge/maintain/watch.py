"""``watch``: has an upstream a newer release, and would our series carry over to it?

A failed request is an error, never "nothing new": an index whose list lacks the pinned release is
not believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cyclopts import Parameter
from packaging.version import InvalidVersion, Version

from sparkforge.build.options import OutputOptions
from sparkforge.core import pages
from sparkforge.core.disk import write_file
from sparkforge.core.errors import CheckError, FetchError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain import releases
from sparkforge.maintain.findings import HEAD, PatchResult
from sparkforge.maintain.job import Job
from sparkforge.maintain.mover import dry_run
from sparkforge.maintain.rebase import table
from sparkforge.sources.project import Project, ProjectOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``watch``."""

    upstream: tuple[str, ...] = field(default=(), kw_only=False)
    """upstreams to check (default: all)"""
    pre: bool = False
    """include pre-releases"""
    known: tuple[str, ...] = ()
    """ignore this release and older ones; may be repeated"""
    markdown: Path | None = None
    """write the result to this file as issue text"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@dataclass(frozen=True)
class Found:
    """An upstream's releases, and its series on the newest one."""

    upstream: str
    pinned: str
    newest: str
    """The pinned version, or the newest one after it that is not known."""
    newer: tuple[str, ...]
    """All newer versions that the index has, known ones too, newest first."""
    yanked: str | None
    """Upstream's reason for withdrawing the pinned release; None if it did not."""
    state: str = "up to date"
    moves: tuple[PatchResult, ...] = ()
    """A verdict a patch; empty where nothing was tried."""
    lacking: str | None = None
    """Reason why it could not be tried, though there is a release."""

    @property
    def row(self) -> tuple[str, ...]:
        counts = Counter(str(move.verdict) for move in self.moves)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        newest = (*self.newer, self.newest)[0]
        return self.upstream, self.pinned, newest, self.state, self.lacking or verdicts or "-"


_HEAD = ("upstream", "pinned", "newest", "state", "verdicts")


def run(options: Options = Options()) -> int:
    """Look for newer releases, try the series on them and report; returns the exit code."""
    project = Project.open(options.project)
    known = []
    for word in options.known:
        name, separator, text = word.rpartition("=")
        if separator:
            project.pins.upstream(name)
        try:
            known.append((name, Version(text)))
        except InvalidVersion:
            msg = f"--known {word}: {text!r} is not a version"
            raise UsageError(msg, "for example --known 0.32.0 or vllm=0.32.0") from None
    names = list(dict.fromkeys(options.upstream)) or list(project.pins.upstreams)
    found = [_look(project, name, known, pre=options.pre) for name in names]
    states = {one.state for one in found}
    code = CheckError.exit_code if "carries over" in states else 0
    if states & {"not complete yet", "a person is needed"}:
        code = SeriesError.exit_code
    if options.markdown is not None:
        write_file(options.markdown, _markdown(found).encode())
    log.document({"watch": [asdict(one) for one in found], "exit_code": code})
    for one in found:
        if one.yanked is not None:
            log.warning(f"{one.upstream}: upstream withdrew the pinned {one.pinned}: {one.yanked}")
    log.table([_HEAD, *(one.row for one in found)])
    table([move for one in found for move in one.moves if move.stops])
    return code


def _look(project: Project, name: str, known: Sequence[tuple[str, Version]], *, pre: bool) -> Found:
    """Ask the index for the versions of an upstream, and try its series on the newest."""
    upstream = project.pins.upstream(name)
    follows = upstream.source_in or name
    pinned = Version(project.pins.upstream(follows).version)
    package = upstream.files[upstream.source_file or next(iter(upstream.files))].project
    versions = releases.listed(project.access, package)
    if pinned not in versions:
        msg = f"{package}: the package index of pip's configuration does not have {pinned}"
        raise FetchError(msg, "configure pip with an index that has it (pip config list)")
    # a release is withdrawn when all of its files are
    yanked = {
        version: str(links[0].yank_reason or "no reason given")
        for version, links in versions.items()
        if all(link.yank_reason is not None for link in links)
    }
    newer = [one for one in sorted(versions, reverse=True) if one > pinned and one not in yanked]
    newer = [one for one in newer if pre or not one.is_prerelease]
    seen = [version for who, version in known if who in ("", name, follows) and version in newer]
    news = [version for version in newer if not seen or version > max(seen)]
    newest = str(news[0] if news else pinned)
    found = Found(name, str(pinned), newest, tuple(map(str, newer)), yanked.get(pinned))
    if not news:
        return replace(found, state="silenced") if newer else found
    job = Job(project, name)
    own = job.series_of(name)
    with log.step(f"{name} {pinned} → {newest}"):
        try:
            new = releases.resolve(project, name, newest)
        except UsageError as error:  # wheels come before sdists, and not all at once
            return replace(found, state="not complete yet", lacking=error.what)
        moves = dry_run(project.store, own, new, upstream.paths, job.memory(name))
        stuck = any(move.stops for move in moves)
        state = "a person is needed" if stuck else "carries over"
        return replace(found, state=state, moves=tuple(moves))


def _markdown(found: Sequence[Found]) -> str:
    """Return the text of an issue: the new releases, and the effect on each patch."""
    news = [one for one in found if one.newest != one.pinned]
    title = "Newer upstream releases" if news else "No newer upstream release"
    parts = [f"# {title}", pages.table(_HEAD, [one.row for one in found])]
    for one in found:
        if one.yanked is not None:
            said = f"which is pinned, was withdrawn by upstream:** {pages.escape(one.yanked)}"
            parts.append(f"**{one.upstream} {one.pinned}, {said}")
    for one in news:
        parts.append(f"## {one.upstream} {one.pinned} → {one.newest}")
        rows = [(*move.row(), "; ".join(move.detail) or "-") for move in one.moves]
        parts += [pages.table((*HEAD, "found"), rows)] if rows else []
        parts.append(f"`python3 build.py rebase {one.upstream} --onto {one.newest}`")
    return "\n\n".join(parts) + "\n"
