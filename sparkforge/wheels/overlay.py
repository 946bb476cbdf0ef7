"""The overlay wheel: a release wheel with the patched files replaced, without a compiler."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import git, gitread
from sparkforge.core.errors import BuildError
from sparkforge.core.git import Change
from sparkforge.pins.types import PathRule, rule_of
from sparkforge.series.patchfile import check_shadows
from sparkforge.series.series import Patched
from sparkforge.sources.sources import RELEASE_INSTEAD, Source
from sparkforge.wheels import archive, intake
from sparkforge.wheels.intake import Wheel


@dataclass(frozen=True)
class Request:
    """Changes of a release wheel, other than its files."""

    wheel: Path
    """The verified release wheel."""
    name: str | None
    """Distribution name of the result; None keeps it."""
    local: str
    """Local version part, e.g. ``cpu.spark.1``."""
    drop_requires: tuple[str, ...]
    """Requirements to remove from METADATA."""
    version_file: str | None
    """The module in the wheel with the version, or None."""
    epoch: int
    """Date of every member, seconds since 1970."""
    release: str | None = None
    """The release of its files; None: the wheel's own."""
    add_requires: tuple[str, ...] = ()
    """Requirements to add to METADATA."""


@dataclass(frozen=True)
class Layer:
    """A patched tree, and the paths of its files in the wheel."""

    patched: Patched
    paths: tuple[PathRule, ...]


@dataclass(frozen=True)
class Overlaid:
    """The overlay wheel: file, distribution, version, and patched members."""

    path: Path
    name: str
    version: str
    replaced: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    """Changed files of the repository that no wheel contains."""
    compile_only: tuple[str, ...]
    """Build rules among these, which did not apply to the release's native code."""


def build(request: Request, layers: Sequence[Layer], folder: Path) -> Overlaid:
    """Write the overlay wheel into ``folder``; without layers only its metadata changes.

    Raises:
        BuildError: a patch changes native sources, or the release wheel's file is not the patch's
            original.
    """
    with archive.opened(request.wheel) as source:
        return write(request, source, plan(request, layers, source), folder)


def write(request: Request, source: archive.Source, changes: Plan, folder: Path) -> Overlaid:
    """Write a wheel with some members changed, under our name and version.

    Args:
        source: ``request.wheel``, open.
    """
    wheel = intake.read(source)
    name = request.name or wheel.name
    version = output_version(request.release or wheel.version, request.local)
    new_stem = f"{_escape(name)}-{version}"
    fresh = dict(changes.fresh)
    if request.version_file is not None:
        stated = fresh.get(request.version_file) or source.read(request.version_file)
        fresh[request.version_file] = _version_file(
            stated, request.release or wheel.released, version, request.version_file
        )
    fresh[f"{wheel.info}/METADATA"] = _metadata(wheel, request, name, version)
    fresh[f"{wheel.info}/WHEEL"] = _wheel_file(wheel)
    fresh[f"{wheel.info}/RECORD"] = b""  # written last

    # a signature of the release's RECORD is not valid for ours
    signatures = {f"{wheel.info}/RECORD{suffix}" for suffix in (".jws", ".p7s")}
    names = (source.members.keys() | fresh.keys()) - set(changes.removed) - signatures
    check_shadows(changes.added, names, request.wheel.name)
    renamed = {member: _rename(member, wheel.stem, new_stem) for member in names}
    fresh[f"{wheel.info}/RECORD"] = _record(source, wheel, fresh, renamed)
    out = folder / f"{new_stem}-{wheel.tags}.whl"
    with out.open("wb", buffering=1 << 20) as file:
        writer = archive.Writer(file, request.epoch)
        # metadata last, as the wheel format recommends: readers find it from the end
        for member in sorted(names, key=lambda m: (m.startswith(wheel.info), renamed[m])):
            if member in fresh:
                mode = (
                    source.members[member].external_attr >> 16 if (member in source.members) else 0
                )
                executable = changes.executable.get(member, bool(mode & 0o100))
                writer.add(renamed[member], fresh[member], executable=executable)
            else:
                writer.copy(source, source.members[member], renamed[member])
        writer.finish()
    return Overlaid(
        path=out,
        name=name,
        version=version,
        replaced=changes.replaced,
        added=changes.added,
        removed=changes.removed,
        left_out=changes.left_out,
        compile_only=changes.compile_only,
    )


def output_version(release_version: str, local: str) -> str:
    """Return the overlay's version: the release's with our local part."""
    return f"{release_version}{'.' if '+' in release_version else '+'}{local}"


# -- which members change --------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Changed members of a wheel, with their content."""

    fresh: Mapping[str, bytes] = field(default_factory=dict)
    executable: Mapping[str, bool] = field(default_factory=dict)
    """Modes of members that a patch sets; others stay."""
    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    compile_only: tuple[str, ...] = ()


