"""``watch``: has an upstream a newer release, and would our series carry over to it?

A failed request is an error, never "nothing new": an index whose list lacks the pinned release is
not believed.
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from packaging.version import Version

from sparkforge.build.options import StoreOptions, command_options
from sparkforge.core import plain
from sparkforge.core.disk import read_json
from sparkforge.core.errors import CheckError, FetchError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain import proposal, releases
from sparkforge.maintain.companions import Trial
from sparkforge.maintain.mover import dry_run
from sparkforge.maintain.rebase import table
from sparkforge.maintain.releases import PatchResult
from sparkforge.sources.project import Project


@command_options
class Options(StoreOptions):
    trial: Annotated[bool, Parameter(name="--try")] = False
    """also move to each newer release as far as it goes, build and test it"""
    propose: Path | None = None
    """open a pull request for each newer release, with this output of --try --json"""


@dataclass(frozen=True)
class Found:
    """An upstream's newest final release, and its series on it."""

    upstream: str
    pinned: str
    newest: str
    state: str = "up to date"
    moves: tuple[PatchResult, ...] | None = None
    """A verdict a patch; None where nothing was tried."""
    tree: str = ""
    """Of the checkout with the whole move; "": it stopped."""
    trouble: str = ""
    """What stopped it."""
    trial: Trial = field(default_factory=dict)


def run(options: Options = Options()) -> int:
    """Look for newer releases, try the series on them and report; returns the exit code."""
    own = Project.open(options.project)
    if options.trial and options.propose is not None:
        raise UsageError("--try and --propose conflict", "first run watch --try --json alone")
    if options.propose is not None:
        return _propose(own, options.propose)
    with proposal.clone(own) if options.trial else nullcontext(own) as project:
        found = [_look(project, name) for name in project.pins.upstreams]
        for at, one in enumerate(found if options.trial else ()):
            if one.moves is not None and not project.pins.upstreams[one.upstream].source_in:
                found[at], *_ = proposal.move(project, one, trial=True)
    states = {one.state for one in found} - {"up to date"}
    code = CheckError.exit_code if states else 0
    if states - {"carries over"}:
        code = SeriesError.exit_code
    log.document({"watch": [asdict(one) for one in found]})
    rows = ((one.upstream, one.pinned, one.newest, one.state) for one in found)
    log.table([("upstream", "pinned", "newest", "state"), *rows])
    table([move for one in found for move in one.moves or ()])
    return code


def _propose(own: Project, path: Path) -> int:
    """Bring the pull requests up to date."""
    known = plain.load(dict[str, tuple[Found, ...]], read_json(path)) or {}
    if "watch" not in known:
        raise UsageError(f"{path}: not written by watch --try --json", "run that first")
    forge, tried = proposal.Forge.of(own.root), {one.upstream: one for one in known["watch"]}
    with proposal.clone(own) as project:
        for name, pin in project.pins.upstreams.items():
            if not pin.source_in:  # else it moves with those wheels
                forge.tell(project, _look(project, name), tried.get(name))
    log.document({"proposed": True})
    return 0


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
