"""The page about the patches, from their messages and trailers, and their sizes."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkforge.core import pages
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
