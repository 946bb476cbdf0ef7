"""The changes of a finished rebase to the checkout: all files at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.build.context import release_name
from sparkforge.core import git, transaction
from sparkforge.core.errors import PinsError, UsageError
from sparkforge.maintain.companions import locks
from sparkforge.maintain.companions.move import Move
from sparkforge.maintain.rebase import drift, report
from sparkforge.maintain.rebase.drift import DependencyDrift
from sparkforge.maintain.rebase.drive import Rebase
from sparkforge.maintain.rebase.resolutions import Memory
from sparkforge.maintain.rebase.state import SeriesRebase, State
from sparkforge.maintain.rebase.verdicts import Verdict
from sparkforge.maintain.rebase.workspace import Workspace
from sparkforge.pins import edit, pins, yamlfile
from sparkforge.pins.pins import Pins
from sparkforge.pins.yamlfile import Where
from sparkforge.series import series, staging
from sparkforge.series.series import Series
from sparkforge.series.staging import Rules, Staged
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Landed:
    """The result of a rebase in the checkout."""

    report: Path
    changed: tuple[Path, ...]
    drift: tuple[DependencyDrift, ...]
    """The pins that no longer agree, with their fixes."""
    tests: Mapping[str, str]
    """Of the patches that were dropped, which no other patch names: they are still there."""


@dataclass(frozen=True)
class Landing:
    """What a rebase writes into the checkout, without its report."""

    files: Mapping[Path, bytes | None]
    series: Mapping[str, Series]
    """The moved series, by upstream."""
    drift: tuple[DependencyDrift, ...]
    sections: tuple[report.ReportSection, ...]
    tests: Mapping[str, str]
    """As in ``Landed``."""


def land(rebase: Rebase, state: State, move: Move | None = None) -> Landed:
    """Write pins, series, patches, resolutions, changelog and report together.

    Args:
        move: what was tried, with the files that belong to it.

    Raises:
        SeriesError: the moved patches are no valid series.
        UsageError: the checkout has changed since it was tried.
    """
    # before the checkout is read: changes of an export in the meantime would be lost
    with rebase.project.locked() as project:
        own = state.parts[0]
        root = project.root
        landing = planned(rebase, project, state)
        drifts, files = landing.drift, dict(landing.files)
        if move is not None:
            if landing.files != move.files or locks.texts_of(root) != move.before:
                msg = f"{root}: changed while the move was tried"
                raise UsageError(msg, f"build.py rebase {own.upstream} --continue tries it again")
            drifts = move.drift
            files |= {root / name: text.encode() for name, text in move.requirements.items()}
        page = root / "dist" / "rebase" / report.file_name(own)
        files[page] = report.page(state, landing.sections, drifts, move).encode()
        present = {file: file.read_bytes() if file.is_file() else None for file in files}
        changed = {file: data for file, data in files.items() if data != present[file]}
        # the state goes with the change: a run killed after it has nothing left to continue
        transaction.change(root, {**changed, rebase.job.file: None})
        rebase.job.remove()
        remaining = tuple(difference for difference in drifts if not difference.values)
        written = tuple(file for file in changed if file != page)
        return Landed(page, written, remaining, landing.tests)


def planned(rebase: Rebase, project: Project, state: State) -> Landing:
    """Return what a rebase writes; changes nothing.

    Raises:
        SeriesError: the moved patches are no valid series.
        UsageError: the checkout has changes of its own.
    """
    own = state.parts[0]
    rebase.check_unchanged(companions=state.companions)
    rebase.check_same(state)
    root, path = project.root, project.pins_path
    files: dict[Path, bytes | None] = {}
    staged: dict[str, Staged] = {}
    before: dict[str, Series] = {}
    sections = []
    for part in state.parts:
        folder = project.series_folder(part.upstream)
        old = before[part.upstream] = rebase.series_of(part.upstream)
        staged[part.upstream] = _staged(rebase, part)
        files |= staged[part.upstream].files(folder, old)
        sections.append(report.ReportSection(part, _range_diff(rebase, part, old)))
        memory = rebase.job.memory / part.upstream
        for file in sorted(memory.glob("*")) if memory.is_dir() else ():
            files[folder / Memory.FOLDER / file.name] = file.read_bytes()
    fresh = {name: one.series for name, one in staged.items()}
    drifts = drifting(project, state, fresh)
    log_page = root / "CHANGELOG.md"
    log_text = log_page.read_text(encoding="utf-8") if log_page.exists() else "# Changelog\n"
    counter = counted(project.pins.release.counter, log_text)
    text = _pins_text(path, project.pins, counter, state, staged, drifts)
    files[path] = text.encode()
    after = pins.parse(path, text)
    files[log_page] = changelog(log_text, state, _release(after, own.upstream)).encode()
    files |= staging.page(root, after, fresh)
    return Landing(files, fresh, tuple(drifts), tuple(sections), _left(state, before, staged))


def drifting(project: Project, state: State, fresh: Mapping[str, Series]) -> list[DependencyDrift]:
    """Return what the checkout of a project does not have as the new releases want it.

    Args:
        project: with the pins from before the move.
        fresh: the moved series, by upstream.
    """
    moved = state.moved
    found: list[DependencyDrift] = []
    for part in state.parts:
        if part.upstream not in moved:
            continue
        others = {name: pin for name, pin in moved.items() if name != part.upstream}
        upstreams = {**project.pins.upstreams, **others}
        seen = replace(project, pins=project.pins.model_copy(update={"upstreams": upstreams}))
        found += drift.find(seen, part.target, part.new, part.old)
        found += drift.unknown(part.upstream, part.target, part.declared_commit, part.lacking)
    versions = {name: pin.version for name, pin in {**project.pins.upstreams, **moved}.items()}
    return found + drift.droppable(fresh.values(), versions)


# -- the series ----------------------------------------------------------------------------


def _staged(rebase: Rebase, part: SeriesRebase) -> Staged:
    """Write a part's new patches aside and apply them: they must give the tree of the rebase."""
    repo = rebase.job.tree(part)
    exported = series.export(repo, part.new.commit, part.head)
    tree = git.git(repo, "rev-parse", f"{part.head}^{{tree}}")
    rules = Rules(rebase.project.root, part.target.paths, "fix the message of that patch")
    aside = rebase.job.folder / "landing" / part.upstream
    return staging.stage(rebase.project.store, aside, exported, part.new, tree, rules=rules)


