"""The requirements of a new vLLM release, compared with pins.yaml.

Its wheels declare a torch, a FlashInfer and more; its CMake names the sources that a compile
fetches and the triton_kernels that its wheels carry. All of this is read, not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import gitread
from sparkforge.maintain.rebase import requirements
from sparkforge.pins.pins import Pins, Upstream
from sparkforge.pins.types import Platform
from sparkforge.pins.yamlfile import Where
from sparkforge.series import dropwhen
from sparkforge.series.series import Series
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source

_SET = re.compile(r"""^\s*set\s*\(\s*(\w+)\s+["']?([^"'\s)]+)["']?""", re.MULTILINE | re.IGNORECASE)
_DECLARE = re.compile(r"FetchContent_(?:Declare|Populate)\s*\(([^)]*)\)", re.IGNORECASE)
_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class DependencyDrift:
    """One thing that no longer agrees."""

    what: str
    """Its name, and the pinned and the wanted version."""
    hint: str
    """The edit that makes it agree."""
    values: Mapping[Where, str] = field(default_factory=dict)
    """Values that the rebase itself writes into pins.yaml when it lands, by path."""

    def as_json(self) -> dict[str, object]:
        """Return it as ``--json`` prints it."""
        return {"what": self.what, "mend": self.hint, "rewritten": bool(self.values)}


def find(project: Project, release: Upstream, source: Source, old: Source) -> list[DependencyDrift]:
    """Return the requirements of a new release that pins.yaml and the locks do not meet.

    Args:
        release: the upstream as it will be pinned.
        source: its new tree.
        old: its pinned tree; a difference that it already has is not reported.
    """
    name = source.upstream
    drifts = list(_externals(project.pins, name, source, old))
    drifts += _asked_for(project.pins, project.root, name, release)
    drifts += _required(project, release, name)
    drifts += _images(project.pins, name, source)
    return drifts


def unknown(
    name: str, release: Upstream, declared_commit: str | None, lacking: Iterable[str]
) -> list[DependencyDrift]:
    """Return the unknown parts of a release: its commit, and files that the index lacks.

    Args:
        declared_commit: the commit that the release names, maybe abbreviated.
        lacking: names of files for which those of the old release stay.
    """
    drifts = []
    if release.commit is None:
        says = f"; the release says {declared_commit}" if declared_commit else ""
        drifts.append(
            DependencyDrift(
                f"upstreams.{name}: commit: unknown: no repository is reachable for"
                f" {release.tag}{says}",
                f"with git access: build.py pins resolve {name}; or --commit SHA; until then"
                " sources come from the release file",
            )
        )
    for key in lacking:
        file = release.files[key]
        drifts.append(
            DependencyDrift(
                f"files.{key}: the index has no {file.project} {release.version};"
                f" {file.file} stays",
                f"add it to upstreams.{name}.files.{key} when it is published; until then targets"
                " that need it cannot be built",
            )
        )
    return drifts


def droppable(every: Iterable[Series], versions: Mapping[str, str]) -> list[DependencyDrift]:
    """Return the patches whose Drop-when holds for these versions of upstreams."""
    found = []
    for series in every:
        for patch in series.patches:
            text = patch.trailers["Drop-when"]
            condition = dropwhen.parse(text)
            if condition is not None and condition.holds(versions):
                found.append(
                    DependencyDrift(
                        f"{series.upstream}: {patch.name.removesuffix('.patch')}: its Drop-when"
                        f" holds: {text}",
                        f"build.py patches apply {series.upstream} DIR, drop the commit, then"
                        f" patches export DIR --drop {patch.name}",
                    )
                )
    return found


# -- requirements ----------------------------------------------------------------------


def exact(text: str) -> dict[str, str]:
    """Return the versions that a requirements text pins with ==, by distribution."""
    versions: dict[str, str] = {}
    for line in text.splitlines():
        try:
            requirement = Requirement(re.split(r"\s#|\s--hash|\\$", line.strip())[0].strip())
        except InvalidRequirement:
            continue  # a comment, an option, an empty line
        specifiers = [
            specifier for specifier in requirement.specifier if specifier.operator == "=="
        ]
        if specifiers and not specifiers[0].version.endswith("*"):
            versions[canonicalize_name(requirement.name)] = specifiers[0].version
    return versions


def _asked_for(pins: Pins, root: Path, name: str, release: Upstream) -> Iterator[DependencyDrift]:
    """Find our own lists of requirements that still ask for the old release."""
    projects = {file.project for file in pins.upstreams[name].files.values()}
    for path in sorted((root / "requirements").glob("*.in")):
        asked = exact(path.read_text(encoding="utf-8"))
        for project in sorted(projects & asked.keys()):
            if asked[project] != release.version:
                yield DependencyDrift(
                    f"requirements/{path.name} requires {project} {asked[project]}",
                    f"write {project}=={release.version} there and run scripts/lock.sh; the wheel"
                    " that declares the old one: rebase its upstream, or list it in drop_requires",
                )


def _required(project: Project, release: Upstream, name: str) -> Iterator[DependencyDrift]:
    """Compare the requirements of the new wheels with each target's locks and our wheels."""
    pins, outdated = project.pins, set()
    for target, plan in pins.targets.items():
        if name not in plan.wheels:
            continue
        wheel = plan.wheels[name]
        own_wheels = {
            canonicalize_name(pins.upstreams[up].files[requirement.files[platform]].project): (
                up,
                pins.upstreams[up].version,
            )
            for up, requirement in plan.wheels.items()
            if up != name
            for platform in plan.platforms
        }
        for platform in plan.platforms:
            file = release.files[wheel.files[platform]]
            if file == pins.upstreams[name].files[wheel.files[platform]]:
                continue  # the index lacks the new release's file: reported elsewhere
            declared = requirements.declared(project.store, file, project.access)
            if declared is None:
                yield DependencyDrift(
                    f"target {target}: cannot read the requirements of {file.file} from here",
                    "compare its METADATA with the lock before a build",
                )
                continue
            required = requirements.applying(declared, plan.python, platform)
            for requirement in required:
                up, version = own_wheels.get(canonicalize_name(requirement.name), (None, ""))
                if (
                    up is None
                    or requirement.specifier.contains(version, prereleases=True)
                    or up in outdated
                ):
                    continue
                outdated.add(up)
                to = next(
                    (s.version for s in requirement.specifier if s.operator == "=="), "VERSION"
                )
                yield DependencyDrift(
                    f"{requirement.name}: {name} wants {requirement.specifier},"
                    f" upstreams.{up} is {version}",
                    f"build.py rebase {up} --onto release:{to}",
                )
            without = frozenset({*own_wheels, *map(canonicalize_name, wheel.drop_requires)})
            yield from _stale(project, target, platform, required, without)


def _stale(
    project: Project,
    target: str,
    platform: Platform,
    required: list[Requirement],
    without: frozenset[str],
) -> Iterator[DependencyDrift]:
    """Compare requirements with a target's lock."""
    plan = project.pins.targets[target]
    lock = plan.requirements[platform]
    path = project.root / lock
    locked = exact(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stale = requirements.disagreeing(required, locked, without)
    if not stale:
        return
    if "triton" in plan.wheels and any(entry.startswith("torch ") for entry in stale):
        yield DependencyDrift(
            f"target {target}: another torch may require another Triton than"
            f" {project.pins.upstreams['triton'].version}",
            "check what it declares; if it differs: build.py rebase triton --onto release:VERSION",
        )
    yield DependencyDrift(
        f"target {target}: {lock} has {', '.join(stale)}",
        f"change them in the .in file in requirements/ and run scripts/lock.sh {Path(lock).name}",
    )


def _images(pins: Pins, name: str, source: Source) -> Iterator[DependencyDrift]:
    old = pins.upstreams[name].tag
    for key, image in pins.images.items():
        if image.tag == old and name in image.repository:
            yield DependencyDrift(
                f"images.{key} is tag {old}",
                f"pin the new release's image by digest, or remove images.{key}",
            )


# -- sources of CMake ----------------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """One source that a CMake file fetches."""

    repository: str
    tag: str
    file: str


def fetched(source: Source) -> list[Fetched]:
    """Return the git sources of a tree's CMake files, with the variables set there replaced."""
    with gitread.reading(source.repo) as reader:
        folder = reader.files(source.commit, "cmake")
        paths = ["CMakeLists.txt", *(f"cmake/{file.path}" for file in folder)]
        contents = {
            path: (reader.content(source.commit, path) or b"").decode(errors="replace")
            for path in paths
            if path.endswith((".cmake", "CMakeLists.txt"))
        }
    sources = []
    for path, content in contents.items():
        text = re.sub(r"^\s*#.*$", "", content, flags=re.MULTILINE)
        settings: dict[str, list[str]] = {}
        for variable, value in _SET.findall(text):
            settings.setdefault(variable, []).append(value)
        for call in _DECLARE.findall(text):
            words = dict(re.findall(r"(GIT_REPOSITORY|GIT_TAG)\s+\"?([^\s\"]+)", call))
            if len(words) == 2:
                sources += _expanded(words["GIT_REPOSITORY"], words["GIT_TAG"], settings, path)
    return sources


def _expanded(
    repository: str, tag: str, settings: Mapping[str, list[str]], path: str
) -> list[Fetched]:
    """Put in the variables; where both are set in several branches, they go in pairs."""

    def values(word: str) -> list[str]:
        variable = re.fullmatch(r"\$\{(\w+)\}", word)
        return settings.get(variable[1], []) if variable else [word]

    repositories, tags = values(repository), values(tag)
    if len(repositories) != len(tags):
        repositories = repositories[:1] * len(tags)
    return [
        Fetched(url, revision, path)
        for url, revision in zip(repositories, tags, strict=False)
        if "$" not in url + revision
    ]


def _same(left: str, right: str) -> bool:
    def plain(url: str) -> str:
        return url.lower().removesuffix("/").removesuffix(".git")

    return plain(left) == plain(right)


def _externals(pins: Pins, name: str, source: Source, before: Source) -> Iterator[DependencyDrift]:
    fetches = fetched(source)
    for key, external in pins.upstreams[name].externals.items():
        matches = [fetch for fetch in fetches if _same(fetch.repository, external.git)]
        if not matches and fetches:
            yield DependencyDrift(
                f"externals.{key}: the new tree no longer fetches {external.git}",
                f"remove upstreams.{name}.externals.{key} from pins.yaml",
            )
        for fetch in matches[:1]:
            at = ("upstreams", name, "externals", key)
            if fetch.tag in (external.commit, external.tag):
                continue
            if _SHA.fullmatch(fetch.tag) and external.tag is None:
                yield DependencyDrift(
                    f"externals.{key}: {external.commit[:12]} → {fetch.tag[:12]} ({fetch.file})",
                    "nothing: rewritten at the end of the rebase",
                    {(*at, "commit"): fetch.tag},
                )
            else:
                yield DependencyDrift(
                    f"externals.{key}: {external.tag or external.commit[:12]} → {fetch.tag}"
                    f" ({fetch.file})",
                    f"write tag {fetch.tag} and its commit"
                    f" (git ls-remote {external.git} {fetch.tag})"
                    f" into upstreams.{name}.externals.{key}",
                )
    for bundled, upstream in pins.upstreams.items():
        if upstream.source_in != name:
            continue
        matches = [fetch for fetch in fetches if _same(fetch.repository, upstream.git)]
        for fetch in matches:
            if fetch.tag not in (upstream.tag, upstream.commit):
                yield DependencyDrift(
                    f"{bundled}: the new tree contains {fetch.tag}, but {upstream.tag} is pinned"
                    f" ({fetch.file})",
                    f"write tag, version and commit of {fetch.tag} into upstreams.{bundled}",
                )
    known = [external.git for external in pins.upstreams[name].externals.values()]
    known += [upstream.git for upstream in pins.upstreams.values()]
    known += [fetch.repository for fetch in fetched(before)]
    for fetch in fetches:
        if not any(_same(fetch.repository, url) for url in known):
            yield DependencyDrift(
                f"{fetch.repository}: the new tree fetches it ({fetch.tag[:12]}, {fetch.file});"
                " the old one did not",
                f"add it to upstreams.{name}.externals, if our compile needs it",
            )
