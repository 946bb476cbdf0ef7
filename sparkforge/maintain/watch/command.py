"""``watch``: options → releases on the index, the result of each series on them, the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions
from sparkforge.core.command import Entry, argument, option, repeated, switch
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.maintain.watch import releases
from sparkforge.series import series
from sparkforge.sources.project import Project, ProjectOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``watch``."""

    upstream: tuple[str, ...] = argument("upstreams to check (default: all)", default=(), nargs="*")
    pre: bool = switch("include pre-releases")
    known: tuple[str, ...] = repeated(
        "ignore this release and older ones; may be repeated", metavar="[UPSTREAM=]VERSION"
    )
    markdown: Path | None = option(
        "write the result to this file as issue text", type=Path, metavar="FILE"
    )
    project: ProjectOptions
    output: OutputOptions


def run(options: Options) -> int:
    """Look for newer releases, try the series on them and report; returns the exit code."""
    project = Project.open(options.project)
    page = options.markdown
    if page is not None and (page.is_dir() or not page.resolve().parent.is_dir()):
        raise UsageError(
            f"--markdown {page}: cannot write a file there", "give a file in an existing folder"
        )
    known = releases.Known.parse(project.pins, options.known)
    names = list(dict.fromkeys(options.upstream)) or list(project.pins.upstreams)
    listed = [releases.listed(project, name, known, pre=options.pre) for name in names]
    found = []
    for listing in listed:
        patches = series.read(project.series_folder(listing.upstream))
        if listing.news:
            with log.step(f"{listing.upstream} {listing.pinned} → {listing.newest}"):
                found.append(releases.look(project, patches, listing))
        else:
            found.append(releases.look(project, patches, listing))
    code = releases.verdict(found)
    if page is not None:
        with disk_errors(page):
            page.write_text(releases.markdown(found), encoding="utf-8")
    log.document({"watch": [result.as_json() for result in found], "exit_code": code})
    releases.show(found)
    return code


COMMANDS = (Entry("watch", Options, run),)
