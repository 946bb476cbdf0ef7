"""The overlay wheel: a release wheel with the patched files replaced, without a compiler."""

import csv
import hashlib
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkforge.core import git
from sparkforge.core.errors import BuildError
from sparkforge.pins.types import PathRule, member_of, origin_of, rule_of
from sparkforge.series.patchfile import check_shadows
from sparkforge.series.series import Patched
from sparkforge.wheels import archive, intake
from sparkforge.wheels.intake import Wheel


@dataclass(frozen=True)
class Request:
    """Changes of a verified release wheel, other than its files."""

    wheel: Path
    name: str | None
    local: str
    """The local version part (``cpu.spark.1``)."""
    drop_requires: tuple[str, ...]
    version_file: str | None
    epoch: int
    release: str | None = None
    """The release of its files; None: the wheel's own."""
    add_requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """A patched tree, and the paths of its files in the wheel."""

    patched: Patched
    paths: tuple[PathRule, ...]


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
    """Changed files of the repository that no wheel contains."""
    compile_only: tuple[str, ...] = ()
    """The build rules among them: they did not apply to the release's native code."""


@dataclass(frozen=True, kw_only=True)
class Overlaid(Plan):
    """The overlay wheel: its changes, file and version."""

    path: Path
    version: str


def build(request: Request, layers: Sequence[Layer], folder: Path) -> Overlaid:
    """Write the overlay wheel into ``folder``; without layers only its metadata changes.

    BuildError: a patch changes native sources, or the wheel's file is not the patch's original.
    """
    with archive.opened(request.wheel) as source:
        return write(request, source, plan(request, layers, source), folder)


def renew(request: Request, layer: Layer, folder: Path) -> Overlaid:
    """Write a wheel with its native files, and a tree's files in place of all others.

    For an upstream that publishes a build for CPUs long after its release (``natives`` in
    pins.yaml). ``request.release`` is the tree's.
    """
    fresh: dict[str, bytes] = {}
    executable: dict[str, bool] = {}
    with archive.opened(request.wheel) as source:
        repo = layer.patched.source.repo
        with git.reading(repo) as blob:
            for file in git.changes(repo, git.EMPTY_TREE, layer.patched.commit):
                if (member := member_of(layer.paths, file.path)) is not None:
                    fresh[member] = blob(file.new_blob)
                    executable[member] = file.new_mode == "100755"
        stale = tuple(
            member
            for member in source.members
            if origin_of(layer.paths, member) is not None
            and member not in fresh
            and not member.endswith(".so")
        )
        return write(request, source, Plan(fresh, executable, removed=stale), folder)


def write(request: Request, source: archive.Source, changes: Plan, folder: Path) -> Overlaid:
    """Write ``request.wheel``, open as ``source``, changed and under our name and version."""
    wheel = intake.read(source)
    name = request.name or wheel.name
    version = request.release or wheel.version
    version += f"{'.' if '+' in version else '+'}{request.local}"
    new_stem = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}"
    fresh = dict(changes.fresh)
    if request.version_file is not None:
        stated = fresh.get(request.version_file) or source.read(request.version_file)
        old = request.release or wheel.released
        fresh[request.version_file] = _version_file(stated, old, version, request.version_file)
    record = f"{wheel.info}/RECORD"
    fresh[f"{wheel.info}/METADATA"] = _metadata(wheel, request, name, version)
    # with the tags of the file name, which installers use
    about = [header.text for header in wheel.wheel if header.key != "tag"]
    tags = itertools.product(*(part.split(".") for part in wheel.tags.split("-")))
    about += [f"Tag: {'-'.join(tag)}" for tag in tags]
    fresh[f"{wheel.info}/WHEEL"] = ("\n".join(about) + "\n").encode()
    fresh[record] = b""  # known last
    # a signature of the release's RECORD is not valid for ours
    gone = {*changes.removed, f"{record}.jws", f"{record}.p7s"}
    names = (source.members.keys() | fresh.keys()) - gone
    check_shadows(changes.added, names, request.wheel.name)
    own = (f"{wheel.stem}.dist-info/", f"{wheel.stem}.data/")
    renamed = {
        member: new_stem + member[len(wheel.stem) :] if member.startswith(own) else member
        for member in names
    }
    fresh[record] = _record(source, wheel, fresh, renamed)
    out = folder / f"{new_stem}-{wheel.tags}.whl"
    with archive.writing(out, request.epoch) as writer:
        # metadata last, as the wheel format recommends: readers find it from the end
        for member in sorted(names, key=lambda m: (m.startswith(wheel.info), renamed[m])):
            if member in fresh:
                known = source.members.get(member)
                mode = known.external_attr >> 16 if known is not None else 0
                executable = changes.executable.get(member, bool(mode & 0o100))
                writer.add(renamed[member], fresh[member], executable=executable)
            else:
                writer.copy(source, source.members[member], renamed[member])
    return Overlaid(**vars(changes), path=out, version=version)


