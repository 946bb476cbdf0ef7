"""``watch``: has an upstream a newer release, and would our series carry over to it?

Versions come from the package index that pip is configured for. A release is tried as ``rebase``
would move the series; nothing of the project changes. A failed request is an error, never
"nothing new": an index whose list lacks the pinned release is not believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from packaging.version import InvalidVersion, Version

from sparkforge.build.options import OutputOptions
from sparkforge.core import pages
from sparkforge.core.disk import write_file
from sparkforge.core.errors import CheckError, FetchError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain.rebase import release_spec
from sparkforge.maintain.rebase.mover import Mover, dry_run
from sparkforge.maintain.rebase.verdicts import HEAD, PatchResult
from sparkforge.series import series
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
    moves: tuple[PatchResult, ...] = ()
    """A verdict a patch; empty where nothing was tried."""
    lacking: str | None = None
    """Reason why it could not be tried, though there is a release."""

    @property
    def state(self) -> str:
        if self.newest == self.pinned:
            return "silenced" if self.newer else "up to date"
        if self.lacking is not None:
            return "not complete yet"
        stuck = any(move.stops for move in self.moves)
        return "a person is needed" if stuck else "carries over"

    def cells(self) -> tuple[str, ...]:
        """Return it as a row of a table."""
        counts = Counter(move.verdict.value for move in self.moves)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        newest = self.newer[0] if self.newer else self.newest
        return self.upstream, self.pinned, newest, self.state, self.lacking or verdicts or "-"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        moves = [move.as_json() for move in self.moves]
        return asdict(self) | {"state": self.state, "moves": moves}


_HEAD = ("upstream", "pinned", "newest", "state", "verdicts")


def run(options: Options = Options()) -> int:
    """Look for newer releases, try the series on them and report; returns the exit code."""
    project = Project.open(options.project)
    page = options.markdown
    if page is not None and (page.is_dir() or not page.resolve().parent.is_dir()):
        msg = f"--markdown {page}: cannot write a file there"
        raise UsageError(msg, "give a file in an existing folder")
    known = [_known(project, word) for word in options.known]
    names = list(dict.fromkeys(options.upstream)) or list(project.pins.upstreams)
    found = [_look(project, name, known, pre=options.pre) for name in names]
    stuck = any(one.lacking or any(move.stops for move in one.moves) for one in found)
    news = any(one.newest != one.pinned for one in found)
    code = SeriesError.exit_code if stuck else CheckError.exit_code if news else 0
    if page is not None:
        write_file(page, _markdown(found).encode())
    log.document({"watch": [one.as_json() for one in found], "exit_code": code})
    for one in found:
        if one.yanked is not None:
            log.warning(f"{one.upstream}: upstream withdrew the pinned {one.pinned}: {one.yanked}")
    log.table([_HEAD, *(one.cells() for one in found)])
    for move in (move for one in found for move in one.moves if move.stops):
        log.info("\n    ".join([f"{move.patch}: {move.verdict.value}: {move.next}", *move.detail]))
    return code


def _known(project: Project, word: str) -> tuple[str | None, Version]:
    name, separator, text = word.rpartition("=")
    if separator:
        project.pins.upstream(name)
    try:
        return name if separator else None, Version(text)
    except InvalidVersion:
        msg = f"--known {word}: {text!r} is not a version"
        raise UsageError(msg, "for example --known 0.32.0 or vllm=0.32.0") from None


def _look(
    project: Project, name: str, known: Sequence[tuple[str | None, Version]], *, pre: bool
) -> Found:
    """Ask the index for the versions of an upstream, and try its series on the newest.

    Raises:
        FetchError: the index does not answer, or not in full.
    """
    upstream = project.pins.upstream(name)
    follows = upstream.source_in or name
    pinned = project.pins.upstream(follows).version
    package = upstream.files[upstream.source_file or next(iter(upstream.files))].project
    versions = release_spec.versions(project.access, package)
    here = Version(pinned)
    if here not in versions:
        msg = f"{package}: the package index of pip's configuration does not have {pinned}"
        raise FetchError(msg, "configure pip with an index that has it (pip config list)")
    newer = sorted(
        (
            version
            for version, yanked in versions.items()
            if version > here and yanked is None and (pre or not version.is_prerelease)
        ),
        reverse=True,
    )
    seen = [version for who, version in known if who in (None, name, follows) and version in newer]
    news = [version for version in newer if not seen or version > max(seen)]
    newest = str(news[0]) if news else pinned
    found = (name, pinned, newest, tuple(map(str, newer)), versions[here])
    own = series.read(project.series_folder(name))
    if not news or not own.patches:
        return Found(*found)
    with log.step(f"{name} {pinned} → {newest}"):
        try:
            new = release_spec.resolve(project, name, f"release:{newest}")
        except UsageError as error:  # wheels come before sdists, and not all at once
            return Found(*found, lacking=error.what)
        old = release_spec.old_source(project, name, new)
        mover = Mover.of(project.store, own, old, new.source, upstream.paths)
        return Found(*found, moves=tuple(dry_run(project.store, mover)))


def _markdown(found: Sequence[Found]) -> str:
    """Return the text of an issue: the new releases, and the effect on each patch."""
    news = [one for one in found if one.newest != one.pinned]
    title = "Newer upstream releases" if news else "No newer upstream release"
    parts = [f"# {title}", pages.table(_HEAD, [one.cells() for one in found])]
    parts += [
        f"**{one.upstream} {one.pinned}, which is pinned, was withdrawn by upstream:**"
        f" {pages.escape(one.yanked)}"
        for one in found
        if one.yanked is not None
    ]
    for one in news:
        parts.append(f"## {one.upstream} {one.pinned} → {one.newest}")
        if one.moves:
            rows = [(*move.row(), "; ".join(move.detail) or "-") for move in one.moves]
            parts.append(pages.table((*HEAD, "found"), rows))
            parts.append(f"`python3 build.py rebase {one.upstream} --onto release:{one.newest}`")
    return "\n\n".join(parts) + "\n"
