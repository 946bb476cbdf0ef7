"""The carry table: every patch of every series against several releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkforge.core import pages
from sparkforge.core.log import log
from sparkforge.maintain.rebase import release_spec
from sparkforge.maintain.rebase.mover import Mover, dry_run
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.series.series import Series
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Carried:
    """One series against the releases, oldest first; None: the pinned one itself."""

    series: Series
    version: str
    columns: dict[str, list[PatchResult] | None]

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        releases = {
            version: None if results is None else [result.as_json() for result in results]
            for version, results in self.columns.items()
        }
        return {"pinned": self.version, "releases": releases}

    def rows(self) -> list[tuple[str, ...]]:
        """Return it as a table: a row a patch, a column a release."""
        names = [patch.name.removesuffix(".patch") for patch in self.series.patches]
        columns = [("patch", *names)]
        for version, results in self.columns.items():
            if results is None:
                columns.append((f"{version} (pinned)", *("applies" for _ in names)))
            else:
                columns.append((version, *(result.row()[1] for result in results)))
        return list(zip(*columns, strict=True))


def carried(project: Project, every: Sequence[Series], count: int) -> list[Carried]:
    """Try every series on the newest releases that the index has.

    Args:
        count: number of releases, including the pinned one if it is among them.
    """
    loaded, tables = project.pins, []
    for own in every:
        upstream = loaded.upstream(own.upstream)
        if not own.patches or upstream.source_file is None:
            continue
        # the owner's own file decides the releases; it is the smaller one
        owner = loaded.upstream(upstream.source_in or own.upstream)
        columns: dict[str, list[PatchResult] | None] = {}
        for version in reversed(release_spec.newest(project.access, owner, count)):
            if version == owner.version:
                columns[version] = None
                continue
            with log.step(f"{own.upstream} on {version}"):
                release = release_spec.resolve(project, own.upstream, f"release:{version}")
                old = release_spec.old_source(project, own.upstream, release)
                moving = Mover.of(project.store, own, old, release.source, upstream.paths)
                columns[version] = dry_run(project.store, moving)
        tables.append(Carried(own, owner.version, columns))
    return tables


def page(tables: Sequence[Carried]) -> str:
    """Return the tables as Markdown."""
    parts = ["# Which release takes which patch\n"]
    for entry in tables:
        head, *rows = entry.rows()
        parts.append(f"## {entry.series.upstream}\n\n{pages.table(head, rows)}\n")
    return "\n".join(parts)
