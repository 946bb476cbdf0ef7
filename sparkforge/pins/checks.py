"""Checks of pins.yaml across values: missing names and files, values that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.pins.types import loads
from sparkforge.pins.yamlfile import Where
from sparkforge.serving.options import meant

if TYPE_CHECKING:
    from sparkforge.pins.pins import Pins, Target, Upstream

Problem = tuple[Where, str]

_NOT_HERE = ("--api-key", "--hf-token", "--host")


def cross_check(pins: Pins, root: Path) -> Iterator[Problem]:
    """Yield every problem; file names in pins.yaml are relative to ``root``."""
    for name, upstream in pins.upstreams.items():
        yield from _upstream(("upstreams", name), upstream, pins)
    if pins.plugin is not None:
        yield from _locks({("plugin", "requirements"): pins.plugin.requirements}, root)
    for name, profile in pins.profiles.items():
        here: Where = ("profiles", name)
        yield from _known((*here, "model"), profile.model, pins.models)
        yield from _known((*here, "vocabulary"), profile.vocabulary, pins.vocabularies)
        yield from _known((*here, "choice"), profile.choice, pins.choices)
    for name, target in pins.targets.items():
        yield from _target(("targets", name), target, pins, root)


def _known(where: Where, name: str | None, table: Iterable[str]) -> Iterator[Problem]:
    if name is not None and name not in (names := sorted(table)):
        yield where, f"{name!r}: no such entry: use one of {', '.join(names) or 'none'}"


def _locks(locks: dict[Where, str], root: Path) -> Iterator[Problem]:
    for where, lock in locks.items():
        if not (root / lock).is_file():
            yield where, f"{lock} does not exist: create the lock with scripts/lock.sh"


def _upstream(here: Where, upstream: Upstream, pins: Pins) -> Iterator[Problem]:
    if upstream.tag.removeprefix("v") != upstream.version:
        yield (*here, "version"), f"{upstream.version!r} does not match tag {upstream.tag}"
    if upstream.commit is None and upstream.source_file is None:
        yield (*here, "commit"), "missing, and there is no source_file to use instead"
    yield from _known((*here, "source_in"), upstream.source_in, pins.upstreams)
    lender = pins.upstreams.get(upstream.source_in) if upstream.source_in else upstream
    if lender is not None:
        yield from _known((*here, "source_file"), upstream.source_file, lender.files)
    for key, file in upstream.files.items():
        release = upstream.version if file.natives is None else file.natives.release
        stem = file.file.removesuffix(".tar.gz")
        project, _, rest = stem.partition("-") if file.is_wheel else stem.rpartition("-")
        same = re.sub(r"[-_.]+", "-", project).lower() == file.project
        if not same or rest.partition("-")[0].partition("+")[0] != release:
            what = f"{file.file!r} is not a file of {file.project} {release}"
            yield (*here, "files", key, "file"), what
    before = set()
    for i, rule in enumerate(upstream.paths):
        where = (*here, "paths", i)
        for side in (("repo", rule.repo), ("wheel", rule.wheel)):
            if side in before:
                yield (*where, side[0]), f"{side[1]!r} already has a rule"
            before |= {side} if side[1] else set()
        if not (rule.build or rule.repo.endswith("/")):  # vllm would match vllm-tests/ too
            yield (*where, "repo"), f"{rule.repo!r} does not end with a slash"
        if rule.build and rule.wheel is not None:
            yield (*where, "build"), "build rules cannot be in the wheel: write wheel: null"


def _target(here: Where, target: Target, pins: Pins, root: Path) -> Iterator[Problem]:
    yield from _known((*here, "base"), target.base, pins.images)
    yield from _known((*here, "model"), target.model, pins.models)
    yield from _known((*here, "profile"), target.profile, pins.profiles)
    if (code := target.machine_code) is not None:
        where = (*here, "machine_code")
        yield from _known((*where, "contract"), code.contract, pins.contracts)
        for i, arch in enumerate(code.architectures):
            if target.cuda_arch is None or not loads(arch, target.cuda_arch):
                what = f"code for {arch} does not load on {target.cuda_arch or 'a CPU'}"
                yield (*where, "architectures", i), what
    for platform in set(target.platforms) - target.requirements.keys():
        yield (*here, "requirements"), f"none for {platform}"
    locks = {(*here, "requirements", key): lock for key, lock in target.requirements.items()}
    builders = {(*here, "builder", key): lock for key, lock in target.builder.items()}
    yield from _locks({**locks, **builders}, root)
    for i, word in enumerate(target.serve):
        option = word.partition("=")[0]
        if meant(option, _NOT_HERE):
            what = f"{option} does not belong in a committed file: docs/serving.md"
            yield (*here, "serve", i), what
    for name, plan in target.wheels.items():
        where = (*here, "wheels", name)
        yield from _known(where, name, pins.upstreams)
        known = pins.upstreams[name].files if name in pins.upstreams else {}
        if len({name, *plan.carries}) <= len(plan.carries):
            yield (*where, "carries"), "repeats an upstream or contains the wheel's own"
        for carried in plan.carries:
            yield from _known((*where, "carries"), carried, pins.upstreams)
        for platform in set(target.platforms) - plan.files.keys():
            yield (*where, "files"), f"none for {platform}"
        for platform, file in plan.files.items():
            yield from _known((*where, "files", platform), file, known)
            if file in known and not known[file].fits(platform):
                what = f"{known[file].file!r} is no wheel for {platform}"
                yield (*where, "files", platform), what
