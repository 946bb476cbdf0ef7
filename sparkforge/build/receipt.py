"""The receipt: inputs, results and times of a build, and the options that it had. Written last."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge import __version__
from sparkforge.build.options import VariantOptions
from sparkforge.build.results import ImageResult
from sparkforge.core import plain
from sparkforge.core.disk import intact, read_json, sha256_file

if TYPE_CHECKING:
    from sparkforge.build.cached import Cached
    from sparkforge.build.context import Context

NAME = "receipt.json"
# files next to the receipt, which names them by sha256
SBOM = "sbom.cdx.json"
SUMS = "SHA256SUMS"
SUFFIX = ".sigstore.json"
"""Suffix of a file's name: cosign's bundle with its signature."""


@dataclass(frozen=True)
class Run:
    """The part that depends on the run: two builds of the same inputs agree in everything else."""

    machine: str
    python: str
    seconds: float
    items: Mapping[str, Any]
    """By label: ``made`` or ``in the store``, and the seconds of making it, in whatever run."""
    options: VariantOptions = field(default_factory=VariantOptions)
    """The defaults of commands that use the last build."""
    commit: str = ""
    """Of the checkout, when the files were published; "": it had changes, or is not in git."""


@dataclass(frozen=True)
class Receipt:
    """The receipt of a build, and the version that wrote it."""

    schema: int
    sparkforge: str
    target: str
    platform: str
    pins_sha256: str
    items: tuple[Mapping[str, Any], ...]
    """Each result: stage, label, key, inputs and outputs."""
    run: Run
    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of each published file; none where the build stopped before its wheels."""

    @property
    def image(self) -> ImageResult | None:
        """The image; None where none was built."""
        images = (item.get("outputs") for item in self.items if item.get("stage") == "image")
        loaded = (plain.load(ImageResult, outputs, exact=False) for outputs in images)
        return next(filter(None, loaded), None)


def load(path: Path) -> Receipt | None:
    """Read a receipt; None if it is missing or invalid: the user may have edited the file."""
    return plain.load(Receipt, read_json(path), exact=False)


def sums(files: Mapping[str, str]) -> bytes:
    """Return the text of SHA256SUMS."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(files.items())).encode()


def problems(folder: Path, built: Receipt | None = None) -> list[str]:
    """Compare a folder's files with its receipt and SHA256SUMS; one line for each problem."""
    built = built or load(folder / NAME)
    if built is None:
        return [f"{NAME}: missing or invalid"]
    listed = hashlib.sha256(sums(built.files)).hexdigest()
    return [
        f"{name}: missing, or differs from {NAME}"
        for name, sha256 in {SUMS: listed, **built.files}.items()
        if name != Path(name).name or not intact(folder / name, sha256)
    ]


def of(
    context: Context, items: Sequence[Cached[Any]], seconds: float, options: VariantOptions
) -> Receipt:
    """Return the receipt of a run that reached these items, without published files."""
    made, times = [], {}
    for item in items:
        what = {"stage": item.stage, "label": item.label, "key": item.key, "inputs": item.inputs}
        made.append({**what, "outputs": plain.as_json(item.result)})
        state = "made" if item.made_now else "in the store"
        times[item.label] = {"state": state, "seconds": item.artefact.seconds}
    machine, python = platform.machine(), platform.python_version()
    run = Run(machine, python, round(seconds, 2), times, options)
    names = (context.target_name, context.platform)
    return Receipt(1, __version__, *names, sha256_file(context.pins_path), tuple(made), run)
