"""Commits → the series in the checkout: checked, applied again, then written as a whole."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core import git, pages
from sparkforge.core.disk import outdated, write_files
from sparkforge.core.errors import CommandError, PinsError, SeriesError, UsageError
from sparkforge.core.log import counted, log
from sparkforge.pins import yamlfile
from sparkforge.pins.pins import Pins, Provider, Recorded, Upstream
from sparkforge.pins.types import PathRule
from sparkforge.series import lint, series
from sparkforge.series.series import AM, Patched, Series
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store

# -- candidates: written to their own folder, checked and applied ---------------------------


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
    root: Path | None = None,
    paths: Sequence[PathRule] = (),
) -> Staged:
    """Write a series to a folder named as the upstream, read and apply it.

    With ``root``, the checkout with the tests in trailers, it is linted, too. SeriesError: a patch
    is malformed or does not apply, or the tree differs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files:
        (folder / name).write_bytes(data)
    (folder / "series").write_text("".join(f"{name}\n" for name, _ in files))
    try:
        fresh = series.read(folder)
        if root and (problems := lint.lint(fresh, root, paths)):
            hint = "nothing was written; fix the message: docs/patches-howto.md has a template"
            raise SeriesError("\n".join(problems), hint)
        patched = series.apply(store, fresh, source)
    except SeriesError as error:
        what = error.what.replace(str(folder), f"patches/{folder.name}")  # that folder goes
        raise SeriesError(what, error.remedy) from None
    if patched.tree != tree:
        msg = f"the patches give tree {patched.tree[:12]}, the commits have {tree[:12]}"
        raise SeriesError(msg, "a commit contains a change that a patch cannot express: remove it")
    recorded = Recorded(commit=patched.commit, tree=patched.tree) if fresh.patches else None
    return Staged(fresh, recorded)


# -- export ---------------------------------------------------------------------------------


def export(
    project: Project,
    old: Series,
    source: Source,
    tip: str,
    *,
    env: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    check: bool = False,
) -> tuple[Series, dict[str, Any]]:
    """Replace the series ``old`` of a locked checkout by the commits from the source to ``tip``.

    ``env`` lets git in the store's repository find them. Returns the new series, and its changes as
    JSON values. SeriesError: a commit cannot be a patch, or a patch would go that is not in
    ``drop``. PinsError: with ``check``, files would be written.
    """
    name, before = source.upstream, {patch.name: patch.path.read_bytes() for patch in old.patches}
    if unknown := sorted(set(drop) - before.keys()):
        msg = f"--drop {unknown[0]}: no such patch in {name}"
        raise UsageError(msg, "see build.py patches list")
    files = series.export(source.repo, source.commit, tip, env)
    after = dict(files)
    report = {
        "added": [patch for patch in after if patch not in before],
        "changed": [patch for patch in after if before.get(patch, after[patch]) != after[patch]],
        "dropped": [patch for patch in before if patch not in after],
    }
    tree = git.git(source.repo, "rev-parse", f"{tip}^{{tree}}", env=env)
    with project.store.temporary("export") as work:
        paths = project.pins.upstream(name).paths
        staged = stage(
            project.store, work / name, files, source, tree, root=project.root, paths=paths
        )
        stale = outdated(_expected(project, source.provider, old, staged))
    for what, patches in report.items():
        for patch in patches:
            log.info(f"{what}: {patch}")
    if check and stale:
        msg = f"an export would change {', '.join(path.name for path in stale)}"
        raise PinsError(msg, "run build.py patches export")
    if unnamed := [patch for patch in report["dropped"] if patch not in drop]:
        msg = f"no commit is left for {', '.join(unnamed)}"
        how = " ".join(f"--drop {patch}" for patch in unnamed)
        raise SeriesError(msg, f"nothing was written; to remove it: {how}")
    write_files(stale)
    told = "written" if stale else "nothing to write"
    log.info(f"{name}: {counted(len(files), 'patch', 'patches')}, {told}")
    document = {"upstream": name, **report, "written": [str(path) for path in stale]}
    return Series(name, old.folder, staged.series.patches), document


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
        expected[path] = yamlfile.with_record(path, text, fresh.upstream, after).encode()
    return expected


# -- patches from outside -------------------------------------------------------------------


def imported(store: Store, patched: Patched, files: Sequence[Path]) -> str:
    """Put the patches of mails behind a series, and return the last one's commit.

    SeriesError: a file is no such mail, or does not apply there.
    """
    hint = "how to apply patches by hand: docs/patches-howto.md#patches-from-outside"
    paths = list(patched.touched)
    for file in files:
        try:
            how = ("apply", "--numstat", "-z", str(file.resolve()))
            listing = git.git(Path(), *how, env={"GIT_DIR": "/dev/null"})
        except CommandError as error:
            raise SeriesError(f"{file}: git cannot read it:\n{error}", hint) from None
        # both sides of a rename
        paths += [field.rpartition("\t")[2] for field in listing.split("\0") if field]
    with (
        store.temporary("import") as work,
        git.sparse_worktree(patched.source.repo, work / "tree", patched.commit, paths) as tree,
    ):
        for file in files:
            try:
                git.git(tree, *AM, "--3way", str(file.resolve()))
            except CommandError as error:
                raise SeriesError(f"{file}: does not apply:\n{error}", hint) from None
        return git.git(tree, "rev-parse", "HEAD")


# -- docs/patches.md ------------------------------------------------------------------------


def page(root: Path, pins: Pins, fresh: Mapping[str, Series]) -> dict[Path, bytes | None]:
    """Return docs/patches.md with some series replaced; nothing where the checkout has no page."""
    path = root / "docs" / "patches.md"
    if not path.is_file():
        return {}
    every = [fresh.get(name) or series.read(root / "patches" / name) for name in pins.upstreams]
    return {path: markdown(every, pins.upstreams).encode()}


def markdown(all_series: Sequence[Series], upstreams: Mapping[str, Upstream]) -> str:
    """Return docs/patches.md: a table for each upstream, the patches in the order of the series."""
    return pages.render(
        Path(__file__).with_name("patches.md.j2"),
        command=pages.COMMAND,
        total=sum(len(series.patches) for series in all_series),
        all_series=all_series,
        upstreams=upstreams,
    )
