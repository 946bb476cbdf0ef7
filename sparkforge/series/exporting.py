"""Commits → the series in the checkout: staged, linted, applied again, then changed as a whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparkforge.core import git
from sparkforge.core.disk import write_files
from sparkforge.core.errors import PinsError, SeriesError, UsageError
from sparkforge.core.log import counted, log
from sparkforge.pins import edit
from sparkforge.pins.pins import Provider, Recorded
from sparkforge.series import series, staging
from sparkforge.series.series import Series
from sparkforge.series.staging import Rules, Staged
from sparkforge.series.worktree import SeriesCommit
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source

# where git's mail format ends a message, and the diff begins
_BREAKS = re.compile(r"^(---(\s*$| \S)|diff -|Index: )")
# lines that git reads as mail headers at the beginning of a message
_HEADERS = re.compile(r"^(From|Date|Subject): ")


@dataclass(frozen=True)
class Chain:
    """Commits that become a series, oldest first."""

    source: Source
    commits: Sequence[SeriesCommit]
    env: Mapping[str, str]
    """Variables of git, so that the store's repository finds them."""

    @property
    def tip(self) -> str:
        return self.commits[-1].commit.id if self.commits else self.source.commit

    @property
    def tree(self) -> str:
        return self.commits[-1].commit.tree if self.commits else self.source.tree


@dataclass(frozen=True)
class Report:
    """Changes of a series by an export, as names of patches."""

    added: list[str]
    changed: list[str]
    refreshed: list[str]
    """Same change and message; blob ids or line numbers follow an earlier patch."""
    reworded: list[str]
    """Same change, other message, author or date."""
    renamed: list[list[str]]
    squashed: list[list[str]]
    """``renamed``, ``squashed``: [name before, name now]."""
    dropped: list[str]
    moved: bool
    """The remaining patches have another order."""
    unchanged: int

    def lines(self) -> list[str]:
        """Return a description, with a line for each patch."""
        kinds = [
            ("added", self.added),
            ("changed", self.changed),
            ("reworded", self.reworded),
            ("refreshed (only blob ids and line numbers)", self.refreshed),
            ("dropped", self.dropped),
        ]
        out = [f"{word}: {name}" for word, names in kinds for name in names]
        out += [f"renamed: {old} is now {new}" for old, new in self.renamed]
        out += [f"squashed: {old} is now part of {new}" for old, new in self.squashed]
        out += ["the remaining patches are in another order"] if self.moved else []
        return out


def export(
    project: Project,
    old: Series,
    chain: Chain,
    *,
    drop: Sequence[str],
    check: bool,
    fix: str = "fix the commits, then export again",
) -> tuple[Series, Report, list[Path]]:
    """Replace the series of an upstream by a chain of commits.

    The caller has locked the checkout (``Project.locked``).

    Args:
        old: the series in the checkout.
        drop: patches that may be removed; removing another is an error.
        check: write nothing.
        fix: how to fix the form of a patch.

    Returns:
        The new series, its changes, and the written files.

    Raises:
        SeriesError: a commit cannot be a patch, or a patch is malformed; nothing was written.
        UsageError: a patch in ``drop`` does not exist.
        PinsError: with ``check``, files would be written.
    """
    source = chain.source
    folder = old.folder
    if unknown := sorted(set(drop) - {patch.name for patch in old.patches}):
        msg = f"--drop {unknown[0]}: no such patch in {source.upstream}"
        raise UsageError(msg, "see build.py patches list")
    files = _files(chain)
    rules = Rules(
        project.root,
        project.pins.upstream(source.upstream).paths,
        f"nothing was written; {fix}",
    )
    with project.store.temporary("export") as work:
        staged = staging.stage(
            project.store,
            work / source.upstream,
            files,
            source,
            chain.tree,
            shown=folder,
            rules=rules,
        )
        expected = _expected(project, source.provider, old, staged)
        report = _report(old, files, [commit.origins for commit in chain.commits])
    stale = {
        path: data
        for path, data in expected.items()
        if (path.read_bytes() if path.is_file() else None) != data
    }
    result = Series(source.upstream, folder, staged.series.patches)
    if check:
        if stale:
            lines = "\n".join(f"  {line}" for line in report.lines())
            names = ", ".join(path.name for path in stale)
            msg = f"an export would change {names}\n{lines}".rstrip()
            raise PinsError(msg, "run build.py patches export")
        return result, report, []
    if unnamed := [name for name in report.dropped if name not in drop]:
        msg = f"no commit is left for {', '.join(unnamed)}"
        how = " ".join(f"--drop {name}" for name in unnamed)
        raise SeriesError(msg, f"nothing was written; to remove it: {how}")
    write_files(stale)
    return result, report, list(stale)


def document(report: Report, written: Sequence[Path]) -> dict[str, Any]:
    """Print the changes of an export; returns them as JSON values."""
    for line in report.lines():
        log.info(line)
    if report.unchanged:
        log.info(counted(report.unchanged, "patch", "patches") + " up to date")
    for path in written:
        log.detail(f"written: {path}")
    return {**asdict(report), "written": [str(path) for path in written]}


