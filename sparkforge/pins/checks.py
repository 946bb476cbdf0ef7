"""What one value of pins.yaml cannot say by itself: names that point at nothing, missing files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.pins.architectures import loads
from sparkforge.pins.yamlfile import Document, Where, dotted

if TYPE_CHECKING:
    from sparkforge.pins.pins import Pins


def cross_check(pins: Pins, document: Document, root: Path) -> list[tuple[int, str]]:
    """Find names that point at nothing, and files that are not there.

    Returns:
        (line, problem) of each; ``root`` is the folder that file names start from.
    """
    problems: list[tuple[int, str]] = []

    def report(where: Where, what: str, remedy: str) -> None:
        problems.append((document.line(where), f"{dotted(where)}: {what}: {remedy}"))

    def named(where: Where, what: str, known: Iterable[str]) -> None:
        report(where, what, f"use one of {', '.join(sorted(known))}")

    def locked(where: Where, lock: str) -> None:
        if not (root / lock).is_file():
            report(where, f"{lock} does not exist", "create the lock with scripts/lock.sh")

    for name, upstream in pins.upstreams.items():
        here: Where = ("upstreams", name)
        if upstream.tag.removeprefix("v") != upstream.version:
            what = f"{upstream.version!r} does not match tag {upstream.tag}"
            report((*here, "version"), what, "give the version of the pinned release")
        if upstream.commit is None and upstream.source_file is None:
            what = "missing, and there is no release file to use instead"
            report((*here, "commit"), what, "add it, or add a source_file")
        lender = upstream if upstream.source_in is None else pins.upstreams.get(upstream.source_in)
        if lender is None:
            named((*here, "source_in"), "no such upstream", pins.upstreams)
        elif upstream.source_file is not None and upstream.source_file not in lender.files:
            what = f"{upstream.source_file!r} is not among files"
            named((*here, "source_file"), what, lender.files)
        for i, rule in enumerate(upstream.paths):
            earlier = upstream.paths[:i]
            for side, prefix, before in (
                ("repo", rule.repo, [one.repo for one in earlier]),
                ("wheel", rule.wheel, [one.wheel for one in earlier]),
            ):
                if prefix is not None and prefix in before:
                    what = f"{prefix!r} already has a rule"
                    report((*here, "paths", i, side), what, "keep one rule per folder")
                if side == "repo" and rule.build:
                    continue  # CMakeLists.txt and its like
                # without the slash, vllm would fit vllm-tests/ too
                if prefix is not None and not prefix.endswith("/"):
                    what = f"{prefix!r} does not end with a slash"
                    report((*here, "paths", i, side), what, "give a folder: NAME/")
            if rule.build and rule.wheel is not None:
                what = "build rules cannot be in the wheel"
                report((*here, "paths", i, "build"), what, "write wheel: null")
        if upstream.kernels is not None:
            at = (*here, "kernels")
            if "/" not in upstream.kernels.source:
                report((*at, "source"), "is in no folder", "put the kernels into their own folder")
            if not upstream.kernels.wheel.endswith("/"):
                what = f"{upstream.kernels.wheel!r} does not end with a slash"
                report((*at, "wheel"), what, "give a folder: NAME/")
            locked((*at, "requirements"), upstream.kernels.requirements)
    for name, profile in pins.profiles.items():
        for key, value, pinned in (
            ("model", profile.model, set(pins.models)),
            ("vocabulary", profile.vocabulary, set(pins.vocabularies)),
        ):
            if value is not None and value not in pinned:
                report(("profiles", name, key), f"{value!r} is not pinned", "pin it")
        if profile.choice is not None and profile.choice not in pins.choices:
            what = f"{profile.choice!r} is not among choices"
            report(("profiles", name, "choice"), what, "add it there")
    for name, target in pins.targets.items():
        here = ("targets", name)
        if target.base is not None and target.base not in pins.images:
            report((*here, "base"), f"{target.base!r} is not among images", "pin it there")
        if target.model is not None and target.model not in pins.models:
            report((*here, "model"), f"{target.model!r} is not among models", "pin it there")
        if target.profile is not None and target.profile not in pins.profiles:
            report((*here, "profile"), f"{target.profile!r} is not among profiles", "add it there")
        code = target.machine_code
        if code is not None:
            at = (*here, "machine_code")
            if code.contract not in pins.contracts:
                report((*at, "contract"), f"{code.contract!r} is not among contracts", "add it")
            if target.cuda_arch is None:
                report(at, "the target has no cuda_arch", "add it, or remove machine_code")
            for i, arch in enumerate(code.architectures):
                if target.cuda_arch is not None and not loads(arch, target.cuda_arch):
                    what = f"code for {arch} does not load on {target.cuda_arch}"
                    report((*at, "architectures", i), what, "remove it (docs/sm12x.md)")
        if target.pack and (target.cuda_arch is None or "flashinfer" not in target.wheels):
            what = "the target has no cuda_arch, or no wheel of flashinfer"
            report((*here, "pack"), what, "add both, or remove pack")
        for platform in target.platforms:
            lock = target.requirements.get(platform)
            if lock is None:
                report((*here, "requirements"), f"none for {platform}", "add a lock file")
            else:
                locked((*here, "requirements", platform), lock)
        for built_for, lock in target.builder.items():
            locked((*here, "builder", built_for), lock)
        for up_name, plan in target.wheels.items():
            at = (*here, "wheels", up_name)
            if up_name not in pins.upstreams:
                named(at, "no such upstream", pins.upstreams)
                continue
            if len(set(plan.carries)) < len(plan.carries) or up_name in plan.carries:
                what = "repeats an upstream or contains the wheel's own"
                report((*at, "carries"), what, "list each other upstream once")
            for carried in plan.carries:
                if carried not in pins.upstreams:
                    named((*at, "carries"), f"{carried!r}: no such upstream", pins.upstreams)
            for platform in target.platforms:
                file = plan.files.get(platform)
                if file is None:
                    report((*at, "files"), f"none for {platform}", "add the release wheel")
                elif file not in pins.upstreams[up_name].files:
                    what = f"{file!r} is not among the upstream's files"
                    named((*at, "files", platform), what, pins.upstreams[up_name].files)
    return problems
