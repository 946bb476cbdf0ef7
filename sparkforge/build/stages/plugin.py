"""The wheel of our plugin for vLLM: its Python package, and the machine code of its kernels.

It is one file for all targets and processors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sparkforge.build.context import PLUGIN, Context
from sparkforge.build.item import Item, Results, holds_wheel, undamaged
from sparkforge.build.results import KernelsResult, PluginResult
from sparkforge.core import typed
from sparkforge.core.errors import PinsError
from sparkforge.core.hashing import digests, sha256_file
from sparkforge.pins.compiling import Plugin
from sparkforge.store.codekey import code_of
from sparkforge.wheels import archive

CUBINS = "decode/cubins"
"""The folder of the package with the machine code and its manifest."""


@dataclass(frozen=True)
class Described:
    """The table ``project`` of a plugin's pyproject.toml."""

    name: str
    version: str
    description: str
    license: str
    licenses: Annotated[tuple[str, ...], Field(alias="license-files")]
    """Files beside the table."""
    python: Annotated[str, Field(alias="requires-python")]
    entry_points: Annotated[Mapping[str, Mapping[str, str]], Field(alias="entry-points")]

    @property
    def package(self) -> str:
        """Its Python package."""
        return self.name.replace("-", "_")


def plugin_item(context: Context, pin: Plugin, kernels: Item[KernelsResult]) -> Item[PluginResult]:
    """Return the wheel of a plugin.

    Raises:
        PinsError: its pyproject.toml or its package is missing or wrong.
    """
    pyproject = context.root / pin.folder / "pyproject.toml"
    described = _described(pyproject)
    package = _package(context.root, f"{pin.folder}{described.package}")
    licenses = _licenses(pyproject.parent, described.licenses)
    inside = f"{described.package}/{CUBINS}"
    inputs = {
        "pyproject": sha256_file(pyproject),
        "package": digests(package),
        "licenses": digests(licenses),
        "kernels": kernels.inputs,
        "epoch": context.epoch,
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> PluginResult:
        built = results.artefact(kernels)
        files = built.result.files
        members = {path.removeprefix(pin.folder): data for path, data in package.items()}
        for file, sha256 in files.items():
            path = undamaged(built.path / file, sha256, "compiles the kernels again")
            members[f"{inside}/{file}"] = path.read_bytes()
        metadata = (
            f"Summary: {described.description}",
            f"License-Expression: {described.license}",
            *(f"License-File: {name}" for name in licenses),
            f"Requires-Python: {described.python}",
        )
        wheel = archive.Fresh(
            described.name,
            described.version,
            "py3-none-any",
            metadata,
            members,
            described.entry_points,
            licenses,
        )
        path = archive.write_fresh(wheel, context.epoch, folder)
        return PluginResult(
            path.name,
            sha256_file(path),
            described.version,
            {f"{inside}/{file}": sha256 for file, sha256 in files.items()},
        )

    return Item("kernels", PLUGIN, inputs, PluginResult, make, needs=(kernels,), valid=holds_wheel)


def _described(pyproject: Path) -> Described:
    """Return what a plugin says of itself; PinsError if it is missing, or another than needed."""
    try:
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError) as error:
        raise PinsError(f"{pyproject}: {error!r}", "restore it: git checkout") from None
    described = typed.load(Described, table)
    if described is None:
        fields = "name, version, description, license, license-files, requires-python, entry-points"
        raise PinsError(f"{pyproject}: [project] must have {fields}, and nothing else")
    return described


def _package(root: Path, name: str) -> dict[str, bytes]:
    """Return the Python files of a package by their paths in the checkout.

    Raises:
        PinsError: it is none.
    """
    if not (root / name / "__init__.py").is_file():
        raise PinsError(f"plugin.folder: {name} is no package", "restore it: git checkout")
    paths = sorted((root / name).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def _licenses(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the texts that a license asks to be passed on; PinsError if one is missing."""
    try:
        return {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise PinsError(f"license-files: {error}", "restore it: git checkout") from None