def _left(
    state: State, before: Mapping[str, Series], staged: Mapping[str, Staged]
) -> dict[str, str]:
    """Return the tests of the dropped patches, by patch, that no patch names any more."""
    every = [patch for part in staged.values() for patch in part.series.patches]
    named = {patch.trailers["Test"] for patch in every}
    dropped = {
        (part.upstream, result.patch)
        for part in state.parts
        for result in part.results
        if result.commit is None
    }
    tests = {
        patch.name: patch.trailers["Test"]
        for upstream, old in before.items()
        for patch in old.patches
        if (upstream, patch.name) in dropped
    }
    return {name: test for name, test in tests.items() if test not in named}


def _range_diff(rebase: Rebase, part: SeriesRebase, old: Series) -> str:
    if not part.results or part.head == part.new.commit:
        return "nothing is left of the series"  # git takes no empty range
    patched = series.apply(rebase.project.store, old, part.old)
    work = Workspace(rebase.job.tree(part))
    return work.git(
        "range-diff",
        "--no-color",
        "--no-dual-color",
        f"{part.old.commit}..{patched.commit}",
        f"{part.new.commit}..{part.head}",
    )


# -- pins.yaml -----------------------------------------------------------------------------


def _pins_text(
    path: Path,
    loaded: Pins,
    counter: int,
    state: State,
    staged: Mapping[str, Staged],
    drifts: list[DependencyDrift],
) -> str:
    """Return pins.yaml with the new release in it; every other character stays."""
    text = path.read_bytes().decode()
    values: dict[Where, str] = {}
    if counter != loaded.release.counter:
        values["release", "counter"] = str(counter)
    for name, target in state.moved.items():
        here: Where = ("upstreams", name)
        for key in ("tag", "version"):
            values[*here, key] = str(getattr(target, key))
        for file_key, file in target.files.items():
            for key in ("file", "sha256", "size"):
                values[*here, "files", file_key, key] = str(getattr(file, key))
    for difference in drifts:
        values.update(difference.values)
    try:
        text = yamlfile.replace_scalars(text, values)
    except KeyError as error:
        msg = f"{path.name}: {error.args[0]}: is written on more than one line"
        raise PinsError(msg, "write it KEY: VALUE on one line") from None
    for name, target in state.moved.items():
        for key, one in target.files.items():
            if one.natives is None and loaded.upstream(name).files[key].natives is not None:
                text = edit.without_natives(path, text, name, key)
        text = edit.with_commit(path, text, name, target.commit)
    for part in state.parts:
        recorded = staged[part.upstream].recorded
        if recorded is not None or loaded.upstream(part.upstream).patched:
            fresh = {} if recorded is None else {part.new.provider: recorded}
            text = edit.with_record(path, text, part.upstream, fresh)
    return text


