"""The changes of a finished rebase to the checkout: files, ``git add``, one commit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import release_name
from sparkforge.core import git
from sparkforge.core.disk import outdated, write_files
from sparkforge.core.run import call
from sparkforge.maintain import companions, releases
from sparkforge.maintain.companions import Trial
from sparkforge.maintain.releases import Note, PatchResult
from sparkforge.pins import pins, yamlfile
from sparkforge.pins.pins import Recorded, Upstream
from sparkforge.pins.yamlfile import Where
from sparkforge.series import exporting, lint, series
from sparkforge.series.series import Series
from sparkforge.sources.project import Project

if TYPE_CHECKING:
    from sparkforge.maintain.rebase import Job, Plan


Files = dict[Path, bytes | None]
"""What a rebase writes into the checkout; None: removed."""
Results = Mapping[str, list[PatchResult]]
"""The results of patches by upstream."""


def land(
    job: Job, plan: Plan, results: Results, *, trial: bool = True
) -> tuple[list[Path], list[Note], Trial]:
    """Write pins, series and changelog, and commit them; with companions, try all of it before.

    A checkout that is not under git gets the files alone. Returns the files that changed, and what
    no longer agrees.
    """
    # before the checkout is read: changes of an export in the meantime would be lost
    with job.project.locked() as project:
        job = replace(job, project=project)
        job.check_clean(plan.companions)
        job.check_same(plan)
        root, here = project.root, project
        files, moved = _planned(job, plan, results)
        tried: Trial = {}
        if plan.companions:
            folder = job.folder / "checkout"
            here, requirements, tried = companions.tried(project, files, plan, folder, trial=trial)
            files |= {root / name: text.encode() for name, text in requirements.items()}
        # its locks are the new ones; its pins as they were: the difference shows what is new
        here = replace(here, pins=project.pins)
        notes = [note for move in plan.moves for note in move.notes]
        for name, target in plan.moved.items():
            notes += releases.find(here, name, target, plan.moved)
        notes += droppable(moved.values(), {**project.pins.upstreams, **plan.moved})
        write_files(changed := outdated(files))
        if git.attempt(root, "rev-parse", "--is-inside-work-tree")[0] == 0:  # the user's own git
            paths = [str(path.relative_to(root)) for path in changed]
            call("git", "-C", root, "add", "--all", "--", *paths)
            lines = [f"Move {job.upstream} to {plan.moves[0].target.tag}", ""]
            lines += [": ".join(one.row()) for found in results.values() for one in found]
            lines += [f"{test}: {result}" for test, result in tried.get("tests", {}).items()]
            message = "\n".join(lines)
            call("git", "-C", root, "commit", "--quiet", "-m", message, "--", *paths)
        job.remove()
        return list(changed), notes, tried


def _planned(job: Job, plan: Plan, results: Results) -> tuple[Files, dict[str, Series]]:
    """Return what a rebase writes, and the moved series by upstream; changes nothing."""
    project, root, path = job.project, job.project.root, job.project.pins_path
    files: Files = {}
    fresh: dict[str, Series] = {}
    records: dict[str, Recorded | None] = {}
    for move in plan.moves:
        name, tree = move.upstream, job.tree(move.upstream)
        exported = series.export(tree, move.new.commit, "HEAD")
        wanted = git.git(tree, "rev-parse", "HEAD^{tree}")
        aside = job.folder / "landing" / name
        staged = exporting.stage(
            project.store, aside, exported, move.new, wanted, root=root, paths=move.target.paths
        )
        folder = project.series_folder(name)
        files |= staged.files(folder, series.read(folder))
        fresh[name], records[name] = staged.series, staged.recorded
    page = root / "CHANGELOG.md"
    log = page.read_text(encoding="utf-8") if page.exists() else "# Changelog\n"
    newest = re.search(r"^## \S+ \(([^)\n]*)\)[ \t]*$", log, re.MULTILINE)
    unreleased = newest is not None and newest[1] == "unreleased"
    # once the last release was made, the counter is raised
    text = _pins_text(project, plan, project.pins.release.counter + (not unreleased), records)
    files[path] = text.encode()
    after = pins.parse(path, text)
    targets = sorted(after.targets.values(), key=lambda one: job.upstream not in one.wheels)
    # at the top of the section of what is not released, which is of the new release now
    start, end = newest.span() if newest else (len(log), len(log))
    rest = log[end if unreleased else start :].lstrip()
    heading = f"## {release_name(after, targets[0])} (unreleased)"
    gap = "\n" if rest and not rest.startswith("* ") else ""
    lines = "".join(_changes(plan, results)) + gap
    files[page] = f"{log[:start].rstrip()}\n\n{heading}\n\n{lines}{rest}".encode()
    return files | exporting.page(root, after, fresh), fresh


def _changes(plan: Plan, results: Results) -> Iterator[str]:
    """Yield the changelog's lines about a rebase."""
    for move in plan.moves:
        if move.upstream in plan.moved:
            yield f"* {move.upstream} {move.pinned} → {move.target.tag}.\n"
        for result in results[move.upstream]:
            if result.commit is None:
                name, why = result.patch.removesuffix(".patch"), result.detail[-1]
                yield f"  * {move.upstream}: dropped {name} ({result.verdict}): {why}\n"


def _pins_text(
    project: Project, plan: Plan, counter: int, records: Mapping[str, Recorded | None]
) -> str:
    """Return pins.yaml with the new release in it; every other character stays."""
    path, before = project.pins_path, project.pins.upstreams
    values: dict[Where, str] = {}
    if counter != project.pins.release.counter:
        values["release", "counter"] = str(counter)
    for image in (name for name, one in project.pins.images.items() if one.apt is not None):
        values["images", image, "apt", "snapshot"] = f"{datetime.now(UTC):%Y%m%dT000000Z}"
    for name, target in plan.moved.items():
        here: Where = ("upstreams", name)
        values |= {(*here, "tag"): target.tag, (*here, "version"): target.version}
        for key, file in target.files.items():
            for part, value in (("file", file.file), ("sha256", file.sha256), ("size", file.size)):
                values[*here, "files", key, part] = str(value)
        for key, external in target.externals.items():
            if external != before[name].externals[key]:
                values[*here, "externals", key, "commit"] = external.commit
    text = yamlfile.replace_scalars(path.read_bytes().decode(), values)
    for name, target in plan.moved.items():
        for key, file in target.files.items():
            if file.natives is None and before[name].files[key].natives is not None:
                text = yamlfile.without_natives(path, text, name, key)
        text = yamlfile.with_commit(path, text, name, target.commit)
    for move in plan.moves:
        recorded = records[move.upstream]
        if recorded is not None or before[move.upstream].patched:
            fresh = {} if recorded is None else {move.new.provider: recorded}
            text = yamlfile.with_record(path, text, move.upstream, fresh)
    return text


def droppable(every: Iterable[Series], upstreams: Mapping[str, Upstream]) -> list[Note]:
    """Return the patches whose Drop-when holds for these upstreams."""
    found = []
    versions = {name: pin.version for name, pin in upstreams.items()}
    for own in every:
        for patch in own.patches:
            text = patch.trailers["Drop-when"]
            if lint.holds(text, versions):
                name = patch.name.removesuffix(".patch")
                hint = f"drop its commit, then build.py patches export DIR --drop {patch.name}"
                found.append((f"{own.upstream}: {name}: its Drop-when holds: {text}", hint))
    return found