def plan(request: Request, layers: Sequence[Layer], source: archive.Source) -> Plan:
    """Find the changes of patched trees in a release wheel; raises as ``build``."""
    blobs: dict[Path, dict[str, str]] = {}
    executable: dict[str, bool] = {}
    replaced: list[str] = []
    added: list[str] = []
    removed: list[str] = []
    left_out: list[str] = []
    compile_only: list[str] = []
    refused: dict[str, list[str]] = {}
    changes = [
        (layer, change)
        for layer in layers
        for change in git.changes(
            layer.patched.source.repo, layer.patched.source.commit, layer.patched.commit
        )
    ]
    for layer, change in changes:
        patched = layer.patched
        rule = rule_of(layer.paths, change.path)
        if rule is None:
            patch = patched.touched.get(change.path, "the series")
            refused.setdefault(patch, []).append(change.path)
            continue
        if rule.wheel is None:
            left_out.append(change.path)
            if rule.build:
                compile_only.append(change.path)
            continue
        member = rule.wheel + change.path[len(rule.repo) :]
        _check_before(request, source, patched.source, change, member)
        if change.new_blob == git.ABSENT:
            removed.append(member)
            continue
        (added if change.old_blob == git.ABSENT else replaced).append(member)
        blobs.setdefault(patched.source.repo, {})[member] = change.new_blob
        if change.new_mode != change.old_mode:
            executable[member] = change.new_mode == "100755"
    if refused:
        what = "\n".join(f"  {patch}: {', '.join(paths)}" for patch, paths in refused.items())
        msg = (
            f"{request.wheel.name}: an overlay cannot contain the changes of these patches:\n{what}"
        )
        raise BuildError(msg, "these files are not in a wheel: use --wheels compile")
    fresh: dict[str, bytes] = {}
    for repo, members in blobs.items():
        with gitread.reading(repo) as reader:
            fresh |= {member: reader.blob(blob) for member, blob in members.items()}
    return Plan(
        fresh,
        executable,
        tuple(replaced),
        tuple(added),
        tuple(removed),
        tuple(left_out),
        tuple(compile_only),
    )


def _check_before(
    request: Request, wheel: archive.Source, source: Source, change: Change, member: str
) -> None:
    """Refuse a wheel whose file is not the patch's original."""
    data = wheel.read(member) if member in wheel.members else None
    found = git.ABSENT if data is None else _blob_id(data)
    if found == change.old_blob:
        return
    state = "is missing" if data is None else "differs from the pinned source"
    msg = (
        f"{request.wheel.name}: {member} {state}: {git.shown(found)} in the wheel,"
        f" {git.shown(change.old_blob)} at {change.path} in {source.upstream} ({source.origin})"
    )
    remedy = "wheel and source in pins.yaml must be from the same release"
    if source.provider == "git":
        remedy = f"{remedy}; {RELEASE_INSTEAD}"
    raise BuildError(msg, remedy)


def _blob_id(data: bytes) -> str:
    # git's own formula; SHA-1 is only a name here, and the wheel itself is checked by sha256
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


# -- the wheel's own files ---------------------------------------------------------


def _escape(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _rename(member: str, old_stem: str, new_stem: str) -> str:
    for suffix in (".dist-info/", ".data/"):
        if member.startswith(old_stem + suffix):
            return new_stem + member[len(old_stem) :]
    return member


def _metadata(wheel: Wheel, request: Request, name: str, version: str) -> bytes:
    """Return METADATA with name, version and requirements corrected."""
    drop = {canonicalize_name(item) for item in request.drop_requires}
    dropped = set()
    kept = []
    for header in wheel.metadata:
        if drop and header.key == "requires-dist":
            requirement = Requirement(header.value)
            found = canonicalize_name(requirement.name)
            # requirements of extras stay: they are installed on request only
            if found in drop and "extra ==" not in str(requirement.marker):
                dropped.add(found)
                continue
        ours = {"name": f"Name: {name}", "version": f"Version: {version}"}
        kept.append(ours.get(header.key, header.text))
    if missing := sorted(drop - dropped):
        msg = f"{request.wheel.name}: does not require {', '.join(missing)}"
        raise BuildError(msg, "remove the name from drop_requires in pins.yaml")
    kept += [f"Requires-Dist: {requirement}" for requirement in request.add_requires]
    return ("\n".join(kept) + "\n\n" + wheel.description).encode()


def _wheel_file(wheel: Wheel) -> bytes:
    """Return WHEEL with the tags of the file name, which installers use."""
    kept = [header.text for header in wheel.wheel if header.key != "tag"]
    pythons, abis, platforms = (part.split(".") for part in wheel.tags.split("-"))
    kept += [f"Tag: {'-'.join(tag)}" for tag in itertools.product(pythons, abis, platforms)]
    return ("\n".join(kept) + "\n").encode()


def _version_file(data: bytes, old: str, new: str, path: str) -> bytes:
    text = data.decode()
    # a compile's own file has no local part
    public = re.escape(old.partition("+")[0])
    pattern = re.compile(rf"""(=\s*)(['"]){public}(?:\+[\w.]+)?\2""")
    changed, count = pattern.subn(rf"\g<1>\g<2>{new}\g<2>", text)
    if count == 0:
        msg = f"{path}: does not state the version {old}"
        raise BuildError(msg, "fix version_file in pins.yaml")
    return changed.encode()


def _record(
    source: archive.Source, wheel: Wheel, fresh: Mapping[str, bytes], renamed: Mapping[str, str]
) -> bytes:
    """Return RECORD: the known hashes of untouched members, new ones of ours, sorted."""
    itself = f"{wheel.info}/RECORD"
    rows = []
    for member, name in renamed.items():
        if member == itself:
            rows.append((name, "", ""))
        elif member in fresh:
            rows.append((name, _record_hash(fresh[member]), str(len(fresh[member]))))
        elif member in wheel.record:
            rows.append((name, wheel.record[member], str(source.members[member].file_size)))
        else:
            raise source.wrong(f"{member} has no hash in its RECORD")
    out = io.StringIO()
    # files first, RECORD itself last, as every builder does
    order = sorted(rows, key=lambda row: (row[0] == renamed[itself], row[0]))
    csv.writer(out, lineterminator="\n").writerows(order)
    return out.getvalue().encode()


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"
