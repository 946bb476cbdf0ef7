"""The contents of the report page, from the checkout and from ``dist/TARGET/``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkforge.build import receipt
from sparkforge.build.context import release_name
from sparkforge.build.receipt import Receipt
from sparkforge.core.hashing import sha256_file
from sparkforge.inspect.perf import kernelrecord
from sparkforge.inspect.report import claims
from sparkforge.inspect.report.claims import Area
from sparkforge.inspect.report.measured import Measured, Part, measured, read
from sparkforge.series.docs import why
from sparkforge.series.series import Series
from sparkforge.sources.project import Checkout


class _Component(Part):
    name: str
    type: str
    version: str = ""


class _Bill(Part):
    components: tuple[_Component, ...]


class _Proof(Part):
    label: str
    ok: bool
    control: bool
    kernels: tuple[Mapping[str, object], ...]
    compile_seconds: float


class Proofs(Part):
    """The report of ``build.py proofs``."""

    nvcc: str
    proofs: tuple[_Proof, ...]


@dataclass(frozen=True)
class Step:
    """An item of the build."""

    stage: str
    label: str
    key: str
    state: str
    seconds: float
    share: float
    """Share of the longest item's time, 0 to 1."""


@dataclass(frozen=True)
class File:
    """A published file."""

    name: str
    sha256: str
    state: Literal["missing", "changed", "as built", "as built, signature beside it"]
    """Whether the file is there, has the receipt's hash, and has a signature beside it."""


@dataclass(frozen=True)
class Change:
    """A patch on the page."""

    upstream: str
    subject: str
    why: str
    risk: str
    test: str


@dataclass(frozen=True)
class Gathered:
    """All contents of the page."""

    target: str
    version: str
    receipt: Receipt
    same_pins: bool
    """Whether pins.yaml is still the build's."""
    steps: Sequence[Step]
    files: Sequence[File]
    kinds: Mapping[str, int]
    """Components of the bill by their type."""
    components: Sequence[tuple[str, str]]
    changes: Sequence[Change]
    kernels: Mapping[str, int]
    """Number of kernels by architecture of the recorded machine code."""
    compiler: str
    proofs: Proofs | None
    """None: `build.py proofs` has not run in this checkout."""
    measured: Sequence[Measured]
    areas: tuple[Area, ...]


def gather(here: Checkout, target: str, all_series: Sequence[Series]) -> Gathered:
    """Read everything.

    Args:
        all_series: those of the target's upstreams.

    Raises:
        UsageError: the target was not built, or another version wrote a file.
        StaleError: the record of the decode kernels is of another version.
    """
    root, pins = here.root, here.pins
    folder = root / "dist" / target
    built = read(folder / receipt.NAME, Receipt, f"build.py --target {target}")
    bill = read(folder / receipt.SBOM, _Bill, f"build.py --target {target}")
    proofs_path = root / "dist" / "proofs" / "report.json"
    recorded = kernelrecord.load()
    return Gathered(
        target=target,
        version=release_name(pins, pins.target(target)),
        receipt=built,
        same_pins=built.pins_sha256 == sha256_file(here.pins_path),
        steps=_steps(built),
        files=[_file(folder, name, digest) for name, digest in sorted(built.files.items())],
        kinds=Counter(part.type for part in bill.components),
        components=[(part.name, part.version) for part in bill.components],
        changes=[
            Change(
                series.upstream,
                patch.subject,
                why(patch),
                patch.trailers.get("Risk", ""),
                patch.trailers.get("Test", ""),
            )
            for series in all_series
            for patch in series.patches
        ],
        kernels={arch: len(kernels) for arch, kernels in recorded.kernels.items()},
        compiler=recorded.compiler,
        proofs=read(proofs_path, Proofs, "build.py proofs") if proofs_path.exists() else None,
        measured=measured(root, folder),
        areas=claims.load(root / "docs" / claims.NAME),
    )


def _steps(built: Receipt) -> Sequence[Step]:
    """Return the items in the order of the build, each with its time."""
    times = built.run.items
    longest = max((time.seconds for time in times.values()), default=0.0) or 1.0
    return [
        Step(item.stage, item.label, item.key, time.state, time.seconds, time.seconds / longest)
        for item in built.items
        if (time := times.get(item.label)) is not None
    ]


def _file(folder: Path, name: str, digest: str) -> File:
    """Compare a published file with the receipt."""
    path = folder / name
    if not path.is_file():
        return File(name, digest, "missing")
    if sha256_file(path) != digest:
        return File(name, digest, "changed")
    signed = path.with_name(path.name + receipt.SUFFIX).is_file()
    return File(name, digest, "as built, signature beside it" if signed else "as built")
