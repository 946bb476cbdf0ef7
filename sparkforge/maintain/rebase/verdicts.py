"""The verdicts on patches that move to another tree."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from sparkforge.maintain.rebase.diffs import own_lines

_INDEX = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+", re.MULTILINE)


class Verdict(Enum):
    """The verdict on a patch; each patch gets exactly one."""

    CLEAN = "clean"
    """The same diff, line numbers and context included; at most the blob ids differ."""
    CONTEXT_ONLY = "context-only"
    """Its own lines are the same; their place, or the lines around them, differ."""
    CHANGED = "changed"
    """Merged without a person (or as one resolved it before), but its own lines differ."""
    UPSTREAMED = "upstreamed"
    """All of it is in the new tree, at its place: a merge leaves nothing of it, and it can be taken
    away there or a commit of upstream's made the same change. It leaves the series."""
    CONFLICT = "conflict"
    """Upstream changed the same lines: a person must merge them."""
    TARGET_RENAMED = "target-renamed"
    """A file that it changes has another name now."""
    TARGET_DELETED = "target-deleted"
    """A file that it changes is gone."""
    EMPTY = "empty"
    """Merging left nothing of it: the new tree has each change already, among others. It leaves
    the series."""


@dataclass(frozen=True)
class PatchResult:
    """The result of one patch."""

    patch: str
    verdict: Verdict
    stops: bool = False
    """A person must resolve it (or skip it)."""
    detail: tuple[str, ...] = ()
    """Findings for people, as lines."""
    files: tuple[str, ...] = ()
    """The files in conflict, or those renamed or deleted."""
    causes: tuple[str, ...] = ()
    """Upstream's commits that did it, ``SHA subject``, if the history is available."""
    after: tuple[str, ...] = ()
    """Earlier patches, left out here, that touch the same files and may be the cause."""
    remembered: bool = False
    """Resolved as a person did before."""
    commit: str | None = None
    """The moved commit; None where there is none (stopped, dropped, skipped)."""
    reason: str | None = None
    """Reason why a person left it out."""
    exact: bool = True
    """Of an upstreamed one: nothing of it was changed since."""
    vanished: tuple[str, ...] = ()
    """Names that it uses and the new release lacks."""

    @property
    def next(self) -> str:
        """The next step, in one line."""
        if self.reason is not None:
            return f"dropped: {self.reason}"
        if self.after and self.stops:
            names = ", ".join(name.removesuffix(".patch") for name in self.after)
            return f"resolve {names} first: this may follow from it"
        if self.verdict is Verdict.TARGET_DELETED and self.stops:
            return "find the file that replaced it and change that, or --skip REASON"
        if self.verdict is Verdict.TARGET_RENAMED and self.stops:
            return "apply the change under the new name, or --skip REASON"
        if self.stops:
            return "merge both sides in the work tree, or --skip REASON"
        if self.vanished:
            return f"check what replaced {', '.join(self.vanished)}, then run its test"
        if not self.exact:
            return "run its test on the new release: it leaves the series"
        return {
            Verdict.CLEAN: "run its test",
            Verdict.CONTEXT_ONLY: "run its test",
            Verdict.CHANGED: "read the new diff, run its test",
            Verdict.CONFLICT: "read the new diff, run its test",
            Verdict.TARGET_DELETED: "read the new diff, run its test",
            Verdict.UPSTREAMED: "nothing: it leaves the series",
            Verdict.EMPTY: "run its test on the new release: it leaves the series",
            Verdict.TARGET_RENAMED: "nothing to merge: check that the new file is used as before",
        }[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        values = asdict(self)
        values["culprits"] = values.pop("causes")
        return values | {"verdict": self.verdict.value, "next": self.next}


def compare(old: bytes, new: bytes) -> Verdict:
    """Compare two diffs of one patch: CLEAN, CONTEXT_ONLY or CHANGED."""
    if _INDEX.sub(b"", old) == _INDEX.sub(b"", new):
        return Verdict.CLEAN
    if own_lines(old) == own_lines(new):
        return Verdict.CONTEXT_ONLY
    return Verdict.CHANGED
