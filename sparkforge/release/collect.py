"""The folder of a release: all of its files, and release.json, which names each by its sha256."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from sparkforge import __version__
from sparkforge.build import publish
from sparkforge.build.receipt import RELEASE, SUMS
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.hashing import sha256_file
from sparkforge.inspect.verify.signing import RECEIPT
from sparkforge.release.checks import Candidate, built_image, head, receipt_of

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


def folder_of(one: Candidate) -> Path:
    """Return the folder of a release."""
    return one.root / "dist" / "releases" / one.version / one.target


def names(one: Candidate) -> list[str]:
    """Return the files of a release, without signatures."""
    return sorted([*receipt_of(one)["files"], SUMS, RECEIPT, NOTES, REPORT, RELEASE])


def collect(one: Candidate, texts: Texts, image: str | None) -> Path:
    """Write the folder of a release, and return it; one of an earlier run is replaced.

    Args:
        image: REPOSITORY@sha256:… where the image is published.
    """
    receipt, folder = receipt_of(one), folder_of(one)
    fresh = folder.with_name(f".{folder.name}.new")
    with disk_errors(folder):
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
        fresh.mkdir(parents=True)
        for name in (*receipt["files"], SUMS, RECEIPT):
            publish.link(one.folder / name, fresh / name)
        write_file(fresh / NOTES, f"{texts.notes}\n".encode())
        write_file(fresh / REPORT, texts.report.encode())
        built = built_image(one)
        document = {
            "schema": SCHEMA,
            "sparkforge": __version__,
            "release": one.version,
            "tag": one.tag,
            "target": one.target,
            "platform": receipt["platform"],
            "commit": head(one.root),
            "pins_sha256": receipt["pins_sha256"],
            "image": None if built is None else {"digest": built.digest, "reference": image},
            "files": {path.name: sha256_file(path) for path in sorted(fresh.iterdir())},
        }
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        write_file(fresh / RELEASE, text.encode())
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    return folder
