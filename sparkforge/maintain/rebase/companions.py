"""What a new vLLM release brings beside its own sources, compared with pins.yaml.

Its wheels declare a torch, a FlashInfer and more; its CMake names the sources that a compile
fetches and the triton_kernels that its wheels carry. All of it is read, not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import gitread
from sparkforge.maintain.rebase import requirements
from sparkforge.pins.pins import Pins, Upstream
from sparkforge.pins.types import Platform
from sparkforge.pins.yamlfile import Where
from sparkforge.sources.sources import Access, Source
from sparkforge.store.store import Store

_SET = re.compile(r"""^\s*set\s*\(\s*(\w+)\s+["']?([^"'\s)]+)["']?""", re.MULTILINE | re.IGNORECASE)
_DECLARE = re.compile(r"FetchContent_(?:Declare|Populate)\s*\(([^)]*)\)", re.IGNORECASE)
_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Companion:
    """One thing that no longer agrees.

    Attributes:
        what: what, and how it is pinned and wanted.
        mend: the edit that makes it agree.
        values: what the rebase itself writes into pins.yaml when it lands, by path.
    """

    what: str
    mend: str
    values: Mapping[Where, str]

    def as_json(self) -> dict[str, object]:
        """Return what ``--json`` prints of it."""
        return {"what": self.what, "mend": self.mend, "rewritten": bool(self.values)}


@dataclass(frozen=True)
class Place:
    """The checkout that a new release is compared with.

    Attributes:
        root: the checkout, where the lock files are.
    """

    pins: Pins
    root: Path
    store: Store
    access: Access


def disagreements(place: Place, goal: Upstream, source: Source, old: Source) -> list[Companion]:
    """Return what an upstream's new release wants otherwise than pins.yaml and the locks have it.

    Args:
        goal: the upstream as it will be pinned.
        source: its new tree.
        old: its pinned tree; what that does not pin either is no news.
    """
    name = source.upstream
    found = list(_externals(place.pins, name, source, old))
    found += _asked_for(place.pins, place.root, name, goal)
    found += _required(place, goal, name)
    found += _images(place.pins, name, source)
    return found


def unknown(
    name: str, goal: Upstream, stated: str | None, lacking: Iterable[str]
) -> list[Companion]:
    """Return what nobody knows of a release: its commit, and files that the index lacks.

    Args:
        stated: what the release says its commit is, maybe abbreviated.
        lacking: names among the goal's files of which the old release's stay.
    """
    found = []
    if goal.commit is None:
        says = f"; the release says {stated}" if stated else ""
        found.append(
            Companion(
                f"upstreams.{name}: commit: unknown: no repository is reachable for"
                f" {goal.tag}{says}",
                f"with git access: build.py pins resolve {name}; or --commit SHA; until then"
                " sources come from the release file",
                {},
            )
        )
    for key in lacking:
        file = goal.files[key]
        found.append(
            Companion(
                f"files.{key}: the index has no {file.project} {goal.version}; {file.file} stays",
                f"add it to upstreams.{name}.files.{key} when it is published; until then targets"
                " that need it cannot be built",
                {},
            )
        )
    return found


# -- requirements ----------------------------------------------------------------------


def exact(text: str) -> dict[str, str]:
    """Return the versions that a requirements text pins with ==, by distribution."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        try:
            requirement = Requirement(re.split(r"\s#|\s--hash|\\$", line.strip())[0].strip())
        except InvalidRequirement:
            continue  # a comment, an option, an empty line
        specifiers = [one for one in requirement.specifier if one.operator == "=="]
        if specifiers and not specifiers[0].version.endswith("*"):
            found[canonicalize_name(requirement.name)] = specifiers[0].version
    return found


def _asked_for(pins: Pins, root: Path, name: str, goal: Upstream) -> Iterator[Companion]:
    """Find our own lists of requirements that still ask for the old release."""
    projects = {file.project for file in pins.upstreams[name].files.values()}
    for path in sorted((root / "requirements").glob("*.in")):
        asked = exact(path.read_text(encoding="utf-8"))
        for project in sorted(projects & asked.keys()):
            if asked[project] != goal.version:
                yield Companion(
                    f"requirements/{path.name} requires {project} {asked[project]}",
                    f"write {project}=={goal.version} there and run scripts/lock.sh; the wheel that"
                    " declares the old one: rebase its upstream, or list it in drop_requires",
                    {},
                )


def _required(place: Place, goal: Upstream, name: str) -> Iterator[Companion]:
    """Hold what the new release's wheels declare against each target's locks and our wheels."""
    pins, outdated = place.pins, set()
    for target, plan in pins.targets.items():
        if name not in plan.wheels:
            continue
        wheel = plan.wheels[name]
        ours = {
            canonicalize_name(pins.upstreams[up].files[one.files[platform]].project): (
                up,
                pins.upstreams[up].version,
            )
            for up, one in plan.wheels.items()
            if up != name
            for platform in plan.platforms
        }
        for platform in plan.platforms:
            file = goal.files[wheel.files[platform]]
            if file == pins.upstreams[name].files[wheel.files[platform]]:
                continue  # the index lacks the new release's: said elsewhere
            declared = requirements.declared(place.store, file, place.access)
            if declared is None:
                yield Companion(
                    f"target {target}: cannot read the requirements of {file.file} from here",
                    "compare its METADATA with the lock before a build",
                    {},
                )
                continue
            wanted = requirements.applying(declared, requirements.Installed(plan.python, platform))
            for one in wanted:
                up, version = ours.get(canonicalize_name(one.name), (None, ""))
                if (
                    up is None
                    or one.specifier.contains(version, prereleases=True)
                    or up in outdated
                ):
                    continue
                outdated.add(up)
                to = next((s.version for s in one.specifier if s.operator == "=="), "VERSION")
                yield Companion(
                    f"{one.name}: {name} wants {one.specifier}, upstreams.{up} is {version}",
                    f"build.py rebase {up} --onto release:{to}",
                    {},
                )
            yield from _stale(
                place,
                target,
                platform,
                wanted,
                frozenset(
                    {
                        *ours,
                        *map(canonicalize_name, wheel.drop_requires),
                    }
                ),
            )


def _stale(
    place: Place,
    target: str,
    platform: Platform,
    wanted: list[Requirement],
    without: frozenset[str],
) -> Iterator[Companion]:
    """Hold requirements against a target's lock."""
    plan = place.pins.targets[target]
    lock = plan.requirements[platform]
    path = place.root / lock
    locked = exact(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stale = requirements.disagreeing(wanted, locked, without)
    if not stale:
        return
    if "triton" in plan.wheels and any(one.startswith("torch ") for one in stale):
        yield Companion(
            f"target {target}: another torch may require another Triton than"
            f" {place.pins.upstreams['triton'].version}",
            "check what it declares; if it differs: build.py rebase triton --onto release:VERSION",
            {},
        )
    yield Companion(
        f"target {target}: {lock} has {', '.join(stale)}",
        f"change them in the .in file in requirements/ and run scripts/lock.sh {Path(lock).name}",
        {},
    )


def _images(pins: Pins, name: str, source: Source) -> Iterator[Companion]:
    old = pins.upstreams[name].tag
    for key, image in pins.images.items():
        if image.tag == old and name in image.repository:
            yield Companion(
                f"images.{key} is tag {old}",
                f"pin the new release's image by digest, or remove images.{key}",
                {},
            )


# -- what CMake fetches --------------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """One source that a CMake file fetches."""

    repository: str
    tag: str
    file: str


def fetched(source: Source) -> list[Fetched]:
    """Return what the CMake files of a tree fetch by git, variables replaced where set beside."""
    with gitread.reading(source.repo) as reader:
        folder = reader.files(source.commit, "cmake")
        paths = ["CMakeLists.txt", *(f"cmake/{file.path}" for file in folder)]
        contents = {
            path: (reader.content(source.commit, path) or b"").decode(errors="replace")
            for path in paths
            if path.endswith((".cmake", "CMakeLists.txt"))
        }
    found = []
    for path, content in contents.items():
        text = re.sub(r"^\s*#.*$", "", content, flags=re.MULTILINE)
        settings: dict[str, list[str]] = {}
        for variable, value in _SET.findall(text):
            settings.setdefault(variable, []).append(value)
        for call in _DECLARE.findall(text):
            words = dict(re.findall(r"(GIT_REPOSITORY|GIT_TAG)\s+\"?([^\s\"]+)", call))
            if len(words) == 2:
                found += _expanded(words["GIT_REPOSITORY"], words["GIT_TAG"], settings, path)
    return found


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
        Fetched(one, two, path)
        for one, two in zip(repositories, tags, strict=False)
        if "$" not in one + two
    ]


def _same(one: str, two: str) -> bool:
    def plain(url: str) -> str:
        return url.lower().removesuffix("/").removesuffix(".git")

    return plain(one) == plain(two)


def _externals(pins: Pins, name: str, source: Source, before: Source) -> Iterator[Companion]:
    wanted = fetched(source)
    for key, external in pins.upstreams[name].externals.items():
        here = [one for one in wanted if _same(one.repository, external.git)]
        if not here and wanted:
            yield Companion(
                f"externals.{key}: the new tree no longer fetches {external.git}",
                f"remove upstreams.{name}.externals.{key} from pins.yaml",
                {},
            )
        for one in here[:1]:
            at = ("upstreams", name, "externals", key)
            if one.tag in (external.commit, external.tag):
                continue
            if _SHA.fullmatch(one.tag) and external.tag is None:
                yield Companion(
                    f"externals.{key}: {external.commit[:12]} → {one.tag[:12]} ({one.file})",
                    "nothing: rewritten at the end of the rebase",
                    {(*at, "commit"): one.tag},
                )
            else:
                yield Companion(
                    f"externals.{key}: {external.tag or external.commit[:12]} → {one.tag}"
                    f" ({one.file})",
                    f"write tag {one.tag} and its commit (git ls-remote {external.git} {one.tag})"
                    f" into upstreams.{name}.externals.{key}",
                    {},
                )
    for rider, upstream in pins.upstreams.items():
        if upstream.source_in != name:
            continue
        here = [one for one in wanted if _same(one.repository, upstream.git)]
        for one in here:
            if one.tag not in (upstream.tag, upstream.commit):
                yield Companion(
                    f"{rider}: the new tree contains {one.tag}, but {upstream.tag} is pinned"
                    f" ({one.file})",
                    f"write tag, version and commit of {one.tag} into upstreams.{rider}",
                    {},
                )
    known = [external.git for external in pins.upstreams[name].externals.values()]
    known += [upstream.git for upstream in pins.upstreams.values()]
    known += [one.repository for one in fetched(before)]
    for one in wanted:
        if not any(_same(one.repository, url) for url in known):
            yield Companion(
                f"{one.repository}: the new tree fetches it ({one.tag[:12]}, {one.file}); the old"
                " one did not",
                f"add it to upstreams.{name}.externals, if our compile needs it",
                {},
            )
