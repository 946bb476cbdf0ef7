"""The machine code of our kernels, which the plugin's wheel gets."""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results
from sparkforge.build.lockedcompiler import LockedCompiler
from sparkforge.build.results import KernelsResult
from sparkforge.core.disk import digests, intact, sha256_file
from sparkforge.core.errors import PinsError
from sparkforge.pins.compiling import Plugin
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import code_of


def kernels_item(context: Context, pin: Plugin) -> Item[KernelsResult]:
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

    def make(folder: Path, results: Results) -> KernelsResult:
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

    return Item(
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
