"""The verdicts on patches that move to another release."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from sparkforge.maintain.rebase.tree import Tree

_SAME = re.compile(r"1: +[0-9a-f]+ = 1: ")
_OWN = re.compile(r"^    [+-][+-]", re.MULTILINE)


class Verdict(Enum):
    """The verdict on a patch; each patch gets exactly one."""

    CLEAN = "clean"
    """The same diff; at most line numbers and blob ids differ."""
    CONTEXT_ONLY = "context-only"
    """Its own lines are the same; the lines around them differ."""
    CHANGED = "changed"
    """Merged without a person (or as one resolved it before), but its own lines differ."""
    UPSTREAMED = "upstreamed"
    """Merging leaves nothing of it: the new release has all of it. It leaves the series."""
    CONFLICT = "conflict"
    """Upstream changed the same lines: a person must merge them."""
    TARGET_RENAMED = "target-renamed"
    """A file that it changes has another name now."""
    TARGET_DELETED = "target-deleted"
    """A file that it changes is gone."""


@dataclass(frozen=True)
class PatchResult:
    """The result of one patch."""

    patch: str
    verdict: Verdict
    stops: bool = False
    """A person must resolve it (or skip it)."""
    detail: tuple[str, ...] = ()
    """Findings for people, as lines."""
    causes: tuple[str, ...] = ()
    """Upstream's commits that may have done it, if the history is available."""
    remembered: bool = False
    """Resolved as a person did before."""
    commit: str | None = None
    """The moved commit; None where there is none (stopped, dropped, skipped)."""
    reason: str | None = None
    """Reason why a person left it out."""
    vanished: tuple[str, ...] = ()
    """Names that it uses and the new release lacks."""

    @property
    def next(self) -> str:
        """The next step, in one line."""
        if self.reason is not None:
            return f"dropped: {self.reason}"
        if self.verdict is Verdict.UPSTREAMED:
            return "nothing: it leaves the series"
        if self.vanished:
            return f"check what replaced {', '.join(self.vanished)}, then run its test"
        if not self.stops:
            read = self.verdict in (Verdict.CHANGED, Verdict.CONFLICT, Verdict.TARGET_DELETED)
            return "read the new diff, run its test" if read else "run its test"
        where = {
            Verdict.TARGET_DELETED: "find the file that replaced it and change that",
            Verdict.TARGET_RENAMED: "apply the change under the new name",
        }.get(self.verdict, "merge both sides in the work tree")
        return f"{where}, or --skip REASON"

    def row(self) -> tuple[str, str, str]:
        """Return it as a row of a table."""
        remembered = " (remembered)" if self.remembered else ""
        mark = "! " if self.stops else ""
        name = self.patch.removesuffix(".patch")
        return name, f"{mark}{self.verdict.value}{remembered}", self.next

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return asdict(self) | {"verdict": self.verdict.value, "next": self.next}


HEAD = ("patch", "verdict", "what next")


def compare(tree: Tree, old: str, new: str) -> Verdict:
    """Compare the commits of one patch by git's range-diff: CLEAN, CONTEXT_ONLY or CHANGED."""
    how = ("--no-color", "--no-dual-color", "--creation-factor=999")  # they are a pair
    head, _, body = tree.git("range-diff", *how, f"{old}^!", f"{new}^!").partition("\n")
    if _SAME.match(head):
        return Verdict.CLEAN
    return Verdict.CHANGED if _OWN.search(body) else Verdict.CONTEXT_ONLY
