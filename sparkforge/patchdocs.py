"""The page about all patches, written from their messages and trailers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sparkforge.patchfile import Patch
from sparkforge.pins import Upstream
from sparkforge.series import Series

COMMAND = "patches docs"
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


def _cell(text: str) -> str:
    """Return text that Markdown shows as it is in a table's cell."""
    parts = text.split("`")
    # inside of backticks nothing but | means something
    plain = [
        part if i % 2 and i < len(parts) - 1 else re.sub(r"([\\*_<>\[\]])", r"\\\1", part)
        for i, part in enumerate(parts)
    ]
    return "`".join(plain).replace("|", "\\|")


def _row(upstream: str, patch: Patch) -> str:
    trailer = patch.trailers
    cells = (
        f"[{_cell(patch.subject)}](../patches/{upstream}/{patch.name})", _cell(why(patch)),
        trailer.get("Risk", ""), _cell(trailer.get("Upstream-Status", "")),
        _cell(trailer.get("Drop-when", "")),
        f"`{trailer['Test']}`" if "Test" in trailer else "",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def page(series: Sequence[Series], upstreams: Mapping[str, Upstream]) -> str:
    """Return docs/patches.md: one table an upstream, the patches in the order of the series."""
    total = sum(len(one.patches) for one in series)
    out = [
        "# Every patch, and why",
        "",
        f"<!-- Written by build.py {COMMAND}; edit the patches, not this page. -->",
        "",
        f"What we change in the pinned upstreams: {total} patches, in the order in which they are"
        " applied.",
        "The whole reason, the cost and how it was checked stand in each patch's message; *Why* is",
        "its beginning. *Risk* says what a wrong patch could spoil: the build, which kernel is",
        "taken (dispatch), or the values that come out (numerics). *Test* fails without the patch:",
        "`python3 build.py ablate` shows it.",
        "",
    ]
    for one in series:
        upstream = upstreams[one.upstream]
        out += [f"## {one.upstream} {upstream.tag}", ""]
        if not one.patches:
            out += ["Unpatched.", ""]
            continue
        out += ["| " + " | ".join(_HEAD) + " |", "|" + " --- |" * len(_HEAD)]
        out += [*(_row(one.upstream, patch) for patch in one.patches), ""]
    return "\n".join(out).rstrip("\n") + "\n"
