"""The pinned Triton and triton_kernels, with our series or without.

Kernels are compiled by Triton and ptxas for a made-up device, and not run.
"""

import json
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.build.context import Context
from sparkforge.build.stages.wheels import release_wheel
from sparkforge.check.proofs import Readers
from sparkforge.core import git
from sparkforge.core.run import call
from sparkforge.store.store import code_of
from sparkforge.wheels import overlay
from tests.patches import trees

_WHEEL = "cp311-amd64"
_PROBE = Path(__file__).parent / "probes" / "probe_scatter.py"
# files of Triton's wheel for compiling: no profiler, no debugger's plugins
_PARTS = ("triton/", "triton-")
_LEFT_OUT = (
    "triton/backends/nvidia/lib/cupti/",
    "triton/instrumentation/",
    "triton/plugins/",
    "triton/FileCheck",
    "triton/_C/libproton.so",
)
SHARED_LIMIT = 101_376  # bytes of a block on SM12x


@dataclass(frozen=True)
class PackagesResult:
    """Triton, triton_kernels or both, in the artefact's folder."""


def packages(context: Context, *, triton: bool = True, kernels: bool = True) -> Path:
    """Return a folder with Triton and triton_kernels for a path.

    Args:
        triton, kernels: whether with our series.
    """
    file = context.pins.upstream("triton").files[_WHEEL]
    layer = trees.layer("triton", patched=triton)
    ours = trees.patched_of("triton-kernels", patched=kernels)
    wheel = release_wheel(context, "triton", file)

    def release(folder: Path) -> PackagesResult:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if info.filename.startswith(_PARTS) and not info.filename.startswith(_LEFT_OUT):
                    path = Path(archive.extract(info, folder / "files"))
                    executable = (info.external_attr >> 16) & 0o100
                    path.chmod(0o755 if executable or info.is_dir() else 0o644)
        return PackagesResult()

    def make(folder: Path) -> PackagesResult:
        unpacked = context.store.build(
            "test-triton", {"wheel": file.sha256}, PackagesResult, release
        )
        shutil.copytree(unpacked.path / "files", folder, copy_function=os.link, dirs_exist_ok=True)
        request = overlay.Request(
            wheel=wheel,
            name=None,
            local="proof",
            drop_requires=(),
            version_file=None,
            epoch=context.epoch,
        )
        with context.store.temporary("triton") as work:
            made = overlay.build(request, [layer], work)
            with zipfile.ZipFile(made.path) as patched:
                for member in (*made.replaced, *made.added):
                    (folder / member).unlink(missing_ok=True)  # the release's own
                    patched.extract(member, folder)
        tree = f"{ours.commit}:python/triton_kernels"
        git.unpack(ours.source.repo, tree, ["triton_kernels"], folder / "kernels")
        return PackagesResult()

    inputs = {
        "wheel": file.sha256,
        "triton": layer.patched.tree,
        "triton_kernels": ours.tree,
        "code": code_of("sparkforge.wheels.overlay"),
    }
    return context.store.build("test-triton", inputs, PackagesResult, make).path


def build(
    python: Path, packages: Path, capability: str, readers: Readers, out: Path
) -> list[dict[str, Any]]:
    """Build the scattering matmul and read its machine code.

    Args:
        python: an interpreter with PyTorch.
        capability: e.g. ``121``.
        out: a new folder.

    Returns:
        What the probe says of each tile height, and ``code``, the kernels in its cubins.
    """
    path = f"{packages}:{packages / 'kernels'}"
    env = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(out / "cache"), "TMPDIR": str(out)}
    call(python, "-P", _PROBE, capability, out, env=env)
    cases: list[dict[str, Any]] = json.loads((out / "kernels.json").read_text())["cases"]
    for case in cases:
        cubins = [out / f"{kernel['name']}.cubin" for kernel in case["kernels"]]
        case["code"] = [found for cubin in cubins for found in readers.read(cubin)]
    return cases
