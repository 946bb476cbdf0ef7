"""The machine code of our kernels, and the wheel of our plugin for vLLM with it.

The wheel is one file for all targets and processors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.context import PLUGIN, WHEELS, Context
from sparkforge.build.results import KernelsResult, PluginResult
from sparkforge.build.stages.thirdparty import LockedCompiler
from sparkforge.build.stages.wheels import holds_wheel
from sparkforge.core import typed
from sparkforge.core.errors import PinsError
from sparkforge.core.hashing import digests, intact, sha256_file
from sparkforge.pins.compiling import Plugin
from sparkforge.store.store import Artefact, code_of
from sparkforge.wheels import fresh

CUBINS = "decode/cubins"
"""The folder of the package with the machine code and its manifest."""


def kernels_item(context: Context, pin: Plugin) -> Cached[KernelsResult]:
    """Return the machine code of a plugin's kernels.

    Raises:
        PinsError: there are no sources.
    """
    sources = sources_of(context.root, pin)
    compiler = LockedCompiler(context.root / pin.requirements, "nvidia-cuda-nvrtc")
    inputs = {
        "source": pin.source,
        "sources": digests(sources),
        "architectures": list(pin.architectures),
        "spills": list(pin.spills),
        # of all platforms: the machine code does not depend on where it is compiled
        "compiler": sha256_file(compiler.lock),
        "code": code_of(__name__),
    }

    def make(folder: Path) -> KernelsResult:
        from sparkforge.build import cubins

        with context.store.temporary("kernels") as work:
            compiler.fill(context, work / WHEELS)
            cubins.unpack(work / WHEELS, work / "toolchain")
            for path, data in sources.items():
                (work / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
                (work / "tree" / path).write_bytes(data)
            request = cubins.Request(
                work / "tree", pin.source, pin.architectures, pin.spills, compiler.version()
            )
            return KernelsResult(cubins.build(request, work / "toolchain", folder))

    return Cached(
        "kernels",
        "kernels",
        inputs,
        KernelsResult,
        make,
        valid=_complete,
        fetches=lambda: compiler.fetches(context),
    )


def sources_of(root: Path, pin: Plugin) -> dict[str, bytes]:
    """Return the CUDA sources of a plugin by their paths in the checkout.

    Raises:
        PinsError: the one to compile is missing.
    """
    source = root / pin.source
    if not source.is_file():
        raise PinsError(f"plugin.folder: {pin.source} does not exist", "restore it: git checkout")
    paths = sorted(path for path in source.parent.rglob("*.cu*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def _complete(artefact: Artefact[KernelsResult]) -> bool:
    return all(
        intact(artefact.path / file, sha256) for file, sha256 in artefact.result.files.items()
    )


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


def plugin_item(
    context: Context, pin: Plugin, kernels: Cached[KernelsResult]
) -> Cached[PluginResult]:
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

    def make(folder: Path) -> PluginResult:
        files = kernels.result.files
        members = {path.removeprefix(pin.folder): data for path, data in package.items()}
        for file, sha256 in files.items():
            path = undamaged(kernels.path / file, sha256)
            members[f"{inside}/{file}"] = path.read_bytes()
        metadata = (
            f"Summary: {described.description}",
            f"License-Expression: {described.license}",
            *(f"License-File: {name}" for name in licenses),
            f"Requires-Python: {described.python}",
        )
        wheel = fresh.Fresh(
            described.name,
            described.version,
            "py3-none-any",
            metadata,
            members,
            described.entry_points,
            licenses,
        )
        path = fresh.write(wheel, context.epoch, folder)
        return PluginResult(
            path.name,
            sha256_file(path),
            described.version,
            {f"{inside}/{file}": sha256 for file, sha256 in files.items()},
        )

    return Cached(
        "kernels", PLUGIN, inputs, PluginResult, make, needs=(kernels,), valid=holds_wheel
    )


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
