"""Checks of pins.yaml across values: references to missing names, missing files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.pins.contracts import loads
from sparkforge.pins.yamlfile import Document, Where, dotted

if TYPE_CHECKING:
    from sparkforge.pins.compiling import Plugin
    from sparkforge.pins.pathmap import PathRule
    from sparkforge.pins.pins import Pins, ReleaseFile, Target, Upstream

Problem = tuple[Where, str, str]
"""Place, problem and hint."""


def cross_check(pins: Pins, document: Document, root: Path) -> list[tuple[int, str]]:
    """Find references to missing names, and missing files.

    Returns:
        (line, problem) of each; file names are relative to ``root``.
    """
    problems: list[Problem] = []
    for name, upstream in pins.upstreams.items():
        problems += _upstream(("upstreams", name), upstream, pins)
    if pins.plugin is not None:
        problems += _plugin(("plugin",), pins.plugin, root)
    problems += _profiles(pins)
    for name, target in pins.targets.items():
        problems += _target(("targets", name), target, pins, root)
    return [
        (document.line(where), f"{dotted(where)}: {what}: {hint}") for where, what, hint in problems
    ]


def _one_of(known: Iterable[str]) -> str:
    return f"use one of {', '.join(sorted(known))}"


def _locked(where: Where, lock: str, root: Path) -> Iterator[Problem]:
    if not (root / lock).is_file():
        yield where, f"{lock} does not exist", "create the lock with scripts/lock.sh"


def _upstream(here: Where, upstream: Upstream, pins: Pins) -> Iterator[Problem]:
    if upstream.tag.removeprefix("v") != upstream.version:
        what = f"{upstream.version!r} does not match tag {upstream.tag}"
        yield (*here, "version"), what, "give the version of the pinned release"
    if upstream.commit is None and upstream.source_file is None:
        what = "missing, and there is no release file to use instead"
        yield (*here, "commit"), what, "add it, or add a source_file"
    lender = upstream if upstream.source_in is None else pins.upstreams.get(upstream.source_in)
    if lender is None:
        yield (*here, "source_in"), "no such upstream", _one_of(pins.upstreams)
    elif upstream.source_file is not None and upstream.source_file not in lender.files:
        what = f"{upstream.source_file!r} is not among files"
        yield (*here, "source_file"), what, _one_of(lender.files)
    for key, file in upstream.files.items():
        yield from _file((*here, "files", key), file, upstream, pins)
    for i, rule in enumerate(upstream.paths):
        yield from _path((*here, "paths", i), rule, upstream.paths[:i])


def _file(here: Where, file: ReleaseFile, upstream: Upstream, pins: Pins) -> Iterator[Problem]:
    release = upstream.version if file.natives is None else file.natives.release
    stem = file.file.removesuffix(".tar.gz")
    project, _, rest = stem.partition("-") if file.is_wheel else stem.rpartition("-")
    same = re.sub(r"[-_.]+", "-", project).lower() == file.project
    if not same or rest.partition("-")[0].partition("+")[0] != release:
        what = f"{file.file!r} is not a file of {file.project} {release}"
        yield (*here, "file"), what, "give the file of the pinned release"
    others = (one for other in pins.upstreams.values() for one in other.files.values())
    if any(one.sha256 == file.sha256 and one.file != file.file for one in others):
        yield (*here, "sha256"), "another file has this sha256", "give each file its own"


def _plugin(here: Where, plugin: Plugin, root: Path) -> Iterator[Problem]:
    if not plugin.folder.endswith("/"):
        what = f"{plugin.folder!r} does not end with a slash"
        yield (*here, "folder"), what, "give a folder: NAME/"
    yield from _locked((*here, "requirements"), plugin.requirements, root)


def _path(here: Where, rule: PathRule, earlier: Sequence[PathRule]) -> Iterator[Problem]:
    for side, prefix, before in (
        ("repo", rule.repo, [other.repo for other in earlier]),
        ("wheel", rule.wheel, [other.wheel for other in earlier]),
    ):
        if prefix is not None and prefix in before:
            yield (*here, side), f"{prefix!r} already has a rule", "keep one rule per folder"
        if side == "repo" and rule.build:
            continue  # for example CMakeLists.txt
        # without the slash, vllm would match vllm-tests/ too
        if prefix is not None and not prefix.endswith("/"):
            yield (*here, side), f"{prefix!r} does not end with a slash", "give a folder: NAME/"
    if rule.build and rule.wheel is not None:
        yield (*here, "build"), "build rules cannot be in the wheel", "write wheel: null"


def _profiles(pins: Pins) -> Iterator[Problem]:
    for name, profile in pins.profiles.items():
        here = ("profiles", name)
        if profile.model is not None and profile.model not in pins.models:
            yield (*here, "model"), f"{profile.model!r} is not pinned", "pin it"
        if profile.vocabulary is not None and profile.vocabulary not in pins.vocabularies:
            yield (*here, "vocabulary"), f"{profile.vocabulary!r} is not pinned", "pin it"
        if profile.choice is not None and profile.choice not in pins.choices:
            yield (*here, "choice"), f"{profile.choice!r} is not among choices", "add it there"


def _target(here: Where, target: Target, pins: Pins, root: Path) -> Iterator[Problem]:
    for key, value, table, known, hint in (
        ("base", target.base, "images", set(pins.images), "pin it there"),
        ("model", target.model, "models", set(pins.models), "pin it there"),
        ("profile", target.profile, "profiles", set(pins.profiles), "add it there"),
    ):
        if value is not None and value not in known:
            yield (*here, key), f"{value!r} is not among {table}", hint
    yield from _machine_code((*here, "machine_code"), target, pins)
    if target.pack and (target.cuda_arch is None or "flashinfer" not in target.wheels):
        what = "the target has no cuda_arch, or no wheel of flashinfer"
        yield (*here, "pack"), what, "add both, or remove pack"
    for platform in target.platforms:
        lock = target.requirements.get(platform)
        if lock is None:
            yield (*here, "requirements"), f"none for {platform}", "add a lock file"
        else:
            yield from _locked((*here, "requirements", platform), lock, root)
    for built_for, lock in target.builder.items():
        yield from _locked((*here, "builder", built_for), lock, root)
    for i, word in enumerate(target.serve):
        if word.partition("=")[0] in ("--api-key", "--hf-token", "--host"):
            what = f"{word.partition('=')[0]} does not belong in a committed file"
            yield (*here, "serve", i), what, "remove it (docs/serving.md)"
    for name in target.wheels:
        yield from _wheel((*here, "wheels", name), name, target, pins)


def _machine_code(here: Where, target: Target, pins: Pins) -> Iterator[Problem]:
    code = target.machine_code
    if code is None:
        return
    if code.contract not in pins.contracts:
        yield (*here, "contract"), f"{code.contract!r} is not among contracts", "add it"
    if target.cuda_arch is None:
        yield here, "the target has no cuda_arch", "add it, or remove machine_code"
        return
    for i, arch in enumerate(code.architectures):
        if not loads(arch, target.cuda_arch):
            what = f"code for {arch} does not load on {target.cuda_arch}"
            yield (*here, "architectures", i), what, "remove it (docs/kernels.md)"


def _wheel(here: Where, name: str, target: Target, pins: Pins) -> Iterator[Problem]:
    if name not in pins.upstreams:
        yield here, "no such upstream", _one_of(pins.upstreams)
        return
    plan, known = target.wheels[name], pins.upstreams[name].files
    if len(set(plan.carries)) < len(plan.carries) or name in plan.carries:
        what = "repeats an upstream or contains the wheel's own"
        yield (*here, "carries"), what, "list each other upstream once"
    for carried in plan.carries:
        if carried not in pins.upstreams:
            yield (*here, "carries"), f"{carried!r}: no such upstream", _one_of(pins.upstreams)
    for platform in target.platforms:
        file = plan.files.get(platform)
        if file is None:
            yield (*here, "files"), f"none for {platform}", "add the release wheel"
        elif file not in known:
            what = f"{file!r} is not among the upstream's files"
            yield (*here, "files", platform), what, _one_of(known)
        elif not known[file].fits(platform):
            what = f"{known[file].file!r} is no wheel for {platform}"
            yield (*here, "files", platform), what, "give a wheel of that platform"
