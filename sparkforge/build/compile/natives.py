"""Which native files a series changes: they are compiled, the others come from the release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from sparkforge.core.errors import BuildError
from sparkforge.pins.compiling import Native
from sparkforge.pins.pins import Upstream
from sparkforge.pins.types import rule_of


def changed(
    name: str,
    upstream: Upstream,
    touched: Mapping[str, str],
    device: str,
    named: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Native, ...]:
    """Return the native files to compile, as pins.yaml describes them.

    Args:
        touched: paths that the series changes, each with its patch's name.
        device: ``cuda`` or ``cpu``: the target's own.
        named: CMake targets that rules of compiling change, each with its patch's name (its
            trailer ``Native``).

    Raises:
        BuildError: a patch changes what no rule of pins.yaml names, or what can't be compiled.
    """
    plan = upstream.compile
    ours = [native for native in plan.natives if native.device in ("empty", device)]
    found: dict[str, Native] = {}
    for path, patch in touched.items():
        built = [native for native in ours if native.made_from(path)]
        for native in built:
            _check(native, f"{patch} changes {path}, from which {native.file} is built")
            found[native.file] = native
        elsewhere = any(native.made_from(path) for native in plan.natives)
        if not elsewhere and rule_of(upstream.paths, path) is None:
            msg = f"{patch} changes {path}, but pins.yaml does not say what is built from it"
            raise BuildError(msg, f"add it to upstreams.{name}.compile.natives or to paths")
    for target, patch in named.items():
        if target not in {native.target for native in plan.natives}:
            msg = (
                f"{patch}: its trailer Native names {target}, but pins.yaml has no such native file"
            )
            raise BuildError(msg, f"add it to upstreams.{name}.compile.natives")
        for native in ours:
            if native.target == target:
                _check(native, f"{patch} changes how {native.file} is compiled")
                found[native.file] = native
    return tuple(found[file] for file in sorted(found))


def reads_externals(compiled: Iterable[Native]) -> bool:
    """Return whether CMake's configuration for these files reads the upstream's externals."""
    return any(native.device != "empty" for native in compiled)


def _check(native: Native, why: str) -> None:
    if native.blocked:
        msg = f"{why}: {native.blocked}"
        raise BuildError(msg, "leave out that patch, or pin what the compile needs")
