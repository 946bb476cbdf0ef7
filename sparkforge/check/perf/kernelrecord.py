"""Resources of the decode kernels by architecture, recorded in the checkout.

`build.py docs` makes the table of docs/kernels.md from this record, without a compiler or a GPU.
tools/proofs compares it with the machine code, and writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.cubins import Kernel
from sparkforge.build.stages.kernels import sources_of
from sparkforge.core import pages, plain
from sparkforge.core.disk import digests
from sparkforge.core.errors import PinsError
from sparkforge.pins.compiling import Plugin

FILE = Path(__file__).with_name("decode_kernels.json")
HINT = "update it: .venv/bin/python -m tools.proofs decode-kernels --record, then build.py docs"


@dataclass(frozen=True)
class Recorded:
    """The kernels of each architecture.

    Attributes:
        sources: sha256 of each of their sources.
        compiler: its version.
    """

    sources: Mapping[str, str]
    compiler: str
    kernels: Mapping[str, tuple[Kernel, ...]]


def text(recorded: Recorded) -> str:
    """Return the text of a record's file, with a line for each kernel."""
    values = plain.as_json(recorded)
    arches = ",\n".join(
        f'  "{arch}": [\n' + ",\n".join(f"   {json.dumps(kernel)}" for kernel in kernels) + "\n  ]"
        for arch, kernels in values["kernels"].items()
    )
    sources = json.dumps(values["sources"], indent=2).replace("\n", "\n ")
    compiler = json.dumps(values["compiler"])
    return (
        f'{{\n "sources": {sources},\n "compiler": {compiler},\n "kernels": {{\n{arches}\n }}\n}}\n'
    )


def load(path: Path = FILE) -> Recorded:
    """Return the record; PinsError if there is none of this version."""
    found = plain.load(Recorded, plain.json_of(path.read_bytes())) if path.is_file() else None
    if found is None:
        raise PinsError(f"{path}: missing, or of another version", HINT)
    return found


def check(recorded: Recorded, root: Path, pin: Plugin) -> None:
    """Compare the record with the kernels' sources in a checkout.

    Raises:
        PinsError: it is of other sources.
    """
    now, then = digests(sources_of(root, pin)), recorded.sources
    if differ := sorted(
        path for path in now.keys() | then.keys() if now.get(path) != then.get(path)
    ):
        raise PinsError(f"{FILE}: the kernels have changed since: {', '.join(differ)}", HINT)


def markdown(recorded: Recorded) -> str:
    """Return the table of docs/kernels.md."""
    arches = list(recorded.kernels)
    by_name: dict[str, dict[str, Kernel]] = {}
    for arch, kernels in recorded.kernels.items():
        for kernel in kernels:
            by_name.setdefault(kernel.name, {})[arch] = kernel
    head = ("kernel", *(f"registers, {arch}" for arch in arches), "shared, bytes")
    rows, spills = [], []
    for name, found in sorted(by_name.items()):
        shared = sorted({kernel.shared for kernel in found.values()})
        registers = (str(found[arch].registers) if arch in found else "-" for arch in arches)
        ends = shared if len(shared) == 1 else (shared[0], shared[-1])
        rows.append((f"`{name}`", *registers, " to ".join(f"{size:,}" for size in ends)))
        if most := max(kernel.spills + kernel.local for kernel in found.values()):
            spills.append(f"`{name}`: {most} bytes")
    table = pages.table(head, rows, right=range(1, len(head)))
    return f"{table}\n\nSpills and stack: {', '.join(spills) or 'none'}."
