"""The page about the patches, from their messages and trailers, and their sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge.core import git, pages
from sparkforge.pins.pins import Upstream
from sparkforge.series.patchfile import Patch
from sparkforge.series.series import Series

_HEAD = ("Patch", "Why", "Risk", "Upstream", "Drop when", "Test")
_ENOUGH = 120
# neither v0.7.0 nor "e.g. this" ends a sentence
_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)(?<!cf)[.!?](?=\s|$)")


def why(patch: Patch) -> str:
    """Return the first sentences of a patch's message, on one line.

    One is enough, unless it is so short that it only prepares the next.
    """
    first = " ".join(patch.body.strip().partition("\n\n")[0].split())
    for end in _END.finditer(first):
        if end.end() >= _ENOUGH:
            return first[: end.end()]
    return first


def _row(upstream: str, patch: Patch) -> tuple[str, ...]:
    trailer = patch.trailers
    subject = f"[{pages.escape(patch.subject)}](../patches/{upstream}/{patch.name})"
    return (
        pages.Markdown(subject),
        why(patch),
        trailer.get("Risk", ""),
        trailer.get("Upstream-Status", ""),
        trailer.get("Drop-when", ""),
        f"`{trailer['Test']}`" if "Test" in trailer else "",
    )


def page(all_series: Sequence[Series], upstreams: Mapping[str, Upstream]) -> str:
    """Return docs/patches.md: a table for each upstream, the patches in the order of the series."""
    return pages.render(
        Path(__file__).with_name("patches.md.j2"),
        command=pages.COMMAND,
        total=sum(len(series.patches) for series in all_series),
        all_series=all_series,
        upstreams=upstreams,
        head=_HEAD,
        rows=lambda series: [_row(series.upstream, patch) for patch in series.patches],
    )


# -- numbers ---------------------------------------------------------------------

STATS_HEAD = ("patch", "risk", "files", "added", "removed")


@dataclass(frozen=True)
class Size:
    """Size of a patch: files, lines added and lines removed."""

    files: int
    added: int
    removed: int


def size(patch: Patch) -> Size:
    """Return the size of a patch, as git counts it."""
    folder = patch.path.parent.resolve()
    # inside a repository git would only count files below the folder
    env = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    listing = git.git(folder, "apply", "--numstat", str(patch.path.resolve()), env=env)
    lines = [line.split("\t") for line in listing.splitlines()]
    added, removed = (sum(int(line[i]) for line in lines) for i in (0, 1))
    return Size(len(lines), added, removed)


def stats_rows(all_series: Sequence[Series]) -> list[tuple[str, ...]]:
    """Return a row for each patch, and one for each upstream after its patches."""
    rows: list[tuple[str, ...]] = []
    for series in all_series:
        sizes = [size(patch) for patch in series.patches]
        for patch, its in zip(series.patches, sizes, strict=True):
            name = f"{series.upstream}: {patch.name.removesuffix('.patch')}"
            rows.append((name, patch.trailers.get("Risk", "?"), *_numbers(its)))
        total = Size(
            len({entry.path for patch in series.patches for entry in patch.entries}),
            sum(its.added for its in sizes),
            sum(its.removed for its in sizes),
        )
        rows.append((f"{series.upstream}, {len(sizes)} patches", "", *_numbers(total)))
    return rows


def stats_json(all_series: Sequence[Series]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the sizes as JSON values, by upstream and patch."""
    return {
        series.upstream: {patch.name: asdict(size(patch)) for patch in series.patches}
        for series in all_series
    }


def _numbers(its: Size) -> tuple[str, str, str]:
    return str(its.files), f"+{its.added}", f"-{its.removed}"