def _release(loaded: Pins, upstream: str) -> str:
    """Return the name of the release that a build of an upstream makes now."""
    every = list(loaded.targets.values())
    return release_name(
        loaded, ([target for target in every if upstream in target.wheels] or every)[0]
    )


_SECTION = re.compile(r"^## (?:(?P<version>\S+) \((?P<date>[^)\n]*)\)[ \t]*$)?", re.MULTILINE)


def counted(counter: int, text: str) -> int:
    """Return the release's counter after a move: once the last release was made, it is raised.

    Args:
        text: the changelog, whose newest section says whether it was.
    """
    newest = _SECTION.search(text)
    return counter if newest and newest["date"] == "unreleased" else counter + 1


def changelog(text: str, state: State, release: str) -> str:
    """Return the changelog with a line about a rebase at the end of the release's section.

    An unreleased section becomes that of the release; before one with a date there will be a new
    section. Where the first heading is no release's, the line goes below it.
    """
    newest = _SECTION.search(text)
    if newest and newest["version"] not in (None, release):
        done = newest["date"] != "unreleased"
        rest = text[newest.start() if done else newest.end() :]
        between = "\n\n" if done else ""
        text = f"{text[: newest.start()]}## {release} (unreleased){between}{rest}"
    lines = []
    for part in state.parts:
        if part.upstream in state.moved:
            counts = _counts(
                one for one in state.parts if part.upstream in (one.upstream, one.target.source_in)
            )
            change = f"{part.pinned['tag']} → {part.target.tag}"
            lines.append(f"* {part.upstream} {change}: {counts}.")
        for result in part.results:
            if result.commit is None:
                why = result.reason or "; ".join(result.detail)
                lines.append(
                    f"  * {part.upstream}: dropped {result.patch.removesuffix('.patch')}"
                    f" ({result.verdict.value}): {why}"
                )
    sections = [match.start() for match in _SECTION.finditer(text)]
    end = sections[1] if len(sections) > 1 else len(text)
    head, tail = text[:end].rstrip("\n"), text[end:]
    between = "\n" if sections and head.splitlines()[-1].startswith(("*", " ")) else "\n\n"
    return head + between + "\n".join(lines) + "\n" + (f"\n{tail}" if tail else "")


# verdicts that stop: a commit of these was made by a person
_RESOLVED = (Verdict.CONFLICT, Verdict.TARGET_DELETED)


def _counts(parts: Iterable[SeriesRebase]) -> str:
    counts = Counter(
        "dropped by hand"
        if result.reason is not None
        else "resolved by hand"
        if result.commit and result.verdict in _RESOLVED
        else result.verdict.value
        for part in parts
        for result in part.results
    )
    shown = [f"{count} {kind}" for kind, count in counts.items()]
    return f"{sum(counts.values())} patches ({', '.join(shown)})" if counts else "no patches"
