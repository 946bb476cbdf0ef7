"""`build.py verify IMAGE`: compare an image's contents with this checkout.

It reads the image's bytes, runs nothing of it, and uses no registry. It also compares our wheels if
the store has them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple
from zipfile import ZipFile

from sparkforge.build import graph, image, imagenote, sbom
from sparkforge.build.context import Context
from sparkforge.build.imagenote import ImageNote
from sparkforge.build.packs.names import STAGE
from sparkforge.build.receipt import SBOM, differences
from sparkforge.build.results import (
    CompiledWheelResult,
    OwnWheel,
    PackResult,
    PluginResult,
    WheelResult,
)
from sparkforge.core import git, plain
from sparkforge.core.errors import CompileError, EngineError, PinsError, UsageError
from sparkforge.core.hashing import key_of, sha256_file
from sparkforge.inspect.verify import installed
from sparkforge.inspect.verify.installed import Report
from sparkforge.inspect.verify.reading import Reading
from sparkforge.pins.pathmap import member_of
from sparkforge.runtime.engine import BaseImage
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.sources.wheelhouse import read_lock
from sparkforge.store.artefact import Artefact

_PROFILE = "profile.json"


def _site(context: Context) -> str:
    return installed.site_of(context.target.python)


def check(reading: Reading, context: Context, promised: str | None = None) -> Report:
    """Compare an image with itself and with the checkout.

    Args:
        promised: digest in a receipt.
    """
    labels = reading.labels
    base = labels.get("org.opencontainers.image.base.digest", "")
    report = Report(
        reading.digest,
        labels[image.TARGET_LABEL],
        labels.get("org.opencontainers.image.version", ""),
        base,
        _contents(labels),
    )
    if promised is not None and promised != reading.digest:
        report.problems.append(f"the receipt says {promised}")
    if f"{labels.get(SITE_PACKAGES_LABEL)}/" != f"/{_site(context)}":
        report.problems.append(f"label {SITE_PACKAGES_LABEL}: must be /{_site(context)}")
    _check_notes(report, reading, context)
    installed.check(
        report,
        reading.files,
        context.target.python,
        read_lock(context.lock),
        context.store,
        f"build.py --target {report.target} --until wheelhouse",
    )
    _check_own(report, reading, context)
    _check_machine(report, reading)
    _check_absent(report, reading, context)
    _check_patched(report, reading, context)
    _check_bill(report, reading, context)
    _check_wheels(report, reading, context)
    return report


def _contents(labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for label, value in sorted(labels.items()):
        match = re.fullmatch(r"org\.sparkforge\.([a-z0-9-]+)\.([a-z.]+)", label)
        if match:
            found.setdefault(match[1], {})[match[2]] = value
    return found


# -- the image's own notes, against each other and against the checkout -----------------------


def _check_notes(report: Report, reading: Reading, context: Context) -> None:
    theirs = _note(reading)
    if theirs is None:
        report.problems.append(f"{imagenote.NAME}: not in the image")
        return
    if key_of(theirs.image) != reading.labels.get(image.KEY_LABEL):
        report.problems.append(f"label {image.KEY_LABEL}: does not match {imagenote.NAME}")
    report.problems += [
        f"{imagenote.NAME}: {what}: its key differs" for what in theirs.other_keys()
    ]
    for name, value in theirs.image["labels"].items():
        if reading.labels.get(name) != value:
            report.problems.append(f"label {name}: differs from {imagenote.NAME}")
    try:
        ours = graph.note_of(_as_made(context, theirs), _base(context, report.base))
    except (CompileError, EngineError, PinsError, UsageError) as error:
        msg = f"{imagenote.NAME}: the wheels were built in an unknown way"
        report.problems.append(f"{msg}: {error.what}")
        return
    old, new = theirs.comparable(), ours.comparable()
    for what in sorted(old.keys() | new.keys()):
        found = differences(old.get(what, {}), new.get(what, {}))
        report.problems += [f"{what}: {text}" for text in found]
    report.checked["inputs"] = len(old)


def _note(reading: Reading) -> ImageNote | None:
    """Return the image's own list of inputs; None if it has none."""
    text = reading.share(imagenote.NAME)
    with installed.as_we_write(imagenote.NAME):
        return None if text is None else imagenote.loads(text)


