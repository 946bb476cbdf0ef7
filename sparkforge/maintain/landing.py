"""The changes of a finished rebase to the checkout: files, ``git add``, one commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import release_name
from sparkforge.core import git
from sparkforge.core.disk import write_files
from sparkforge.core.errors import PinsError
from sparkforge.core.run import call
from sparkforge.maintain import companions, drift
from sparkforge.maintain.drift import Note
from sparkforge.pins import edit, pins, yamlfile
from sparkforge.pins.pins import Recorded
from sparkforge.pins.yamlfile import Where
from sparkforge.series import exporting, series
from sparkforge.series.series import Series
from sparkforge.sources.project import Project

if TYPE_CHECKING:
    from sparkforge.maintain.job import Job, Plan
    from sparkforge.maintain.patchtests import Result


Files = dict[Path, bytes | None]
"""What a rebase writes into the checkout; None: removed."""


def land(job: Job, plan: Plan) -> tuple[list[Path], list[Note], list[Result]]:
    """Write pins, series and changelog, and commit them; with companions, try all of it before.

    A checkout that is not under git gets the files alone.

    Returns:
        The files that changed, what no longer agrees, and the patches' tests.
    """
    # before the checkout is read: changes of an export in the meantime would be lost
    with job.project.locked() as project:
        root, own, here = project.root, plan.parts[0], project
        files, moved = _planned(job, project, plan)
        tests: list[Result] = []
        if plan.companions:
            here, requirements, tests = companions.tried(
                project, files, plan, job.folder / "checkout"
            )
            files |= {root / name: text.encode() for name, text in requirements.items()}
        notes = _disagreeing(replace(here, pins=project.pins), plan, moved)
        changed = [
            path
            for path, data in files.items()
            if data != (path.read_bytes() if path.is_file() else None)
        ]
        write_files({path: files[path] for path in changed})
        if git.attempt(root, "rev-parse", "--is-inside-work-tree")[0] == 0:  # the user's own git
            paths = [str(path.relative_to(root)) for path in changed]
            call("git", "-C", root, "add", "--all", "--", *paths)
            lines = [f"Move {own.upstream} to {own.target.tag}", ""]
            lines += [": ".join(one.row()) for part in plan.parts for one in part.results]
            lines += [f"{one.test}: {one.whole.result}; {one.verdict}" for one in tests]
            message = "\n".join(lines)
            call("git", "-C", root, "commit", "--quiet", "-m", message, "--", *paths)
        job.remove()
        return changed, notes, tests


def _planned(job: Job, project: Project, plan: Plan) -> tuple[Files, dict[str, Series]]:
    """Return what a rebase writes, and the moved series by upstream; changes nothing."""
    job.check_clean(plan.companions)
    job.check_same(plan)
    root, path = project.root, project.pins_path
    files: Files = {}
    fresh: dict[str, Series] = {}
    records: dict[str, Recorded | None] = {}
    for part in plan.parts:
        tree = job.tree(part.upstream)
        exported = series.export(tree, part.new.commit, "HEAD")
        rules = exporting.Rules(root, part.target.paths, "fix the message of that patch")
        aside = job.folder / "landing" / part.upstream
        wanted = git.git(tree, "rev-parse", "HEAD^{tree}")
        staged = exporting.stage(project.store, aside, exported, part.new, wanted, rules=rules)
        files |= staged.files(project.series_folder(part.upstream), job.series_of(part.upstream))
        fresh[part.upstream], records[part.upstream] = staged.series, staged.recorded
    page = root / "CHANGELOG.md"
    log = page.read_text(encoding="utf-8") if page.exists() else "# Changelog\n"
    newest = _SECTION.search(log)
    # once the last release was made, the counter is raised
    raised = newest is None or newest[1] != "unreleased"
    text = _pins_text(project, plan, project.pins.release.counter + raised, records)
    files[path] = text.encode()
    after = pins.parse(path, text)
    targets = sorted(after.targets.values(), key=lambda one: plan.upstream not in one.wheels)
    files[page] = _changelog(log, plan, release_name(after, targets[0])).encode()
    return files | exporting.page(root, after, fresh), fresh


def _disagreeing(project: Project, plan: Plan, moved: Mapping[str, Series]) -> list[Note]:
    """Return what a checkout does not have as the new releases want it; its pins are the old."""
    notes: list[Note] = []
    upstreams = {**project.pins.upstreams, **plan.moved}
    for part in plan.parts:
        if part.upstream in plan.moved:
            # its own pin as it was: the difference shows which wheels are new
            own = {**upstreams, part.upstream: project.pins.upstreams[part.upstream]}
            seen = project.pins.model_copy(update={"upstreams": own})
            notes += part.notes
            notes += drift.find(replace(project, pins=seen), part.upstream, part.target)
    return notes + drift.droppable(moved.values(), upstreams)


def _pins_text(
    project: Project, plan: Plan, counter: int, records: Mapping[str, Recorded | None]
) -> str:
    """Return pins.yaml with the new release in it; every other character stays."""
    path, before = project.pins_path, project.pins.upstreams
    values: dict[Where, str] = {}
    if counter != project.pins.release.counter:
        values["release", "counter"] = str(counter)
    for name, target in plan.moved.items():
        here: Where = ("upstreams", name)
        values |= {(*here, "tag"): target.tag, (*here, "version"): target.version}
        for key, file in target.files.items():
            for part, value in (("file", file.file), ("sha256", file.sha256), ("size", file.size)):
                values[*here, "files", key, part] = str(value)
        for key, external in target.externals.items():
            if external != before[name].externals[key]:
                values[*here, "externals", key, "commit"] = external.commit
    try:
        text = yamlfile.replace_scalars(path.read_bytes().decode(), values)
    except KeyError as error:
        msg = f"{path.name}: {error.args[0]}: is written on more than one line"
        raise PinsError(msg, "write it KEY: VALUE on one line") from None
    for name, target in plan.moved.items():
        for key, file in target.files.items():
            if file.natives is None and before[name].files[key].natives is not None:
                text = edit.without_natives(path, text, name, key)
        text = edit.with_commit(path, text, name, target.commit)
    for one in plan.parts:
        recorded = records[one.upstream]
        if recorded is not None or before[one.upstream].patched:
            fresh = {} if recorded is None else {one.new.provider: recorded}
            text = edit.with_record(path, text, one.upstream, fresh)
    return text


_SECTION = re.compile(r"^## \S+ \(([^)\n]*)\)[ \t]*$", re.MULTILINE)


def _changelog(text: str, plan: Plan, release: str) -> str:
    """Return the changelog with lines about a rebase at the end of the unreleased section.

    That becomes the section of the release. Without one there will be a new one, on top.
    """
    lines = []
    for part in plan.parts:
        if part.upstream in plan.moved:
            lines.append(f"* {part.upstream} {part.pinned} → {part.target.tag}.\n")
        for result in part.results:
            if result.commit is None:
                name, why = result.patch.removesuffix(".patch"), result.detail[-1]
                lines.append(f"  * {part.upstream}: dropped {name} ({result.verdict}): {why}\n")
    newest, heading = _SECTION.search(text), f"## {release} (unreleased)"
    if newest is None or newest[1] != "unreleased":
        at = len(text) if newest is None else newest.start()
        rest = f"\n{text[at:]}" if text[at:] else ""
        return f"{text[:at].rstrip()}\n\n{heading}\n\n{''.join(lines)}{rest}"
    following = text.find("\n## ", newest.end())
    end = len(text) if following < 0 else following
    section = text[newest.end() : end].rstrip()
    return f"{text[: newest.start()]}{heading}{section}\n{''.join(lines)}{text[end:]}"
