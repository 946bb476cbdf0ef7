"""The changes of a finished rebase to the checkout: files, ``git add``, one commit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.build.context import release_name
from sparkforge.core import git, pages
from sparkforge.core.disk import write_files
from sparkforge.core.errors import PinsError, UsageError
from sparkforge.core.run import call
from sparkforge.maintain.companions import locks, trial
from sparkforge.maintain.companions.trial import Move
from sparkforge.maintain.rebase import drift, memory
from sparkforge.maintain.rebase.drift import Drift
from sparkforge.maintain.rebase.job import Job, Part, Plan
from sparkforge.maintain.rebase.tree import Tree
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.pins import edit, pins, yamlfile
from sparkforge.pins.pins import Pins
from sparkforge.pins.yamlfile import Where
from sparkforge.series import exporting, series
from sparkforge.series.exporting import Rules, Staged
from sparkforge.series.series import Series
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Landed:
    """The result of a rebase in the checkout."""

    report: Path
    changed: tuple[Path, ...]
    drift: tuple[Drift, ...]
    """The pins that no longer agree, with their fixes."""


@dataclass(frozen=True)
class Landing:
    """What a rebase writes into the checkout, without its report."""

    files: Mapping[Path, bytes | None]
    series: Mapping[str, Series]
    """The moved series, by upstream."""
    drift: tuple[Drift, ...]


def land(job: Job, plan: Plan, move: Move | None = None) -> Landed:
    """Write pins, series, patches, resolutions, changelog and report, and commit them.

    A checkout that is not under git gets the files alone.

    Args:
        move: what was tried, with the files that belong to it.

    Raises:
        SeriesError: the moved patches are no valid series.
        UsageError: the checkout has changed since it was tried.
        CommandError: git cannot commit; the files are written and staged.
    """
    # before the checkout is read: changes of an export in the meantime would be lost
    with job.project.locked() as project:
        own, root = plan.parts[0], project.root
        landing = planned(job, project, plan)
        drifts, files = landing.drift, dict(landing.files)
        if move is not None:
            if landing.files != move.files or locks.texts_of(root) != move.before:
                msg = f"{root}: changed while the move was tried"
                raise UsageError(msg, f"build.py rebase {own.upstream} --continue tries it again")
            drifts = move.drift
            files |= {root / name: text.encode() for name, text in move.requirements.items()}
        name = f"{own.upstream}-{own.pinned['version']}-{own.target.version}.md"
        page = root / "dist" / "rebase" / name
        page.write_text(_report(job, plan, drifts, move), encoding="utf-8")
        changed = {
            file: data
            for file, data in files.items()
            if data != (file.read_bytes() if file.is_file() else None)
        }
        write_files(changed)
        _commit(root, changed, f"Move {own.upstream} to {own.target.tag}")
        job.remove()
        left = tuple(difference for difference in drifts if not difference.values)
        return Landed(page, tuple(changed), left)


def _commit(root: Path, files: Iterable[Path], message: str) -> None:
    """Commit files with the user's own git, its identity and hooks."""
    if git.git_ok(root, "rev-parse", "--is-inside-work-tree"):
        paths = [str(path.relative_to(root)) for path in files]
        call("git", "-C", root, "add", "--all", "--", *paths)
        call("git", "-C", root, "commit", "--quiet", "-m", message, "--", *paths)


def planned(job: Job, project: Project, plan: Plan) -> Landing:
    """Return what a rebase writes; changes nothing.

    Raises:
        SeriesError: the moved patches are no valid series.
        UsageError: the checkout has changes of its own.
    """
    job.check_unchanged(companions=plan.companions)
    job.check_same(plan)
    root, path = project.root, project.pins_path
    files: dict[Path, bytes | None] = {}
    staged: dict[str, Staged] = {}
    before = {part.upstream: job.series_of(part.upstream) for part in plan.parts}
    for part in plan.parts:
        folder = project.series_folder(part.upstream)
        staged[part.upstream] = _staged(job, part)
        files |= staged[part.upstream].files(folder, before[part.upstream])
        for file in sorted((job.folder / "memory" / part.upstream).glob("*")):
            files[folder / memory.FOLDER / file.name] = file.read_bytes()
    fresh = {name: one.series for name, one in staged.items()}
    drifts = drifting(project, plan, fresh)
    log_page = root / "CHANGELOG.md"
    log_text = log_page.read_text(encoding="utf-8") if log_page.exists() else "# Changelog\n"
    counter = counted(project.pins.release.counter, log_text)
    text = _pins_text(path, project.pins, counter, plan, staged, drifts)
    files[path] = text.encode()
    after = pins.parse(path, text)
    files[log_page] = changelog(log_text, plan, _release(after, plan.upstream)).encode()
    files |= exporting.page(root, after, fresh)
    return Landing(files, fresh, tuple(drifts))


