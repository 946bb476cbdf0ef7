"""What a new release wants, compared with pins.yaml and the locks.

Its wheels declare a torch, a FlashInfer and more; its CMake names the sources that a compile
fetches. All of this is read, not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import gitread
from sparkforge.core.errors import FetchError
from sparkforge.maintain.rebase import metadata
from sparkforge.pins.pins import Pins, Upstream
from sparkforge.pins.yamlfile import Where
from sparkforge.series import dropwhen
from sparkforge.series.series import Series
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source

_SET = re.compile(r"""^\s*set\s*\(\s*(\w+)\s+["']?([^"'\s)]+)["']?""", re.MULTILINE | re.IGNORECASE)
_DECLARE = re.compile(r"FetchContent_(?:Declare|Populate)\s*\(([^)]*)\)", re.IGNORECASE)
_GIT = re.compile(r"(GIT_REPOSITORY|GIT_TAG)\s+\"?([^\s\"]+)")
_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Drift:
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


def find(project: Project, release: Upstream, source: Source, old: Source) -> list[Drift]:
    """Return the requirements of a new release that pins.yaml and the locks do not meet.

    Args:
        release: the upstream as it will be pinned.
        source: its new tree.
        old: its pinned tree; a difference that it already has is not reported.
    """
    name = source.upstream
    drifts = list(_externals(project.pins, name, source, old))
    drifts += _asked_for(project, name, release)
    drifts += _required(project, release, name)
    return drifts


def unknown(
    name: str, release: Upstream, declared_commit: str | None, lacking: Iterable[str]
) -> list[Drift]:
    """Return the unknown parts of a release: its commit, and files that the index lacks.

    Args:
        declared_commit: the commit that the release names, maybe abbreviated.
        lacking: names of files for which those of the old release stay.
    """
    drifts = []
    if release.commit is None:
        says = f"; the release says {declared_commit}" if declared_commit else ""
        drifts.append(
            Drift(
                f"upstreams.{name}: the commit of {release.tag} is unknown{says}",
                f"with git access: build.py pins resolve {name}; or --commit SHA; until then"
                " sources come from the release file",
            )
        )
    for key in lacking:
        file = release.files[key]
        what = f"files.{key}: the index has no {file.project} {release.version}; {file.file} stays"
        hint = f"add it to upstreams.{name}.files.{key} when it is published"
        drifts.append(Drift(what, hint))
    return drifts


def droppable(every: Iterable[Series], versions: Mapping[str, str]) -> list[Drift]:
    """Return the patches whose Drop-when holds for these versions of upstreams."""
    found = []
    for series in every:
        for patch in series.patches:
            text = patch.trailers["Drop-when"]
            condition = dropwhen.parse(text)
            if condition is not None and condition.holds(versions):
                found.append(
                    Drift(
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
        for one in requirement.specifier:
            if one.operator == "==" and not one.version.endswith("*"):
                versions[canonicalize_name(requirement.name)] = one.version
    return versions


def _asked_for(project: Project, name: str, release: Upstream) -> Iterator[Drift]:
    """Find our own lists of requirements that still ask for the old release."""
    packages = {file.project for file in project.pins.upstreams[name].files.values()}
    for path in sorted((project.root / "requirements").glob("*.in")):
        asked = exact(path.read_text(encoding="utf-8"))
        for package in sorted(packages & asked.keys()):
            if asked[package] != release.version:
                yield Drift(
                    f"requirements/{path.name} requires {package} {asked[package]}",
                    f"write {package}=={release.version} there and run scripts/lock.sh",
                )


def _required(project: Project, release: Upstream, name: str) -> Iterator[Drift]:
    """Compare the requirements of the new wheels with each target's locks and our wheels."""
    loaded, outdated = project.pins, set()
    for target, plan in loaded.targets.items():
        for platform in plan.platforms if name in plan.wheels else ():
            wheel = plan.wheels[name]
            file = release.files[wheel.files[platform]]
            if file == loaded.upstreams[name].files[wheel.files[platform]]:
                continue  # the index lacks the new release's file: reported elsewhere
            try:
                every = metadata.declared(project, file)
            except FetchError as error:
                what = f"target {target}: {error.what}"
                yield Drift(what, "compare its METADATA with the lock before a build")
                continue
            required = metadata.applying(every, plan.python, platform)
            ours = {
                canonicalize_name(loaded.upstreams[up].files[other.files[platform]].project): up
                for up, other in plan.wheels.items()
                if up != name
            }
            for one in required:
                up = ours.get(canonicalize_name(one.name))
                if up is None or up in outdated:
                    continue
                version = loaded.upstreams[up].version
                if not one.specifier.contains(version, prereleases=True):
                    outdated.add(up)
                    to = next((s.version for s in one.specifier if s.operator == "=="), "VERSION")
                    what = f"{one.name}: {name} wants {one.specifier}, upstreams.{up} is {version}"
                    yield Drift(what, f"build.py rebase {up} --onto release:{to}")
            lock = plan.requirements[platform]
            path = project.root / lock
            have = exact(path.read_text(encoding="utf-8")) if path.is_file() else {}
            without = {*ours, *map(canonicalize_name, wheel.drop_requires)}
            if stale := _stale(required, have, without):
                yield Drift(
                    f"target {target}: {lock} has {', '.join(stale)}",
                    "change them in the .in file in requirements/ and run"
                    f" scripts/lock.sh {Path(lock).name}",
                )


def _stale(required: list[Requirement], have: Mapping[str, str], without: Set[str]) -> list[str]:
    """Return, for people, each requirement that locked versions do not meet."""
    found = {}
    for one in required:
        name = canonicalize_name(one.name)
        if name not in without and name not in have:
            found[name] = f"{name}: none (wanted {one.specifier or 'any'})"
        elif name not in without and not one.specifier.contains(have[name], prereleases=True):
            found[name] = f"{name} {have[name]} (wanted {one.specifier})"
    return [found[name] for name in sorted(found)]


# -- sources of CMake ----------------------------------------------------------------------


def _fetched(source: Source) -> list[tuple[str, str, str]]:
    """Return the (repository, tag, file) of the git sources that a tree's CMake files fetch."""
    found = []
    with gitread.reading(source.repo) as reader:
        paths = [file.path for file in reader.files(source.commit, "cmake")]
        for path in ("CMakeLists.txt", *paths):
            if not path.endswith((".cmake", "CMakeLists.txt")):
                continue
            data = reader.content(source.commit, path) or b""
            text = re.sub(r"^\s*#.*$", "", data.decode(errors="replace"), flags=re.MULTILINE)
            settings: dict[str, list[str]] = {}
            for variable, value in _SET.findall(text):
                settings.setdefault(f"${{{variable}}}", []).append(value)
            for call in _DECLARE.findall(text):
                words = dict(_GIT.findall(call))
                if len(words) == 2:
                    # where both are set in several branches, they go in pairs
                    urls, tags = (
                        settings.get(words[key], [words[key]])
                        for key in ("GIT_REPOSITORY", "GIT_TAG")
                    )
                    urls = urls if len(urls) == len(tags) else urls[:1] * len(tags)
                    found += [
                        (url.lower().removesuffix("/").removesuffix(".git"), tag, path)
                        for url, tag in zip(urls, tags, strict=True)
                    ]
    return found


def _externals(loaded: Pins, name: str, source: Source, before: Source) -> Iterator[Drift]:
    def plain(url: str) -> str:
        return url.lower().removesuffix("/").removesuffix(".git")

    fetches = _fetched(source)
    known = {url for url, _, _ in _fetched(before)}
    for key, external in loaded.upstreams[name].externals.items():
        known.add(plain(external.git))
        fetch = next((one for one in fetches if one[0] == plain(external.git)), None)
        where = f"upstreams.{name}.externals.{key}"
        if fetch is None:
            if fetches:
                what = f"externals.{key}: the new tree no longer fetches {external.git}"
                yield Drift(what, f"remove {where} from pins.yaml")
            continue
        _, tag, file = fetch
        change = f"externals.{key}: {external.tag or external.commit[:12]} → "
        if tag in (external.commit, external.tag):
            continue
        if _SHA.fullmatch(tag) and external.tag is None:
            at = ("upstreams", name, "externals", key, "commit")
            hint = "nothing: rewritten at the end of the rebase"
            yield Drift(f"{change}{tag[:12]} ({file})", hint, {at: tag})
        else:
            asked = f"git ls-remote {external.git} {tag}"
            yield Drift(
                f"{change}{tag} ({file})", f"write tag {tag} and its commit ({asked}) into {where}"
            )
    for bundled, upstream in loaded.upstreams.items():
        known.add(plain(upstream.git))
        for url, tag, file in fetches if upstream.source_in == name else ():
            if url == plain(upstream.git) and tag not in (upstream.tag, upstream.commit):
                yield Drift(
                    f"{bundled}: the new tree contains {tag}, not {upstream.tag} ({file})",
                    f"write tag, version and commit of {tag} into upstreams.{bundled}",
                )
    for url, tag, file in fetches:
        if url not in known and "$" not in url + tag:
            what = f"{url}: the new tree fetches it ({tag[:12]}, {file}); the old one did not"
            yield Drift(what, f"add it to upstreams.{name}.externals, if our compile needs it")
