"""``watch``: has an upstream a newer release, and would our series carry over to it?

A failed request is an error, never "nothing new": an index whose list lacks the pinned release is
not believed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packaging.version import Version

from sparkforge.build.options import OutputOptions, command_options
from sparkforge.core import pages
from sparkforge.core.disk import write_file
from sparkforge.core.errors import CheckError, FetchError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain import releases
from sparkforge.maintain.mover import dry_run
from sparkforge.maintain.rebase import table
from sparkforge.maintain.releases import PatchResult
from sparkforge.sources.project import Project, ProjectOptions


@command_options
class Options:
    """Options of ``watch``."""

    markdown: Path | None = None
    """write the result to this file as issue text"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@dataclass(frozen=True)
class Found:
    """An upstream's newest final release, and its series on it."""

    upstream: str
    pinned: str
    newest: str
    state: str = "up to date"
    moves: tuple[PatchResult, ...] = ()
    """A verdict a patch; empty where nothing was tried."""

    @property
    def row(self) -> tuple[str, ...]:
        counts = Counter(str(move.verdict) for move in self.moves)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return self.upstream, self.pinned, self.newest, self.state, verdicts or "-"


_HEAD = ("upstream", "pinned", "newest", "state", "verdicts")


def run(options: Options = Options()) -> int:
    """Look for newer releases, try the series on them and report; returns the exit code."""
    project = Project.open(options.project)
    found = [_look(project, name) for name in project.pins.upstreams]
    states = {one.state for one in found} - {"up to date"}
    code = CheckError.exit_code if states else 0
    if states - {"carries over"}:
        code = SeriesError.exit_code
    if options.markdown is not None:
        write_file(options.markdown, _markdown(found).encode())
    log.document({"watch": [asdict(one) for one in found], "exit_code": code})
    log.table([_HEAD, *(one.row for one in found)])
    table([move for one in found for move in one.moves if move.stops])
    return code


def _look(project: Project, name: str) -> Found:
    upstream = project.pins.upstream(name)
    pinned = Version(project.pins.upstream(upstream.source_in or name).version)
    package = upstream.files[upstream.source_file or next(iter(upstream.files))].project
    versions = releases.listed(project.access, package)
    if pinned not in versions:
        msg = f"{package}: the package index of pip's configuration does not have {pinned}"
        raise FetchError(msg, "configure pip with an index that has it (pip config list)")
    kept = (v for v, links in versions.items() if any(one.yank_reason is None for one in links))
    newest = max(pinned, *(version for version in kept if not version.is_prerelease))
    found = Found(name, str(pinned), str(newest))
    if newest == pinned:
        return found
    with log.step(f"{name} {pinned} → {newest}"):
        try:
            moves = dry_run(project, releases.resolve(project, name, str(newest)))
        except UsageError as error:  # wheels come before sdists, and not all at once
            return replace(found, state=f"not complete yet: {error.what}")
    stuck = any(move.stops for move in moves)
    state = "a person is needed" if stuck else "carries over"
    return replace(found, state=state, moves=tuple(moves))


def _markdown(found: Sequence[Found]) -> str:
    """Return the text of an issue: the new releases, and the patches that stop."""
    news = [one for one in found if one.newest != one.pinned]
    title = "Newer upstream releases" if news else "No newer upstream release"
    parts = [f"# {title}", pages.table(_HEAD, [one.row for one in found])]
    for one in news:
        rows = [(*move.row(), "; ".join(move.detail)) for move in one.moves if move.stops]
        parts += [pages.table(("patch", "verdict", "found"), rows)] if rows else []
        parts.append(f"`python3 build.py rebase {one.upstream} --onto {one.newest}`")
    return "\n\n".join(parts) + "\n"
