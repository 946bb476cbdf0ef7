"""Check the form of a patch: subject, reason, trailers, and its test."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import plain
from sparkforge.pins.types import PathRule, rule_of
from sparkforge.series.patchfile import NATIVE, Patch, slug
from sparkforge.series.series import Series

TRAILERS = ("Upstream-Status", "Drop-when", "Risk", "Test")
_LONGEST = 72  # characters of a subject: what git log and forges show on one line
_FORMS = {
    "Upstream-Status": r"Pending( .+)?|(Submitted|Backport|Inappropriate) .+",
    "Risk": "build|dispatch|numerics",
    "Test": r"[^:]+::\w.*",
    NATIVE: r"\w+(, \w+)*",
}
"""Of trailers' values, which must match completely."""


def lint(series: Series, root: Path, rules: Sequence[PathRule] = ()) -> list[str]:
    """Return every problem of form; ``root`` has the tests, ``rules`` show changed build rules."""
    return [
        f"{patch.path}: {plain.escaped(problem)}"
        for patch in series.patches
        for problem in (*_lint(patch, root), *_lint_native(patch, rules))
    ]


def _lint_native(patch: Patch, rules: Sequence[PathRule]) -> Iterator[str]:
    """Compare the trailer ``Native`` with the changed files of the patch."""
    fitting = [(entry.path, rule_of(rules, entry.path)) for entry in patch.entries]
    build = [path for path, rule in fitting if rule is not None and rule.build]
    if build and NATIVE not in patch.trailers:
        which = "list the CMake targets that it affects, or none"
        yield f"trailer {NATIVE}: missing: it changes {build[0]}: {which}"
    if NATIVE in patch.trailers and not build:
        yield f"trailer {NATIVE}: it changes no build rules: remove the trailer"


def _lint(patch: Patch, root: Path) -> Iterator[str]:
    prose = patch.body.strip().rsplit("\n\n", 1)[0] if patch.trailers else patch.body
    if (length := len(patch.subject)) > _LONGEST:
        yield f"subject has {length} characters: use at most {_LONGEST}"
    if patch.name != slug(patch.subject) or patch.name == ".patch":
        yield f"file name does not follow the subject: rename to {slug(patch.subject)}"
    if len(prose.split()) < 10:
        yield "body too short: say why it exists, what it costs and how it was checked"
    for key in TRAILERS:
        if not patch.trailers.get(key):
            yield f"trailer {key}: missing: add it to the last paragraph"
    for key, value in patch.trailers.items():
        if key not in (*TRAILERS, NATIVE):
            yield f"trailer {key}: unknown: use {', '.join((*TRAILERS, NATIVE))}"
        elif value and not re.fullmatch(_FORMS.get(key, ".*"), value):
            yield f"{key}: {value[:60]!r}: write it as {_FORMS[key]}"
    drop = patch.trailers.get("Drop-when")
    if drop and drop_when(drop) is None:
        yield f"Drop-when: {drop[:60]!r}: write {_FORM}"
    file, _, function = patch.trailers.get("Test", "").partition("::")
    if function:
        defined = f"def {function.split('::')[-1].split('[')[0]}("
        if plain.path_problem(file) or not (root / file).is_file():
            yield f"Test: {file[:60]} does not exist"
        elif defined not in (root / file).read_text(encoding="utf-8", errors="replace"):
            yield f"Test: {file[:60]} has no {function[:60]}"


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
