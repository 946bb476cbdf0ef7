"""The compiled wheel: compiled files, and the release's files for the rest.

Native files that no patch touches are the release's own (``--native patched``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from sparkforge.build.compile import natives
from sparkforge.build.compile.recipe import Recipe
from sparkforge.build.compile.running import Made
from sparkforge.build.results import NativeFile
from sparkforge.core import git
from sparkforge.core.errors import CompileError
from sparkforge.pins.pathmap import member_of
from sparkforge.series.series import Patched
from sparkforge.wheels import archive, intake, overlay

_ELF = b"\x7fELF"


@dataclass(frozen=True)
class Assembled:
    """A finished wheel."""

    wheel: overlay.Overlaid
    natives: Mapping[str, NativeFile]
    """sha256 of each native file, and where it is from: ``compiled`` or ``release``."""
    differs: tuple[str, ...]
    """Unpatched files that differ from the release."""


def assemble(
    request: overlay.Request,
    recipe: Recipe,
    made: Made,
    own: Patched,
    carried: Sequence[overlay.Layer],
    folder: Path,
) -> Assembled:
    """Make a wheel of compiled files, and of the release's files for the rest.

    Args:
        carried: series that go onto files of the release inside of this wheel.

    Raises:
        CompileError: the build lacks a file of the release, and no rule of pins.yaml says why.
    """
    everything = recipe.decision.everything
    with archive.opened(request.wheel) as release, archive.opened(made.wheel) as ours:
        in_release = _payload(release)
        in_ours = _payload(ours)
        changed = _changed(own, recipe)
        taken, lost = natives.missing(
            recipe.upstream, in_release, {*in_ours, *made.natives}, everything=everything
        )
        if lost := [member for member in lost if changed.get(member) != git.ABSENT]:
            msg = (
                f"{request.wheel.name}: the build did not create {lost[0]} ({len(lost)} such files)"
            )
            remedy = "if this tree does not build it, add it to compile.from_release in pins.yaml"
            raise CompileError(msg, remedy)
        base = made.wheel if everything else request.wheel
        if everything:
            fresh = {member: release.read(member) for member in taken}
        else:
            layers = overlay.plan(request, carried, release)
            fresh = {**layers.fresh, **_different(release, ours, in_ours)}
            fresh |= {member: path.read_bytes() for member, path in made.natives.items()}
        removed = tuple(
            sorted(m for m, blob in changed.items() if blob == git.ABSENT and m in in_release)
        )
        plain = sorted(m for m in fresh if m not in made.natives and m != request.version_file)
        plan = overlay.Plan(
            fresh=fresh,
            # ours may set another mode than the release has
            executable={
                m: bool(ours.members[m].external_attr >> 16 & 0o100) for m in fresh if m in in_ours
            },
            replaced=tuple(m for m in plain if m in in_release and m not in taken),
            added=tuple(m for m in plain if m not in in_release),
            removed=() if everything else removed,
        )
        asked = overlay.Request(
            wheel=base,
            name=request.name,
            local=request.local,
            drop_requires=request.drop_requires,
            version_file=request.version_file,
            epoch=request.epoch,
        )
        wheel = overlay.write(asked, ours if everything else release, plan, folder)
        patched = set(changed) | {m for layer in carried for m in _members(layer)}
        differs = tuple(m for m in (*plan.replaced, *plan.added) if m not in patched)
        return Assembled(wheel, _natives(release, ours, taken, made), differs)


def _payload(source: archive.Source) -> set[str]:
    info = f"{intake.read(source).info}/"
    return {member for member in source.members if not member.startswith(info)}


def _different(
    release: archive.Source, ours: archive.Source, members: set[str]
) -> dict[str, bytes]:
    """Return our members that differ from the release's; the others are copied from it."""
    result = {}
    for member in members:
        info, known = ours.members[member], release.members.get(member)
        if known is None or (info.CRC, info.file_size) != (known.CRC, known.file_size):
            result[member] = ours.read(member)
    return result


def _changed(own: Patched, recipe: Recipe) -> dict[str, str]:
    """Return the wheel's members that the series changes, each with its blob afterwards."""
    result = {}
    for change in git.changes(own.source.repo, own.source.commit, own.commit):
        if (member := member_of(recipe.upstream.paths, change.path)) is not None:
            result[member] = change.new_blob
    return result


def _members(layer: overlay.Layer) -> list[str]:
    """Return the wheel's members that a series changes."""
    found = (member_of(layer.paths, path) for path in layer.patched.touched)
    return [member for member in found if member is not None]


def _natives(
    release: archive.Source, ours: archive.Source, taken: Sequence[str], made: Made
) -> dict[str, NativeFile]:
    """Return the sha256 and the origin of every native file of the wheel."""
    found = {}
    for member in taken:
        data = release.read(member)
        if member not in made.natives and data.startswith(_ELF):
            found[member] = NativeFile(sha256(data).hexdigest(), "release")
    for member in ours.members:
        data = ours.read(member) if member.endswith(".so") else b""
        if data.startswith(_ELF):
            found[member] = NativeFile(sha256(data).hexdigest(), "compiled")
    for member, path in made.natives.items():
        found[member] = NativeFile(sha256(path.read_bytes()).hexdigest(), "compiled")
    return dict(sorted(found.items()))
