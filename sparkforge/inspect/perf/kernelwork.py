"""The work of the decode kernels by their machine code, recorded in the checkout.

The tables in docs/ come from this record, so they need neither a compiler nor a GPU.
`build.py proofs decode-kernels` compares it with the machine code, and writes it with --record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.stages.kernels import sources_of
from sparkforge.core import plain, typed
from sparkforge.core.errors import StaleError
from sparkforge.core.hashing import digests
from sparkforge.inspect.perf.machines import GB10, H200
from sparkforge.inspect.proofs.flow import Flow
from sparkforge.inspect.proofs.stagekernels import Read
from sparkforge.pins.compiling import Plugin

FILE = Path(__file__).with_name("decode_kernels.json")
COMMAND = "proofs decode-kernels --record"
_ARCHES = (GB10.arch, H200.arch)


@dataclass(frozen=True)
class Work:
    """A kernel."""

    name: str
    threads: int
    """Of a block."""
    registers: int
    """Of a thread."""
    shared: int
    """Static shared memory of a block, bytes."""
    flow: Flow | None
    """Of a warp; None: it reads no weights."""


@dataclass(frozen=True)
class Recorded:
    """The kernels of each architecture."""

    sources: Mapping[str, str]
    """sha256 of each of their sources."""
    compiler: str
    kernels: Mapping[str, tuple[Work, ...]]


def of(found: Read) -> Recorded:
    """Return the record of machine code."""
    kernels = {
        arch: tuple(
            Work(
                code.kernel.name, code.threads, code.kernel.registers, code.kernel.shared, code.work
            )
            for code in sorted(found.decoded[arch], key=lambda code: code.kernel.name)
        )
        for arch in _ARCHES
    }
    return Recorded(dict(found.sources), found.manifest.compiler, kernels)


def text(recorded: Recorded) -> str:
    """Return the text of a record's file, with a line for each kernel."""
    values = typed.as_json(recorded)
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
    """Return the record; StaleError if there is none of this version."""
    found = typed.load(Recorded, plain.json_of(path.read_bytes())) if path.is_file() else None
    if found is None:
        hint = f"update it: build.py {COMMAND}, then build.py docs"
        raise StaleError(f"{path}: missing, or of another version", hint)
    return found


def check(recorded: Recorded, root: Path, pin: Plugin) -> None:
    """Compare the record with the kernels' sources in a checkout.

    Raises:
        StaleError: it is of other sources.
    """
    now = digests(sources_of(root, pin))
    if now != recorded.sources:
        differ = sorted(
            path
            for path in now.keys() | recorded.sources.keys()
            if now.get(path) != recorded.sources.get(path)
        )
        msg = f"{FILE}: the kernels have changed since: {', '.join(differ)}"
        raise StaleError(msg, f"update it: build.py {COMMAND}, then build.py docs")
