"""The machine code of our kernels, and the wheel of our plugin for vLLM with it.

The wheel is one file for all targets and processors.
"""

import tomllib
from pathlib import Path

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.context import PLUGIN, WHEELS, Context
from sparkforge.build.results import FilesResult, PluginResult, all_intact
from sparkforge.build.stages.thirdparty import compiler, fill, to_fetch, version
from sparkforge.build.stages.wheels import holds_wheel
from sparkforge.core.disk import digests, sha256_file
from sparkforge.core.errors import PinsError
from sparkforge.pins.types import Plugin
from sparkforge.wheels import archive

CUBINS = "decode/cubins"
"""The folder of the package with the machine code and its manifest."""


def _read(root: Path, folder: Path, pattern: str, first: str) -> dict[str, bytes]:
    """Return files by their paths in the checkout; PinsError if the ``first`` is not there."""
    found = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob(pattern))
    }
    if first not in found:
        raise PinsError(f"plugin.folder: {first} does not exist", "restore it: git checkout")
    return found


def kernels_item(context: Context, pin: Plugin) -> Cached[FilesResult]:
    """Return the machine code of a plugin's kernels; PinsError if there are no sources."""
    sources = _read(context.root, (context.root / pin.source).parent, "*.cu*", pin.source)
    lock = context.root / pin.requirements
    inputs = {
        "source": pin.source,
        "sources": digests(sources),
        "architectures": list(pin.architectures),
        "spills": list(pin.spills),
        # of all platforms: the machine code does not depend on where it is compiled
        "compiler": sha256_file(lock),
    }

    def make(folder: Path) -> FilesResult:
        from sparkforge.build import cubins

        with context.store.temporary("kernels") as work:
            fill(context, compiler(lock), work / WHEELS)
            cubins.unpack(work / WHEELS, work / "toolchain")
            for path, data in sources.items():
                (work / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
                (work / "tree" / path).write_bytes(data)
            of = version(lock, "nvidia-cuda-nvrtc")
            return FilesResult(cubins.build(pin, work / "tree", of, work / "toolchain", folder))

    return Cached(
        *("kernels", "kernels", inputs, FilesResult, make),
        valid=all_intact,
        fetches=lambda: to_fetch(context, compiler(lock)),
    )


def plugin_item(
    context: Context, pin: Plugin, kernels: Cached[FilesResult]
) -> Cached[PluginResult]:
    """Return the wheel of a plugin; PinsError if its files are missing or wrong."""
    pyproject = context.root / pin.folder / "pyproject.toml"
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        licenses = {
            file: (pyproject.parent / file).read_bytes() for file in project["license-files"]
        }
        metadata = (
            f"Summary: {project['description']}",
            f"License-Expression: {project['license']}",
            *(f"License-File: {file}" for file in licenses),
            f"Requires-Python: {project['requires-python']}",
        )
        about = (str(project["name"]), project["version"], "py3-none-any", metadata)
        entry_points = project["entry-points"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise PinsError(f"{pyproject}: {error}") from None
    name = about[0].replace("-", "_")
    package = _read(
        context.root, pyproject.parent / name, "*.py", f"{pin.folder}{name}/__init__.py"
    )
    inside = f"{name}/{CUBINS}"
    inputs = {
        "pyproject": sha256_file(pyproject),
        "package": digests(package),
        "licenses": digests(licenses),
        "kernels": kernels.inputs,
        "epoch": context.epoch,
    }

    def make(folder: Path) -> PluginResult:
        code = kernels.result.files
        members = {path.removeprefix(pin.folder): data for path, data in package.items()}
        for file, sha256 in code.items():
            members[f"{inside}/{file}"] = undamaged(kernels.path / file, sha256).read_bytes()
        wheel = archive.Fresh(*about, members, entry_points, licenses)
        path = archive.write_fresh(wheel, context.epoch, folder)
        held = {f"{inside}/{file}": sha256 for file, sha256 in code.items()}
        return PluginResult(path.name, sha256_file(path), about[1], held)

    return Cached("kernels", PLUGIN, inputs, PluginResult, make, (kernels,), valid=holds_wheel)
