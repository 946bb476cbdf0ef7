"""The compiled wheel: compiled files, and the release's files for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from sparkforge.build.results import NativeFile
from sparkforge.core import git
from sparkforge.core.errors import BuildError
from sparkforge.pins.compiling import Native
from sparkforge.pins.pins import Upstream
from sparkforge.pins.types import below, member_of
from sparkforge.wheels import archive, intake, overlay

_ELF = b"\x7fELF"


@dataclass(frozen=True)
class Built:
    """Results of a compile: the wheel, and native files by their path in it."""

    wheel: Path
    natives: Mapping[str, bytes]


@dataclass(frozen=True)
class Assembled:
    """A finished wheel."""

    wheel: overlay.Overlaid
    natives: Mapping[str, NativeFile]
    """sha256 of each native file, and where it is from: ``compiled`` or ``release``."""
    differs: tuple[str, ...]
    """Unpatched files that differ from the release."""


def built(out: Path, native: str, wanted: Sequence[Native]) -> Built:
    """Read the results of a compile.

    Args:
        out: folder with the wheel.
        native: folder below it with the native files.

    Raises:
        BuildError: one of them is missing.
    """
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        msg = f"the build wrote {len(wheels)} wheels instead of one"
        raise BuildError(msg, "see its output above")
    found = {}
    for file in wanted:
        path = out / native / file.file
        if not path.is_file():
            msg = f"CMake's target {file.target} installed no {file.file}"
            raise BuildError(msg, "fix compile.natives in pins.yaml")
        found[file.file] = path.read_bytes()
    return Built(wheels[0], found)


def assemble(
    request: overlay.Request,
    made: Built,
    own: overlay.Layer,
    carried: Sequence[overlay.Layer],
    folder: Path,
    upstream: Upstream,
) -> Assembled:
    """Make a wheel of compiled files, and of the release's files for the rest.

    Args:
        own: the tree that was compiled.
        carried: series that go onto files of the release inside of this wheel.

    Raises:
        BuildError: the build lacks a file of the release, and no rule of pins.yaml says why.
    """
    patched = own.patched
    changed = {
        member: change.new_blob
        for change in git.changes(patched.source.repo, patched.source.commit, patched.commit)
        if (member := member_of(own.paths, change.path)) is not None
    }
    with archive.opened(request.wheel) as release, archive.opened(made.wheel) as ours:
        in_release, in_ours = _payload(release), _payload(ours)
        removed = {member for member, blob in changed.items() if blob == git.ABSENT}
        missing = in_release - in_ours - made.natives.keys() - removed
        plan = upstream.compile
        files = tuple(native.file for native in plan.natives)
        released = {member for member in missing if below(member, (*plan.from_release, *files))}
        if lost := sorted(missing - released):
            msg = f"the build of {request.wheel.name} wrote no {lost[0]} ({len(lost)} such files)"
            remedy = "if this tree does not build it, add it to compile.from_release in pins.yaml"
            raise BuildError(msg, remedy)
        different = {m: ours.read(m) for m in in_ours if not _same(release, ours, m)}
        fresh = {**overlay.plan(request, carried, release).fresh, **different, **made.natives}
        plain = sorted(fresh.keys() - made.natives.keys() - {request.version_file})
        changes = overlay.Plan(
            fresh=fresh,
            # ours may set another mode than the release has
            executable={
                m: bool(ours.members[m].external_attr >> 16 & 0o100) for m in fresh if m in in_ours
            },
            replaced=tuple(m for m in plain if m in in_release and m not in released),
            added=tuple(m for m in plain if m not in in_release),
            removed=tuple(sorted(removed & in_release)),
        )
        wheel = overlay.write(request, release, changes, folder)
        carried_members = {
            member_of(layer.paths, path) for layer in carried for path in layer.patched.touched
        }
        differs = tuple(
            member
            for member in (*changes.replaced, *changes.added)
            if member not in changed and member not in carried_members
        )
        native = {m: NativeFile(_sha256(data), "compiled") for m, data in made.natives.items()}
        for member in released - native.keys():
            if (data := release.read(member)).startswith(_ELF):
                native[member] = NativeFile(_sha256(data), "release")
        return Assembled(wheel, dict(sorted(native.items())), differs)


def _payload(source: archive.Source) -> set[str]:
    info = f"{intake.read(source).info}/"
    return {member for member in source.members if not member.startswith(info)}


def _same(release: archive.Source, ours: archive.Source, member: str) -> bool:
    """Return whether the release has the same file: it is copied from there."""
    info, known = ours.members[member], release.members.get(member)
    return known is not None and (info.CRC, info.file_size) == (known.CRC, known.file_size)


def _sha256(data: bytes) -> str:
    return sha256(data).hexdigest()
