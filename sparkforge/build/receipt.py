"""The receipt: inputs, results and times of a build. Written last."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge import __version__
from sparkforge.build.item import Results
from sparkforge.build.results import ImageResult
from sparkforge.core import plain
from sparkforge.core.disk import intact, read_json, sha256_file
from sparkforge.core.errors import UsageError

if TYPE_CHECKING:
    from sparkforge.build.context import Context

SCHEMA = 1
NAME = "receipt.json"
# files next to the receipt, which names them by sha256
SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.intoto.json"
SUMS = "SHA256SUMS"
SUFFIX = ".sigstore.json"
"""Suffix of a file's name: cosign's bundle with its signature."""


@dataclass(frozen=True)
class Made:
    """An item of the build."""

    stage: str
    label: str
    key: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    """Its result's fields."""


@dataclass(frozen=True)
class Time:
    """Action of the run for an item."""

    state: str
    """``made`` or ``in the store``."""
    seconds: float
    """Time that making it took, in this run or an earlier one."""


@dataclass(frozen=True)
class Run:
    """The part that depends on the run: two builds of the same inputs agree in everything else."""

    machine: str
    python: str
    seconds: float
    items: Mapping[str, Time]
    """By label."""


@dataclass(frozen=True)
class Receipt:
    """The receipt of a build."""

    schema: int
    sparkforge: str
    """The version that wrote it."""
    target: str
    platform: str
    pins_sha256: str
    items: tuple[Made, ...]
    run: Run
    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of each published file; none where the build stopped before its wheels."""

    @property
    def image(self) -> ImageResult | None:
        """The image; None where none was built.

        Raises:
            UsageError: another version wrote the receipt.
        """
        for item in self.items:
            if item.stage == "image" and "image_id" in item.outputs:
                image = plain.load(ImageResult, item.outputs, exact=False)
                if image is None:
                    msg = "another version of sparkforge wrote the receipt's record of the image"
                    raise UsageError(msg, "use that version, or build the image again")
                return image
        return None


def load(path: Path) -> Receipt | None:
    """Read a receipt; None if it is missing or invalid: the user may have edited the file."""
    return plain.load(Receipt, read_json(path), exact=False)


def sums(files: Mapping[str, str]) -> bytes:
    """Return the text of SHA256SUMS."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(files.items())).encode()


def problems(folder: Path, built: Receipt | None = None) -> list[str]:
    """Compare a folder's files with its receipt and SHA256SUMS; one line for each problem.

    Args:
        built: its receipt; None reads it.
    """
    built = built or load(folder / NAME)
    if built is None:
        return [f"{NAME}: missing or invalid"]
    listed = hashlib.sha256(sums(built.files)).hexdigest()
    return [
        f"{name}: missing, or differs from {NAME}"
        for name, sha256 in {SUMS: listed, **built.files}.items()
        if "/" in name or not intact(folder / name, sha256)
    ]


def of(context: Context, results: Results, seconds: float) -> Receipt:
    """Return the receipt of a run, without published files.

    Args:
        seconds: that the run took.
    """
    return Receipt(
        schema=SCHEMA,
        sparkforge=__version__,
        target=context.target_name,
        platform=context.platform,
        pins_sha256=sha256_file(context.pins_path),
        items=tuple(
            Made(
                step.item.stage,
                step.item.label,
                step.artefact.key,
                step.artefact.inputs,
                plain.as_json(step.artefact.result),
            )
            for step in results
        ),
        run=Run(
            platform.machine(),
            platform.python_version(),
            round(seconds, 2),
            {
                step.item.label: Time(
                    "made" if step.made_now else "in the store", step.artefact.seconds
                )
                for step in results
            },
        ),
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[str]:
    """Return each input that differs, one line each: ``name: old → new``."""
    result = []
    for key in sorted(old.keys() | new.keys()):
        name = f"{where}.{key}" if where else str(key)
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            result += differences(before, after, name)
        elif before != after:
            result.append(f"{name}: {_short(before)} → {_short(after)}")
    return result


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 48 else f"{text[:20]}…{text[-12:]}"