def _as_made(context: Context, note: ImageNote) -> Context:
    """Return the same build with the image's kind of wheels (overlaid or compiled) and its pack."""
    stated = str(note.image["labels"].get(image.PACK_LABEL, ""))
    context = replace(context, pack=tuple(filter(None, stated.split(image.PACK_JOINT))))
    compiled = any("builder" in inputs for inputs in note.wheels.values())
    return replace(context, wheels="compile") if compiled else context


def _base(context: Context, stated: str) -> BaseImage:
    """Return this checkout's pinned base; without a pin, the image's."""
    if context.target.base is None:
        return BaseImage(stated, stated)
    pinned = context.pins.images[context.target.base]
    digest = pinned.digest(context.platform)
    return BaseImage(f"{pinned.repository}@{digest}", digest)


def _check_own(report: Report, reading: Reading, context: Context) -> None:
    """Compare our programs and the profile in the image with the checkout's."""
    wanted = {}
    for name in image.RECIPE[1:]:
        path = f"{image.PROGRAMS}/{name.removeprefix('scripts/')}"
        wanted[path] = sha256_file(context.root / name)
    there = {
        path: entry.sha256
        for path, entry in reading.files.items()
        if path.startswith(f"{image.PROGRAMS}/")
    }
    for path in sorted(there.keys() | wanted.keys()):
        if there.get(path) != wanted.get(path):
            how = "gone" if path not in there else "differs from the checkout"
            report.problems.append(f"{path}: {how}")
    profile = reading.share(_PROFILE)
    with installed.as_we_write(_PROFILE):
        if (None if profile is None else plain.json_of(profile)) != (context.profile or None):
            report.problems.append(f"{_PROFILE}: differs from the profile of {report.target}")
    report.checked["programs of ours"] = len(wanted)


# -- installed files --------------------------------------------------------------------------


# ELF's numbers of processors: x86, 32-bit Arm, x86-64, 64-bit Arm. GPUs have others, and pass.
_PROCESSORS = {3: "x86", 40: "arm", 62: "amd64", 183: "arm64"}
# Names in GNU's triplets. A package may have another platform's libraries for linking, in a folder
# with that name: nvidia-cutlass-dsl's for amd64 has stubs/aarch64-unknown-linux-gnu/.
_IN_TRIPLETS = {"x86": "i686", "arm": "arm", "amd64": "x86_64", "arm64": "aarch64"}


def _check_machine(report: Report, reading: Reading) -> None:
    """Find programs and libraries for another processor than the image's."""
    wanted = reading.platform.rpartition("/")[2]
    count = aside = 0
    for path, entry in reading.files.items():
        if entry.machine in _PROCESSORS:
            count += 1
            found = _PROCESSORS[entry.machine]
            if found == wanted:
                continue
            folders = path.split("/")[:-1] if path.startswith(f"{image.VENV}/") else []
            if any(folder.startswith(f"{_IN_TRIPLETS[found]}-") for folder in folders):
                aside += 1
            else:
                report.problems.append(f"{path}: for {found}, not {wanted}")
    report.checked["programs and libraries"] = count
    if aside:
        report.checked["of them in folders for another machine"] = aside


# on the server's PATH, and in FlashInfer's further places for nvcc
_ON_PATH = re.compile(r"(?:opt/sparkforge/venv/|usr/(?:local/(?:cuda[^/]*/)?)?)?s?bin/([^/]+)")


def _check_absent(report: Report, reading: Reading, context: Context) -> None:
    """Find programs, or links with their names, that the target excludes."""
    absent = context.target.absent
    if not absent:
        return
    for path in sorted(reading.files):
        match = _ON_PATH.fullmatch(path)
        if match is not None and match[1] in absent:
            report.problems.append(f"{path}: a program that targets.{report.target} excludes")
    report.checked["excluded programs"] = len(absent)


def _check_patched(report: Report, reading: Reading, context: Context) -> None:
    """Compare each patched file with its blob of the checkout's last patch."""
    site = _site(context)
    wanted: dict[str, tuple[str, str]] = {}
    for wheel in context.target.wheels:
        for layer in context.layers(wheel):
            rules = context.pins.upstream(layer).paths
            for patch in context.series_of(layer).patches:
                for entry in patch.entries:
                    member = member_of(rules, entry.path)
                    if member is not None and entry.new_blob is not None:
                        wanted[site + member] = (entry.new_blob, patch.name)
    report.checked["patched files"] = len(wanted)
    for path, (blob, patch_name) in sorted(wanted.items()):
        found = reading.files.get(path)
        if blob == git.ABSENT:
            if found is not None:
                report.problems.append(f"{path}: exists, but {patch_name} removes it")
        elif found is None:
            report.problems.append(f"{path}: missing in the image, but {patch_name} changes it")
        elif found.git_blob != blob:
            report.problems.append(f"{path}: differs from the result of {patch_name}")