def plan(request: Request, layers: Sequence[Layer], source: archive.Source) -> Plan:
    """Find the changes of patched trees in a release wheel; raises as ``build``."""
    fresh: dict[str, bytes] = {}
    executable: dict[str, bool] = {}
    kinds: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        patched, origin = layer.patched, layer.patched.source
        with git.reading(origin.repo) as blob:
            for change in git.changes(origin.repo, origin.commit, patched.commit):
                rule = rule_of(layer.paths, change.path)
                if rule is None:
                    patch = patched.touched.get(change.path, "the series")
                    refused[patch].append(change.path)
                    continue
                if rule.wheel is None:
                    for kind in ("left_out", *(["compile_only"] if rule.build else [])):
                        kinds[kind].append(change.path)
                    continue
                member = rule.wheel + change.path[len(rule.repo) :]
                if (found := _blob(source, member)) != change.old_blob:
                    msg = f"{request.wheel.name}: {member} differs from the pinned source: blob"
                    msg += f" {found[:12]} in the wheel, {change.old_blob[:12]} in"
                    msg += f" {origin.upstream} ({origin.origin})"
                    remedy = "wheel and source in pins.yaml must be from the same release"
                    raise BuildError(msg, "; ".join([remedy, *origin.instead]))
                if change.new_blob == git.ABSENT:
                    kinds["removed"].append(member)
                    continue
                kinds["added" if change.old_blob == git.ABSENT else "replaced"].append(member)
                fresh[member] = blob(change.new_blob)
                if change.new_mode != change.old_mode:
                    executable[member] = change.new_mode == "100755"
    if refused:
        what = "\n".join(f"  {patch}: {', '.join(paths)}" for patch, paths in refused.items())
        msg = f"{request.wheel.name}: an overlay cannot contain the changes of:\n{what}"
        raise BuildError(msg, "these files are not in a wheel: use --wheels compile")
    return Plan(fresh, executable, **{kind: tuple(names) for kind, names in kinds.items()})


def _blob(wheel: archive.Source, member: str) -> str:
    """Return git's name of a member's content."""
    if member not in wheel.members:
        return git.ABSENT
    data = wheel.read(member)
    # git's own formula; SHA-1 is only a name here, and the wheel itself is checked by sha256
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _metadata(wheel: Wheel, request: Request, name: str, version: str) -> bytes:
    """Return METADATA with name, version and requirements corrected."""
    drop = {canonicalize_name(item) for item in request.drop_requires}
    kept = []
    for header in wheel.metadata:
        if drop and header.key == "requires-dist":
            requirement = Requirement(header.value)
            extra = "extra ==" in str(requirement.marker)  # installed on request only
            if canonicalize_name(requirement.name) in drop and not extra:
                continue
        ours = {"name": f"Name: {name}", "version": f"Version: {version}"}
        kept.append(ours.get(header.key, header.text))
    kept += [f"Requires-Dist: {requirement}" for requirement in request.add_requires]
    return ("\n".join(kept) + "\n\n" + wheel.description).encode()


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
            rows.append(archive.record_row(name, fresh[member]))
        elif known := wheel.record.get(member):
            size = str(source.members[member].file_size)
            rows.append((name, archive.stated(known), size))
        else:
            raise source.wrong(f"{member} has no hash in its RECORD")
    out = io.StringIO()
    # files first, RECORD itself last, as every builder does
    order = sorted(rows, key=lambda row: (row[0] == renamed[itself], row[0]))
    csv.writer(out, lineterminator="\n").writerows(order)
    return out.getvalue().encode()
