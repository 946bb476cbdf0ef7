"""Commits → the series in the checkout: staged, linted, applied again, then changed as a whole."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkforge.core import git
from sparkforge.core.disk import write_files
from sparkforge.core.errors import PinsError, SeriesError, UsageError
from sparkforge.core.log import counted, log
from sparkforge.pins import edit
from sparkforge.pins.pins import Pins, Provider, Recorded
from sparkforge.pins.types import PathRule
from sparkforge.series import docs, lint, series
from sparkforge.series.series import Series
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store

# -- candidates: written to their own folder, checked and applied ---------------------------


@dataclass(frozen=True)
class Rules:
    """Rules for a series: the checkout with the tests in trailers, the upstream's path rules, and
    the hint for a problem."""

    root: Path
    paths: Sequence[PathRule]
    hint: str


@dataclass(frozen=True)
class Staged:
    """A valid series in its own folder, and its record for pins.yaml; None: it is empty."""

    series: Series
    recorded: Recorded | None

    def files(self, folder: Path, old: Series) -> dict[Path, bytes | None]:
        """Return the files of a folder if this replaces its series; None: removed."""
        listing = "".join(f"{patch.name}\n" for patch in self.series.patches)
        return {
            **dict.fromkeys(folder / patch.name for patch in old.patches),
            **{folder / patch.name: patch.path.read_bytes() for patch in self.series.patches},
            folder / "series": listing.encode() or None,
        }


def stage(
    store: Store,
    folder: Path,
    files: Sequence[tuple[str, bytes]],
    source: Source,
    tree: str,
    *,
    shown: Path | None = None,
    rules: Rules | None = None,
) -> Staged:
    """Write a series to a folder named as the upstream, read, check and apply it.

    SeriesError: a patch is malformed or does not apply, or the tree differs. It names the folder
    ``shown``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files:
        (folder / name).write_bytes(data)
    (folder / "series").write_text("".join(f"{name}\n" for name, _ in files))
    try:
        fresh = series.read(folder)
        if rules and (problems := lint.lint(fresh, rules.root, rules.paths)):
            raise SeriesError("\n".join(problems), rules.hint)
        patched = series.apply(store, fresh, source)
    except SeriesError as error:
        texts = (error.what, error.remedy)
        raise SeriesError(*(t.replace(str(folder), str(shown or folder)) for t in texts)) from None
    if patched.tree != tree:
        series.forget(store, fresh, source)
        msg = f"the patches give tree {patched.tree[:12]}, the commits have {tree[:12]}"
        raise SeriesError(msg, "a commit contains a change that a patch cannot express: remove it")
    recorded = Recorded(commit=patched.commit, tree=patched.tree) if fresh.patches else None
    return Staged(fresh, recorded)


def page(root: Path, pins: Pins, fresh: Mapping[str, Series]) -> dict[Path, bytes | None]:
    """Return docs/patches.md with some series replaced; nothing where the checkout has no page."""
    path = root / "docs" / "patches.md"
    if not path.is_file():
        return {}
    every = [fresh.get(name) or series.read(root / "patches" / name) for name in pins.upstreams]
    return {path: docs.page(every, pins.upstreams).encode()}


# -- export ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Commits that become a series: those after the source's up to ``tip``, without merges, and
    git's variables for the store's repository to find them."""

    source: Source
    tip: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """Changes of a series by an export, as names of patches."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a description, with a line for each patch."""
        return [f"{what}: {name}" for what, names in asdict(self).items() for name in names]


def export(
    project: Project,
    old: Series,
    chain: Chain,
    *,
    drop: Sequence[str],
    check: bool,
    fix: str = "fix the commits, then export again",
) -> tuple[Series, Report, list[Path]]:
    """Replace the series ``old`` of a locked checkout by a chain of commits.

    Returns the new series, its changes, and the written files. SeriesError: a commit cannot be a
    patch, or a patch would go that is not in ``drop``; nothing was written. UsageError: a patch in
    ``drop`` does not exist. PinsError: with ``check``, files would be written.
    """
    source, folder = chain.source, old.folder
    if unknown := sorted(set(drop) - {patch.name for patch in old.patches}):
        msg = f"--drop {unknown[0]}: no such patch in {source.upstream}"
        raise UsageError(msg, "see build.py patches list")
    files = series.export(source.repo, source.commit, chain.tip, chain.env)
    every = [name for name, _ in files]
    if twice := {name for name in every if every.count(name) > 1}:
        raise SeriesError(f"two commits would write {min(twice)}", "change one of their subjects")
    paths = project.pins.upstream(source.upstream).paths
    rules = Rules(project.root, paths, f"nothing was written; {fix}")
    tree = git.git(source.repo, "rev-parse", f"{chain.tip}^{{tree}}", env=chain.env)
    with project.store.temporary("export") as work:
        aside = work / source.upstream
        staged = stage(project.store, aside, files, source, tree, shown=folder, rules=rules)
        expected = _expected(project, source.provider, old, staged)
        report = _report(old, files)
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


def document(fresh: Series, report: Report, written: Sequence[Path]) -> dict[str, Any]:
    """Print the changes of an export; returns them as JSON values."""
    for line in report.lines():
        log.info(line)
    for path in written:
        log.detail(f"written: {path}")
    told = "written" if written else "nothing to write"
    log.info(f"{fresh.upstream}: {counted(len(fresh.patches), 'patch', 'patches')}, {told}")
    return {"upstream": fresh.upstream, **asdict(report), "written": [str(p) for p in written]}


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
    else:
        expected |= page(project.root, project.pins, {fresh.upstream: fresh})
        for name in sorted(set(before) - {provider}):
            what = f"{fresh.upstream}: the result on sources from {name} is no longer recorded"
            log.warning(f"{what} (build.py {series.RECORD[name]})")
    if after != before:
        path = project.pins_path
        text = path.read_bytes().decode()  # read_text() would change the line ends
        expected[path] = edit.with_record(path, text, fresh.upstream, after).encode()
    return expected


def _report(old: Series, files: Sequence[tuple[str, bytes]]) -> Report:
    before = {patch.name: patch.path.read_bytes() for patch in old.patches}
    report = Report()
    for name, data in files:
        was = before.pop(name, None)
        if was is None:
            report.added.append(name)
        elif was != data:
            report.changed.append(name)
    report.dropped.extend(before)
    return report