def drifting(project: Project, plan: Plan, fresh: Mapping[str, Series]) -> list[Drift]:
    """Return what the checkout of a project does not have as the new releases want it.

    Args:
        project: with the pins from before the move.
        fresh: the moved series, by upstream.
    """
    moved = plan.moved
    found: list[Drift] = []
    for part in plan.parts:
        if part.upstream not in moved:
            continue
        others = {name: pin for name, pin in moved.items() if name != part.upstream}
        upstreams = {**project.pins.upstreams, **others}
        seen = replace(project, pins=project.pins.model_copy(update={"upstreams": upstreams}))
        found += drift.find(seen, part.target, part.new, part.old)
        found += drift.unknown(part.upstream, part.target, part.declared_commit, part.lacking)
    versions = {name: pin.version for name, pin in {**project.pins.upstreams, **moved}.items()}
    return found + drift.droppable(fresh.values(), versions)


def _staged(job: Job, part: Part) -> Staged:
    """Write a part's new patches aside and apply them: they must give the tree of the rebase."""
    tree = Tree(job.tree(part))
    exported = series.export(tree.path, part.new.commit, "HEAD")
    rules = Rules(job.project.root, part.target.paths, "fix the message of that patch")
    aside = job.folder / "landing" / part.upstream
    wanted = tree.git("rev-parse", "HEAD^{tree}")
    return exporting.stage(job.project.store, aside, exported, part.new, wanted, rules=rules)


def _report(job: Job, plan: Plan, drifts: Iterable[Drift], move: Move | None) -> str:
    """Return the page about the rebase."""
    diffs = {}
    for part in plan.parts:
        patched = series.apply(job.project.store, job.series_of(part.upstream), part.old)
        ranges = (f"{part.old.commit}..{patched.commit}", f"{part.new.commit}..HEAD")
        # a patch that shrank much still has its pair
        words = ("range-diff", "--no-color", "--no-dual-color", "--creation-factor=100", *ranges)
        left = any(result.commit for result in part.results)
        diffs[part.upstream] = Tree(job.tree(part)).git(*words) if left else "nothing is left"
    return pages.render(
        Path(__file__).with_name("report.md.j2"),
        own=plan.parts[0],
        parts=plan.parts,
        diffs={name: pages.Markdown(text) for name, text in diffs.items()},
        drifts=drifts,
        moved=[part for part in plan.parts[1:] if part.upstream in plan.moved],
        move=move,
        test_head=trial.HEAD,
        test_rows=[] if move is None else [trial.row(result) for result in move.tests],
        rows=lambda part: [_found(result) for result in part.results],
    )


def _found(result: PatchResult) -> tuple[str, ...]:
    name, verdict, _ = result.row()
    lines = [*result.detail, *result.causes]
    if result.reason is not None:
        lines.append(f"left out: {result.reason}")
    return (name, verdict, pages.Markdown("<br>".join(map(pages.escape, lines))))


# -- pins.yaml and the changelog -------------------------------------------------------------


def _pins_text(
    path: Path,
    loaded: Pins,
    counter: int,
    plan: Plan,
    staged: Mapping[str, Staged],
    drifts: list[Drift],
) -> str:
    """Return pins.yaml with the new release in it; every other character stays."""
    text = path.read_bytes().decode()
    values: dict[Where, str] = {}
    if counter != loaded.release.counter:
        values["release", "counter"] = str(counter)
    for name, target in plan.moved.items():
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
    for name, target in plan.moved.items():
        for key, one in target.files.items():
            if one.natives is None and loaded.upstream(name).files[key].natives is not None:
                text = edit.without_natives(path, text, name, key)
        text = edit.with_commit(path, text, name, target.commit)
    for part in plan.parts:
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


def changelog(text: str, plan: Plan, release: str) -> str:
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
    for part in plan.parts:
        if part.upstream in plan.moved:
            counts = _counts(
                one for one in plan.parts if part.upstream in (one.upstream, one.target.source_in)
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


def _counts(parts: Iterable[Part]) -> str:
    counts = Counter(
        "dropped by hand"
        if result.reason is not None
        else "resolved by hand"
        if "resolved by hand" in result.detail
        else result.verdict.value
        for part in parts
        for result in part.results
    )
    shown = [f"{count} {kind}" for kind, count in counts.items()]
    return f"{sum(counts.values())} patches ({', '.join(shown)})" if counts else "no patches"
