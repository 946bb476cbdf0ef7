"""The trailer ``Drop-when``: a condition that a move to another release evaluates, and words.

``vllm>=0.33.0; upstream renders it so`` holds for those versions of an upstream of pins.yaml.
``test; upstream renders it so`` holds where the patch's test passes without the patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

TEST = "test"
FORM = "CONDITION; WORDS, where CONDITION is an upstream's version (vllm>=0.33.0) or 'test'"


@dataclass(frozen=True)
class DropWhen:
    """A trailer, read."""

    wanted: Requirement | None
    """The versions of an upstream; None: the patch's test decides."""
    words: str
    """What upstream changes, for people."""

    def holds(self, versions: Mapping[str, str]) -> bool:
        """Return whether the upstreams' versions, by upstream, meet the condition."""
        if self.wanted is None:
            return False
        known = {canonicalize_name(name): version for name, version in versions.items()}
        version = known.get(canonicalize_name(self.wanted.name))
        return version is not None and self.wanted.specifier.contains(version, prereleases=True)


def parse(text: str) -> DropWhen | None:
    """Return what a trailer says; None where it has not the form."""
    condition, _, words = (part.strip() for part in text.partition(";"))
    if condition == TEST:
        return DropWhen(None, words) if words else None
    try:
        wanted = Requirement(condition)
    except InvalidRequirement:
        return None
    if not wanted.specifier or wanted.extras or wanted.url:
        return None
    return DropWhen(wanted, words)
