"""The native files that a series changes are compiled; the others come from the release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparkforge.core.errors import CompileError
from sparkforge.pins.compiling import Native, below
from sparkforge.pins.pathmap import rule_of
from sparkforge.pins.pins import Upstream

PATCHED, ALL = "patched", "all"


@dataclass(frozen=True)
class Decision:
    """The native files that are compiled."""

    everything: bool
    """Natives and all, in one build of the wheel (``--native all``)."""
    compiled: tuple[Native, ...] = ()
    """The natives that are built one by one, since a patch touches their sources."""

    @property
    def fetches(self) -> bool:
        """The configuration reads the upstream's externals."""
        return self.everything or any(native.device != "empty" for native in self.compiled)


def decide(
    name: str,
    upstream: Upstream,
    touched: Mapping[str, str],
    native: str,
    device: str,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Decision:
    """Decide from pins.yaml alone.

    Args:
        touched: paths that the series changes, each with its patch's name.
        native: ``patched`` or ``all``.
        device: ``cuda`` or ``cpu``: the target's own.
        named: CMake targets that rules of compiling change, each with its patch's name (its
            trailer ``Native``).

    Raises:
        CompileError: a patch changes what no rule of pins.yaml names, or what can't be compiled.
    """
    plan = upstream.compile
    ours = [entry for entry in plan.natives if entry.device in ("empty", device)]
    if native == ALL:
        blocked = [(entry.file, entry.blocked) for entry in ours if entry.blocked]
        if plan.blocked:
            blocked = [(f"{name} {upstream.version}", plan.blocked)]
        if blocked:
            file, why = blocked[0]
            msg = f"{file} cannot be compiled: {why}"
            raise CompileError(msg, f"use the release's native files: --native {PATCHED}")
        return Decision(everything=bool(plan.natives))
    compiled: dict[str, Native] = {}
    for path, patch in touched.items():
        made = [entry for entry in ours if entry.made_from(path)]
        for entry in made:
            _refuse_blocked(entry, f"{patch} changes {path}, from which {entry.file} is built")
            compiled[entry.file] = entry
        if not made and not _known(path, upstream):
            msg = f"{patch} changes {path}, but pins.yaml does not say what is built from it"
            remedy = (
                f"add it to upstreams.{name}.compile.natives or to paths; or use --native {ALL}"
            )
            raise CompileError(msg, remedy)
    for target, patch in named.items():
        if target not in {entry.target for entry in plan.natives}:
            msg = (
                f"{patch}: its trailer Native names {target}, but pins.yaml has no such native file"
            )
            raise CompileError(msg, f"add it to upstreams.{name}.compile.natives")
        for entry in ours:
            if entry.target == target:
                _refuse_blocked(entry, f"{patch} changes how {entry.file} is compiled")
                compiled[entry.file] = entry
    return Decision(everything=False, compiled=tuple(compiled[file] for file in sorted(compiled)))


def _refuse_blocked(native: Native, why: str) -> None:
    if native.blocked:
        msg = f"{why}: {native.blocked}"
        raise CompileError(msg, "leave out that patch, or pin what the compile needs")


def _known(path: str, upstream: Upstream) -> bool:
    """Return whether a file is no native source, or one of natives for other devices."""
    elsewhere = any(native.made_from(path) for native in upstream.compile.natives)
    return elsewhere or rule_of(upstream.paths, path) is not None


def missing(
    upstream: Upstream, released: Iterable[str], made: Iterable[str], *, everything: bool
) -> tuple[list[str], list[str]]:
    """Sort the release's files that a compile did not make.

    Returns:
        Those that are taken from the release, and those that nothing explains.
    """
    plan = upstream.compile
    places = plan.always_release
    if not everything:
        places += plan.from_release + tuple(native.file for native in plan.natives)
    lacking = sorted(set(released) - set(made))
    taken = [member for member in lacking if below(member, places)]
    # a whole compile leaves out what its architectures do not need
    lost = [] if everything else [member for member in lacking if member not in taken]
    return taken, lost
