"""Machine code of the stage ``kernels``, as in the plugin's wheel, without a second compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkforge.build import cached, cubins
from sparkforge.build.context import Context
from sparkforge.build.cubins import Kernel
from sparkforge.build.options import platform_of
from sparkforge.build.stages.kernels import kernels_item
from sparkforge.check.perf.kernelrecord import Recorded
from sparkforge.check.proofs import machinecode
from sparkforge.check.proofs.cuobjdump import Readers
from sparkforge.core import plain
from sparkforge.core.errors import CheckError
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Stage:
    """The stage's machine code.

    Attributes:
        record: what the compiler reported of each kernel, with the sources.
        usages: registers, stack, shared and local memory by cuobjdump, by architecture and kernel.
        spills: kernels that may spill.
    """

    record: Recorded
    usages: Mapping[str, Mapping[str, tuple[int, int, int, int]]]
    spills: tuple[str, ...]


def read(project: Project, readers: Readers) -> Stage:
    """Run the stage, if the store lacks its result, and read its files.

    Raises:
        CheckError: there are no kernels.
        BuildError, FetchError, PinsError: as for a build.
    """
    pin = project.pins.plugin
    if pin is None:
        raise CheckError("there are no decode kernels", "see `plugin` in docs/patches-howto.md")
    name, target = next(iter(project.pins.targets.items()))  # the same for every target
    context = Context.of(project, name, platform_of(target))
    item = kernels_item(context, pin)
    cached.run(context, [item])
    folder = item.path
    manifest = plain.json_of((folder / cubins.MANIFEST).read_bytes())
    listed = {
        one["architecture"]: tuple(Kernel(**kernel) for kernel in one["kernels"])
        for one in manifest["cubins"]
    }
    usages = {
        one["architecture"]: machinecode.usages(
            readers.run("--dump-resource-usage", folder / one["file"])
        )
        for one in manifest["cubins"]
    }
    record = Recorded(item.inputs["sources"], manifest["compiler"], listed)
    return Stage(record, usages, pin.spills)


def problems(stage: Stage, arch: str) -> list[str]:
    """Return the problems of one architecture's machine code, by kernel; none: a proof."""
    listed: Sequence[Kernel] = stage.record.kernels.get(arch, ())
    usages = stage.usages.get(arch, {})
    if not usages:
        return [f"no machine code for sm_{arch}"]
    names = {kernel.name for kernel in listed}
    wrong = [f"{name}: not both in the manifest and in the code" for name in names ^ usages.keys()]
    for kernel in listed:
        if kernel.name not in usages:
            continue
        registers, stack, shared, local = usages[kernel.name]
        if (registers, stack, shared) != (kernel.registers, kernel.local, kernel.shared):
            wrong.append(
                f"{kernel.name}: other registers, stack or shared memory than its manifest"
            )
        if (stack or local or kernel.spills) and kernel.name not in stage.spills:
            wrong.append(f"{kernel.name}: spills: {stack} B stack, {local} B local")
    return sorted(wrong)
