"""Modules → units to compile."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter

from sparkforge.build.packs.modules import Module
from sparkforge.core.disk import key_of
from sparkforge.core.errors import BuildError, CommandError
from sparkforge.core.run import call

_PROGRAM = Path(__file__).with_name("describe.py")
GENERATED = "generated/"


@dataclass(frozen=True)
class Unit:
    """One source and its flags; paths are relative to the tree."""

    source: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Described:
    """The sources of a module, as FlashInfer compiles it.

    Attributes:
        link: further flags of the linker.
        device_link: nvcc links it, which no module here needs.
    """

    name: str
    link: tuple[str, ...]
    device_link: bool
    units: tuple[Unit, ...]


def describe(tree: Path, arch: str, modules: Sequence[Module]) -> tuple[Described, ...]:
    """Return the sources of modules; writes generated ones into the tree.

    Args:
        arch: e.g. ``12.1f``.

    Raises:
        BuildError: FlashInfer's code has changed so that it cannot be asked, or gives a module
            another name than the list.
    """
    request = tree / "request.json"
    asked = [{"generator": module.generator, "arguments": module.arguments} for module in modules]
    request.write_text(json.dumps({"arch": arch, "modules": asked}), encoding="utf-8")
    try:
        # isolated but for our own environment, which has jinja2, filelock and others
        out = call(sys.executable, "-I", _PROGRAM, tree, request).stdout
    except CommandError as error:
        msg = f"FlashInfer does not describe its modules as expected:\n{error}"
        raise BuildError(msg, "update sparkforge/build/packs to its release") from error
    found = TypeAdapter(tuple[Described, ...]).validate_json(out.splitlines()[-1])
    for module, described in zip(modules, found, strict=True):
        if module.name != described.name:
            msg = f"FlashInfer calls the module {module.name} {described.name}"
            raise BuildError(msg, "update sparkforge/build/packs/modules.py")
        if described.device_link:
            msg = f"{module.name} needs nvcc as its linker"
            raise BuildError(msg, "leave it out of sparkforge/build/packs/modules.py")
    return found


def contents(tree: Path, unit: Unit) -> str:
    """Return a digest of a unit's source, and of the headers that were generated for it."""
    path = tree / unit.source
    files = [path]
    if unit.source.startswith(GENERATED):
        files += sorted(
            file for file in path.parent.iterdir() if file.suffix not in (".cu", ".cpp")
        )
    return key_of({file.name: sha256(file.read_bytes()).hexdigest() for file in files})
