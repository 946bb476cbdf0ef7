"""``watch``: options → what the index lists, what would become of each series, the exit code."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.build.options import access_of, pins_path, store_of
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.maintain.watch import releases
from sparkforge.pins import pins
from sparkforge.series import series


def run(options: argparse.Namespace) -> int:
    """Look for newer releases, try the series on them, say so; returns the exit code."""
    path = pins_path(options)
    loaded = pins.load(path)
    page: Path | None = options.markdown
    if page is not None and (page.is_dir() or not page.resolve().parent.is_dir()):
        raise UsageError(
            f"--markdown {page}: cannot write a file there", "give a file in an existing folder"
        )
    known = releases.Known.parse(loaded, options.known)
    names = list(dict.fromkeys(options.upstream)) or list(loaded.upstreams)
    store, access = store_of(options), access_of(options, loaded)
    listed = releases.listed(loaded, access, names, known, pre=options.pre)
    found = []
    for one in listed:
        patches = series.read(path.parent / "patches" / one.upstream)
        if one.news:
            with log.step(f"{one.upstream} {one.pinned} → {one.newest}"):
                found.append(releases.look(store, loaded, access, patches, one))
        else:
            found.append(releases.look(store, loaded, access, patches, one))
    code = releases.verdict(found)
    if page is not None:
        with disk_errors(page):
            page.write_text(releases.markdown(found), encoding="utf-8")
    if options.json:
        log.json({"watch": [one.as_json() for one in found], "exit_code": code})
    releases.show(found)
    return code
