"""Check the form of a patch: subject, reason, trailers, and its test."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import plain
from sparkforge.pins.types import PathRule, rule_of
from sparkforge.series.patchfile import NATIVE, Patch, slug
from sparkforge.series.series import Series

STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate")
RISKS = ("build", "dispatch", "numerics")
TRAILERS = ("Upstream-Status", "Drop-when", "Risk", "Test")
LONGEST = 72
"""Characters of a subject: what git log and forges show on one line."""
_NEEDS_REF = ("Submitted", "Backport", "Inappropriate")


def lint(series: Series, root: Path, rules: Sequence[PathRule] = ()) -> list[str]:
    """Return every problem of form; ``root`` has the tests, ``rules`` show changed build rules."""
    return [
        f"{patch.path}: {plain.escaped(problem)}"
        for patch in series.patches
        for problem in (*_lint(patch, root), *_lint_native(patch, rules))
    ]


def _lint_native(patch: Patch, rules: Sequence[PathRule]) -> list[str]:
    """Compare the trailer ``Native`` with the changed files of the patch."""
    fitting = [(entry.path, rule_of(rules, entry.path)) for entry in patch.entries]
    build = [path for path, rule in fitting if rule is not None and rule.build]
    named = patch.trailers.get(NATIVE)
    if named is None:
        which = "list the CMake targets that it affects, or none"
        return [f"trailer {NATIVE}: missing: it changes {path}: {which}" for path in build[:1]]
    if not build:
        return [f"trailer {NATIVE}: it changes no build rules: remove the trailer"]
    if not re.fullmatch(r"\w+(, \w+)*", named):
        return [f"trailer {NATIVE}: {named!r}: list CMake targets (A, B) or none"]
    return []


def _lint(patch: Patch, root: Path) -> list[str]:
    problems = []
    if (length := len(patch.subject)) > LONGEST:
        problems.append(f"subject has {length} characters: use at most {LONGEST}")
    if patch.name == ".patch":
        problems.append("subject has no letter or digit for a file name")
    if patch.name != slug(patch.subject):
        problems.append(f"file name does not follow the subject: rename to {slug(patch.subject)}")
    prose = patch.body.strip().rsplit("\n\n", 1)[0] if patch.trailers else patch.body
    if len(prose.split()) < 10:
        problems.append("body too short: say why it exists, what it costs and how it was checked")
    if not patch.entries:
        problems.append("changes no file")
    for key in TRAILERS:
        if not patch.trailers.get(key):
            problems.append(f"trailer {key}: missing: add it to the last paragraph")
    for key in patch.trailers:
        if key not in (*TRAILERS, NATIVE):
            problems.append(f"trailer {key}: unknown: use {', '.join((*TRAILERS, NATIVE))}")
    status, _, ref = patch.trailers.get("Upstream-Status", "Pending").partition(" ")
    if status not in STATUSES:
        problems.append(f"Upstream-Status: {status!r}: use {', '.join(STATUSES)}")
    elif status in _NEEDS_REF and not ref:
        problems.append(f"Upstream-Status: {status} needs a reference or a reason")
    if (risk := patch.trailers.get("Risk", RISKS[0])) not in RISKS:
        problems.append(f"Risk: {risk!r}: use {', '.join(RISKS)}")
    drop = patch.trailers.get("Drop-when")
    if drop and drop_when(drop) is None:
        problems.append(f"Drop-when: {drop[:60]!r}: write {_FORM}")
    if test := patch.trailers.get("Test"):
        file, _, function = test.partition("::")
        if wrong := plain.path_problem(file):
            problems.append(f"Test: {file[:60]!r} {wrong}: give a file of the checkout")
        elif not (root / file).is_file():
            problems.append(f"Test: {file} does not exist")
        elif not function:
            problems.append("Test: add the test function: FILE::FUNCTION")
        elif f"def {function.split('::')[-1].split('[')[0]}(" not in (
            (root / file).read_text(encoding="utf-8", errors="replace")
        ):
            problems.append(f"Test: {file} has no {function}")
    return problems


# -- Drop-when ---------------------------------------------------------------------------

_FORM = "CONDITION; WORDS, where CONDITION is an upstream's version (vllm>=0.33.0) or 'test'"


@dataclass(frozen=True)
class DropWhen:
    """The trailer ``Drop-when``: a condition that a move to another release evaluates.

    ``vllm>=0.33.0; upstream renders it so`` holds for those versions of an upstream of pins.yaml.
    ``test; upstream renders it so`` holds where the patch's test passes without the patch.
    """

    wanted: Requirement | None

    def holds(self, versions: Mapping[str, str]) -> bool:
        """Return whether the upstreams' versions, by upstream, meet the condition."""
        if self.wanted is None:
            return False
        known = {canonicalize_name(name): version for name, version in versions.items()}
        version = known.get(canonicalize_name(self.wanted.name))
        return version is not None and self.wanted.specifier.contains(version, prereleases=True)


def drop_when(text: str) -> DropWhen | None:
    """Return what a trailer says; None where it has not the form."""
    condition, _, words = (part.strip() for part in text.partition(";"))
    if condition == "test":
        return DropWhen(None) if words else None
    try:
        wanted = Requirement(condition)
    except InvalidRequirement:
        return None
    if not wanted.specifier or wanted.extras or wanted.url:
        return None
    return DropWhen(wanted)