# -- bill of materials and wheels -----------------------------------------------------------------


class _Part(NamedTuple):
    """A component of the bill: its reference, name, and sha256 if it has one."""

    ref: str
    name: str
    sha256: str


def _parts(bill: bytes) -> list[_Part]:
    """Return the components of a bill."""
    with installed.as_we_write(SBOM):
        return [
            _Part(
                str(component["bom-ref"]),
                str(component["name"]),
                str(component["hashes"][0]["content"]) if "hashes" in component else "",
            )
            for component in plain.json_of(bill)["components"]
        ]


def _check_bill(report: Report, reading: Reading, context: Context) -> None:
    bill = reading.share(SBOM)
    if bill is None:
        report.problems.append(f"{SBOM}: not in the image")
        return
    if hashlib.sha256(bill).hexdigest() != reading.labels.get(image.SBOM_LABEL):
        report.problems.append(f"{SBOM}: differs from the label {image.SBOM_LABEL}")
    locked = {item.name: item.sha256s for item in read_lock(context.lock)}
    there = {
        installed.name_of(folder) for folder, _ in installed.records(reading.files, _site(context))
    }
    parts = _parts(bill)
    billed = {part.name for part in parts if part.ref.startswith(("wheel-", "own-"))}
    for part in parts:
        if part.ref.startswith("wheel-") and part.sha256 not in locked.get(part.name, frozenset()):
            report.problems.append(f"{SBOM}: {part.name}: no such wheel in {context.lock.name}")
    report.problems += [f"{SBOM}: {name}: not installed" for name in sorted(billed - there)]
    report.problems += [f"{name}: installed, not in {SBOM}" for name in sorted(there - billed)]
    report.checked["components"] = len(parts)


def _in_store(context: Context, note: ImageNote) -> Iterator[tuple[str, Artefact[OwnWheel]]]:
    """Yield an image's wheels in the store, by their references in the bill."""
    for name in context.target.wheels:
        inputs = note.wheels.get(name, {})
        kind = CompiledWheelResult if "builder" in inputs else WheelResult
        if (wheel := context.store.find("wheels", inputs, kind)) is not None:
            yield f"own-{name}", wheel
    if note.plugin is not None:
        plugin = context.store.find("kernels", note.plugin, PluginResult)
        if plugin is not None:
            yield sbom.PLUGIN, plugin
    if note.pack is not None:
        pack = context.store.find(STAGE, note.pack, PackResult)
        if pack is not None:
            yield sbom.PACK, pack


def _check_wheels(report: Report, reading: Reading, context: Context) -> None:
    """Compare installed files of our wheels with the wheels, if the store has them."""
    bill = reading.share(SBOM)
    note = _note(reading)
    if bill is None or note is None:
        return
    hashes = {part.ref: part.sha256 for part in _parts(bill)}
    site = _site(context)
    rows = dict(installed.records(reading.files, site))
    compared = 0
    for reference, made in _in_store(context, note):
        compared += 1
        if made.result.sha256 != hashes.get(reference):
            report.problems.append(
                f"{made.result.file}: differs from the wheel of the same inputs in the store"
            )
            continue
        with ZipFile(made.path / made.result.file) as wheel:
            record = next(n for n in wheel.namelist() if n.endswith(".dist-info/RECORD"))
            text = wheel.read(record).decode()
        there = dict(rows.get(record.rpartition("/")[0], []))
        members = {
            installed.joined(site, row[0]): installed.hex_of(row[1])
            for row in csv.reader(io.StringIO(text))
            if row and ".data/" not in row[0]
        }
        report.problems += [
            f"{path}: differs from the wheel in the store"
            for path, sha256 in members.items()
            if sha256 and there.get(path) != sha256
        ]
        # files added by the installation: notes of the installer, byte code, programs
        report.problems += [
            f"{path}: not in the wheel in the store"
            for path in sorted(there.keys() - members.keys())
            if path.startswith(site) and ".dist-info/" not in path and not installed.byte_code(path)
        ]
    report.checked["wheels in the store"] = compared
