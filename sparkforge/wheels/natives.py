"""A wheel of an older release's native files, and of the pinned release's other files.

A build for CPUs may be published long after its release. Until then its target takes the native
files of the build before, marked as such in pins.yaml (``natives``) and in the wheel's version.
"""

from __future__ import annotations

from pathlib import Path

from sparkforge.core import gitread
from sparkforge.pins.types import member_of, origin_of
from sparkforge.wheels import archive
from sparkforge.wheels.overlay import Layer, Overlaid, Plan, Request, write

_NATIVE = ".so"


def renew(request: Request, layer: Layer, folder: Path) -> Overlaid:
    """Write a wheel with its native files, and a tree's files in place of all others.

    Args:
        request: its ``release`` is the tree's.
        layer: the tree, without a series.
    """
    with archive.opened(request.wheel) as source:
        fresh: dict[str, bytes] = {}
        executable: dict[str, bool] = {}
        with gitread.reading(layer.patched.source.repo) as reader:
            for file in reader.files(layer.patched.commit):
                if (member := member_of(layer.paths, file.path)) is not None:
                    fresh[member] = reader.blob(file.id)
                    executable[member] = file.mode == "100755"
        stale = tuple(
            member
            for member in source.members
            if origin_of(layer.paths, member) is not None
            and member not in fresh
            and not member.endswith(_NATIVE)
        )
        return write(request, source, Plan(fresh, executable, removed=stale), folder)