# -- commits → files -----------------------------------------------------------------


def _files(chain: Chain) -> list[tuple[str, bytes]]:
    """Return the canonical patches of a chain."""
    before = chain.source.tree
    for series_commit in chain.commits:
        commit = series_commit.commit
        short = commit.id[:12]
        if commit.tree == before:
            msg = f"commit {short} changes nothing"
            raise SeriesError(msg, "drop it (git rebase -i --empty=drop), or add its change")
        before = commit.tree
        _check_message(short, commit.message)
    files = series.export(chain.source.repo, chain.source.commit, chain.tip, chain.env)
    names = [name for name, _ in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        msg = f"two commits would write {twice[0]}"
        raise SeriesError(msg, "change one subject: it becomes the file name")
    return files


def _check_message(commit: str, message: str) -> None:
    """Refuse a message that git's mail format would misread."""
    if "\r\n" in message:
        msg = f"commit {commit}: its message has line ends of CR LF"
        raise SeriesError(msg, "git commit --amend --no-edit writes it with LF")
    subject, _, body = message.partition("\n")
    if not re.search("[A-Za-z0-9]", subject):
        msg = f"commit {commit}: its subject has no letter or digit for a file name"
        raise SeriesError(msg, "describe the change in English")
    if body.strip() and not body.startswith("\n"):
        msg = f"commit {commit}: no empty line after its subject"
        raise SeriesError(msg, "write one line, an empty line, then the reason")
    for number, line in enumerate(body.splitlines(), start=2):
        if _BREAKS.match(line):
            msg = (
                f"commit {commit}: line {number} of its message, {line[:40]!r}, looks like the"
                " start of a diff"
            )
            raise SeriesError(f"{msg} in git's mail format", "indent or reword it")
    first = body.lstrip("\n").partition("\n")[0]
    if _HEADERS.match(first):
        msg = (
            f"commit {commit}: its message begins with {first[:40]!r}, which looks like a mail"
            " header"
        )
        raise SeriesError(msg, "reword it")


# -- files → checkout ----------------------------------------------------------------


def _expected(
    project: Project, provider: Provider, old: Series, staged: Staged
) -> dict[Path, bytes | None]:
    """Return the new contents of the checkout's files; None: removed."""
    fresh = staged.series
    expected = staged.files(project.series_folder(fresh.upstream), old)
    before = dict(project.pins.upstream(fresh.upstream).patched)
    after: dict[Provider, Recorded] = {} if staged.recorded is None else {provider: staged.recorded}
    if fresh.sha256 == old.sha256:  # records of another kind of source stay
        after = before | after
    elif gone := sorted(set(before) - {provider}):
        how = "; ".join(f"build.py {series.RECORD[name]}" for name in gone)
        log.warning(
            f"{fresh.upstream}: what sources from {', '.join(gone)} give is no longer recorded"
            f" ({how})"
        )
    if after != before:
        text = project.pins_path.read_bytes().decode()  # read_text() would change the line ends
        expected[project.pins_path] = edit.with_record(
            project.pins_path, text, fresh.upstream, after
        ).encode()
    if fresh.sha256 != old.sha256:
        expected |= staging.page(project.root, project.pins, {fresh.upstream: fresh})
    return expected


# -- changes of each patch ---------------------------------------------------------


def _report(
    old: Series, files: Sequence[tuple[str, bytes]], origins: Sequence[Sequence[str]]
) -> Report:
    before = {patch.name: patch.path.read_bytes() for patch in old.patches}
    report = Report([], [], [], [], [], [], [], moved=False, unchanged=0)
    names = [name for name, _ in files]
    came: dict[str, str] = {}  # name before → name now, in the order of now
    for (name, data), noted in zip(files, origins, strict=True):
        # a patch with its old name stays itself, even with others squashed into its commit
        known = [origin for origin in noted if origin in before and origin not in came]
        mine = [origin for origin in known if origin not in names or origin == name]
        if name in before and name not in came and name not in mine:
            mine.insert(0, name)
        first = name if name in mine else next(iter(mine), None)
        if first is None:
            report.added.append(name)
            continue
        came |= dict.fromkeys([first, *mine], name)
        if first != name:
            report.renamed.append([first, name])
        report.squashed.extend([origin, name] for origin in mine if origin != first)
        _compare(report, name, before[first], data)
    report.dropped.extend(name for name in before if name not in came)
    stays = [origin for origin, now in came.items() if now == origin]
    moved = stays != [patch for patch in before if patch in stays]
    unchanged = sum(before.get(name) == data for name, data in files)
    return replace(report, moved=moved, unchanged=unchanged)


def _compare(report: Report, name: str, old: bytes, new: bytes) -> None:
    if old == new:
        return
    same_message = old.partition(b"\ndiff --git ")[0] == new.partition(b"\ndiff --git ")[0]
    if git.patch_id(old) != git.patch_id(new):
        report.changed.append(name)
    elif same_message:
        report.refreshed.append(name)
    else:
        report.reworded.append(name)
