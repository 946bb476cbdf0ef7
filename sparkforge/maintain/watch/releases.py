"""``watch``: has an upstream a newer release, and would our series carry over to it?

Versions come from the package index that pip is configured for. A release is tried as ``rebase``
would move the series; nothing of the project changes. A failed request is an error, never
"nothing new": an index whose list lacks the pinned release is not believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from sparkforge.core import pages
from sparkforge.core.errors import FetchError, UsageError, WatchConflict, WatchNews
from sparkforge.core.log import log
from sparkforge.maintain.rebase import patch_rebase, release_spec
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.pins.pins import Pins
from sparkforge.series.series import Series
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Listed:
    """The releases of an upstream on the index."""

    upstream: str
    follows: str
    """The upstream whose releases these are; its own name, but for one that is carried."""
    pinned: str
    newest: str
    """The version that is pinned, or the newest one after it that is not silenced."""
    newer: tuple[str, ...]
    """All versions newer than the pinned one that the index has, silenced ones too, newest first.
    """
    yanked: str | None = None
    """Upstream's reason for withdrawing the pinned release; None if it did not."""

    @property
    def news(self) -> bool:
        """There is a newer release that is not silenced."""
        return self.newest != self.pinned


@dataclass(frozen=True)
class Found:
    """The result of an upstream's series on its newest release."""

    listed: Listed
    patches: int
    """Number of patches."""
    moves: tuple[PatchResult, ...] = ()
    """A verdict a patch; empty where nothing was tried."""
    lacking: str | None = None
    """Reason why it could not be tried, though there is a release."""

    @property
    def by_hand(self) -> list[PatchResult]:
        """The patches that a person must carry over."""
        return [move for move in self.moves if move.stops]

    @property
    def state(self) -> str:
        if not self.listed.news:
            return "silenced" if self.listed.newer else "up to date"
        if self.lacking is not None:
            return "not complete yet"
        return "a person is needed" if self.by_hand else "carries over"

    @property
    def summary(self) -> str:
        """The verdicts, counted."""
        if self.lacking is not None:
            return self.lacking
        counts = Counter(move.verdict.value for move in self.moves)
        return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "-"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **asdict(self.listed),
            "state": self.state,
            "patches": self.patches,
            "lacking": self.lacking,
            "moves": [move.as_json() for move in self.moves],
        }


@dataclass(frozen=True)
class Known:
    """Releases that are known already: ``VERSION``, or ``UPSTREAM=VERSION``."""

    versions: frozenset[tuple[str | None, Version]]

    @classmethod
    def parse(cls, pins: Pins, words: Sequence[str]) -> Known:
        """Read the values of ``--known``; UsageError for no version, or an unknown upstream."""
        found = set()
        for word in words:
            name, separator, text = word.rpartition("=")
            if separator:
                pins.upstream(name)
            try:
                found.add((name if separator else None, Version(text)))
            except InvalidVersion:
                msg = f"--known {word}: {text!r} is not a version"
                raise UsageError(msg, "for example --known 0.32.0 or vllm=0.32.0") from None
        return cls(frozenset(found))

    def has(self, upstream: str, version: Version) -> bool:
        return (None, version) in self.versions or (upstream, version) in self.versions


def listed(project: Project, name: str, known: Known, *, pre: bool) -> Listed:
    """Ask the index for the versions of an upstream.

    Args:
        known: releases that are no news, nor are those older than they.
        pre: count pre-releases, too.

    Raises:
        FetchError: the index does not answer, or not in full.
    """
    pins, access = project.pins, project.access
    upstream = pins.upstream(name)
    follows = upstream.source_in or name
    pinned = pins.upstream(follows).version
    if access.offline:
        msg = f"{name}: --offline is set, so the package index cannot be read"
        raise FetchError(msg, "run without --offline")
    # releases of the file that replaces the commit count
    key = upstream.source_file or next(iter(upstream.files))
    package = upstream.files[key].project
    versions: dict[Version, str | None] = {}
    for link in access.index.all_links(package):
        version = release_spec.version_of(link.filename)
        if version is not None:
            # a release is withdrawn when all of its files are
            reason = (
                None if link.yank_reason is None else str(link.yank_reason) or "no reason given"
            )
            versions[version] = reason if versions.get(version, reason) is not None else None
    here = Version(pinned)
    if here not in versions:
        msg = (
            f"{package}: the package index of pip's configuration does not have the pinned"
            f" release {pinned}, so it may miss others, too"
        )
        raise FetchError(msg, "configure pip with an index that has it (pip config list)")
    newer = sorted(
        (
            version
            for version, yanked in versions.items()
            if version > here and yanked is None and (pre or not version.is_prerelease)
        ),
        reverse=True,
    )
    seen = [version for version in newer if known.has(name, version) or known.has(follows, version)]
    news = [version for version in newer if not seen or version > max(seen)]
    return Listed(
        name,
        follows,
        pinned,
        str(news[0]) if news else pinned,
        tuple(map(str, newer)),
        versions[here],
    )


def look(project: Project, patches: Series, listed: Listed) -> Found:
    """Try a series on the newest release of its upstream, where that is news.

    Raises:
        FetchError: a release file cannot be fetched.
        IntegrityError: it differs from the index.
        SeriesError: the series does not even apply to the pinned release.
    """
    if not listed.news or not patches.patches:
        return Found(listed, len(patches.patches))
    try:
        new = release_spec.resolve(project, listed.upstream, f"release:{listed.newest}")
    except UsageError as error:  # wheels come before sdists, and not all at once
        return Found(listed, len(patches.patches), lacking=error.what)
    old = release_spec.old_source(project, listed.upstream, new)
    rules = project.pins.upstream(listed.upstream).paths
    moves = patch_rebase.verdicts(project.store, patches, old, new.source, rules=rules)
    return Found(listed, len(patches.patches), tuple(moves))


def verdict(results: Sequence[Found]) -> int:
    """Return the exit code: 0, ``WatchNews``'s or ``WatchConflict``'s."""
    if any(result.by_hand or result.lacking for result in results):
        return WatchConflict.exit_code
    return WatchNews.exit_code if any(result.listed.news for result in results) else 0


# -- for people ---------------------------------------------------------------------------------

_HEAD = ("upstream", "pinned", "newest", "state", "patches", "verdicts")


def _cells(result: Found) -> tuple[str, ...]:
    newest = result.listed.newer[0] if result.listed.newer else result.listed.newest
    return (
        result.listed.upstream,
        result.listed.pinned,
        newest,
        result.state,
        str(result.patches),
        result.summary,
    )


def show(results: Sequence[Found]) -> None:
    """Print a table, and below it each patch that needs a person."""
    for result in results:
        if result.listed.yanked is not None:
            log.warning(
                f"{result.listed.upstream}: upstream withdrew the pinned release"
                f" {result.listed.pinned}: {result.listed.yanked}"
            )
    log.table([_HEAD, *map(_cells, results)])
    for result in results:
        for stuck in result.by_hand:
            log.info(
                f"{result.listed.upstream}: {stuck.patch}: {stuck.verdict.value}: {stuck.next}"
            )
            for line in stuck.detail:
                log.info(f"    {line}")


def markdown(results: Sequence[Found]) -> str:
    """Return the text of an issue: the new releases, and the effect on each patch."""
    return pages.render(
        Path(__file__).with_name("issue.md.j2"),
        found=results,
        news=[result for result in results if result.listed.news],
        head=_HEAD,
        cells=[_cells(result) for result in results],
        rows=lambda result: [
            (move.patch, move.verdict.value, move.next, "; ".join(move.detail) or "-")
            for move in result.moves
        ],
    )
