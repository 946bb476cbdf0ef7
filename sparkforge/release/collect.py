"""The folder of a release: all of its files, and release.json, which names each by its sha256."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge import __version__
from sparkforge.build import publish, receipt
from sparkforge.build.receipt import RELEASE, SUFFIX, SUMS, Receipt
from sparkforge.core import git
from sparkforge.core.disk import disk_errors, read_json, write_file
from sparkforge.core.errors import SparkforgeError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.log import log
from sparkforge.inspect.verify.signing import SIGNED, sums
from sparkforge.release.checks import Candidate, built_image, receipt_of

NOTES, REPORT = "NOTES.md", "report.html"
SCHEMA = 1


@dataclass(frozen=True)
class Texts:
    """Files that are made for the release.

    Attributes:
        notes: the section of the changelog.
        report: the page of ``build.py report``.
    """

    notes: str
    report: str


def folder_of(candidate: Candidate) -> Path:
    """Return the folder of a release."""
    return candidate.root / "dist" / "releases" / candidate.version / candidate.target


def names(candidate: Candidate) -> list[str]:
    """Return the files of a release, without signatures."""
    return sorted([*_built(candidate).files, SUMS, receipt.NAME, NOTES, REPORT, RELEASE])


@contextmanager
def fresh(candidate: Candidate, texts: Texts) -> Iterator[Path]:
    """Write the files of a release, without release.json, into a folder of its own.

    At the end of the block it takes the place of the release's folder. If the block fails, an
    earlier release's folder stays as it is. It also stays, with its signatures, if the new one has
    no signatures and the same files.
    """
    folder = folder_of(candidate)
    made = folder.with_name(f".{folder.name}.new")
    try:
        with disk_errors(folder):
            shutil.rmtree(made, ignore_errors=True)  # of a run that was killed
            made.mkdir(parents=True)
            for name in (*_built(candidate).files, SUMS, receipt.NAME):
                publish.link(candidate.folder / name, made / name)
            write_file(made / NOTES, f"{texts.notes}\n".encode())
            write_file(made / REPORT, texts.report.encode())
        yield made
        with disk_errors(folder):
            _replace(folder, made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def record(candidate: Candidate, made: Path, image: str | None) -> str | None:
    """Write release.json, the last file of a release.

    Args:
        made: folder with all other files.
        image: REPOSITORY@sha256:… where the image has been pushed; None: not by this run.

    Returns:
        ``image``, or the reference to which an earlier run pushed the same image.
    """
    built, its_image = _built(candidate), built_image(candidate)
    image = image or _pushed_before(candidate)
    document = {
        "schema": SCHEMA,
        "sparkforge": __version__,
        "release": candidate.version,
        "tag": candidate.tag,
        "target": candidate.target,
        "platform": built.platform,
        "commit": git.head(candidate.root),
        "pins_sha256": built.pins_sha256,
        "image": None if its_image is None else {"digest": its_image.digest, "reference": image},
        "files": {name: sha256_file(made / name) for name in names(candidate) if name != RELEASE},
    }
    write_file(made / RELEASE, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    return image


def _built(candidate: Candidate) -> Receipt:
    built = receipt_of(candidate)
    assert built is not None  # the checks found it
    return built


def signatures(folder: Path) -> list[str]:
    """Return the files of a folder that have a signature."""
    return [name for name in SIGNED if (folder / f"{name}{SUFFIX}").is_file()]


def _pushed_before(candidate: Candidate) -> str | None:
    """Return the reference to which an earlier run pushed the image of the last build."""
    built, before = (
        built_image(candidate),
        (read_json(folder_of(candidate) / RELEASE) or {}).get("image"),
    )
    reference = before.get("reference") if isinstance(before, dict) else None
    if built is None or built.digest is None or not isinstance(reference, str):
        return None
    return reference if reference.endswith(f"@{built.digest}") else None


def _replace(folder: Path, made: Path) -> None:
    signed = signatures(folder)
    if signed and not signatures(made):
        if _same(folder, made):
            return
        log.warning(f"{folder}: the release has changed: its signatures are removed")
    # two renames: a run that is killed leaves no half-removed folder
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _same(folder: Path, made: Path) -> bool:
    """Return whether a folder is undamaged and has the same files, apart from signatures."""
    try:
        return (folder / RELEASE).read_bytes() == (made / RELEASE).read_bytes() and not sums(folder)
    except (OSError, SparkforgeError):
        return False
