"""Check the form of a patch: subject, reason, trailers, and its test."""

import re
from collections.abc import Iterator, Mapping, Sequence
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
        for problem in _lint(patch, root, rules)
    ]


def _lint(patch: Patch, root: Path, rules: Sequence[PathRule]) -> Iterator[str]:
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
    fitting = ((entry.path, rule_of(rules, entry.path)) for entry in patch.entries)
    build = [path for path, rule in fitting if rule is not None and rule.build]
    if build and NATIVE not in patch.trailers:
        which = "list the CMake targets that it affects, or none"
        yield f"trailer {NATIVE}: missing: it changes {build[0]}: {which}"
    if NATIVE in patch.trailers and not build:
        yield f"trailer {NATIVE}: it changes no build rules: remove the trailer"


_FORM = "CONDITION; WORDS, where CONDITION is an upstream's version (vllm>=0.33.0) or 'test'"


def drop_when(text: str) -> Requirement | str | None:
    """Return the version of an upstream that a trailer waits for, or ``test``; None: malformed.

    ``vllm>=0.33.0; upstream renders it so`` holds for those versions of an upstream of pins.yaml.
    ``test; upstream renders it so`` holds where the patch's test passes without the patch.
    """
    condition, _, words = (part.strip() for part in text.partition(";"))
    if condition == "test" and words:
        return condition
    try:
        wanted = Requirement(condition)
    except InvalidRequirement:
        return None
    return wanted if wanted.specifier else None


def holds(text: str, versions: Mapping[str, str]) -> bool:
    """Return whether the upstreams' versions, by upstream, are those that a trailer waits for."""
    wanted = drop_when(text)
    if not isinstance(wanted, Requirement):
        return False
    known = {canonicalize_name(name): version for name, version in versions.items()}
    version = known.get(canonicalize_name(wanted.name))
    return version is not None and wanted.specifier.contains(version, prereleases=True)
