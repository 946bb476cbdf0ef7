"""The receipt: inputs, results and times of a build. Written last."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge import __version__
from sparkforge.build.item import Results
from sparkforge.build.results import ImageResult
from sparkforge.core import typed
from sparkforge.core.errors import UsageError
from sparkforge.core.hashing import sha256_file

if TYPE_CHECKING:
    from sparkforge.build.context import Context

SCHEMA = 1
# what lies beside the receipt, and is named in it by its sha256
SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.intoto.json"
SUMS = "SHA256SUMS"
RELEASE = "release.json"
"""In a release's folder, not in dist/TARGET: the version, the commit and all of its files."""
SUFFIX = ".sigstore.json"
"""Behind the name of a file: cosign's bundle with its signature."""


def receipt(context: Context, results: Results, seconds: float) -> dict[str, Any]:
    """Return the receipt as JSON values.

    What depends on this run (times, whether an item was made now) stands under ``run``, so that
    two builds of the same inputs agree in everything else.
    """
    return {
        "schema": SCHEMA,
        "sparkforge": __version__,
        "target": context.target_name,
        "platform": context.platform,
        "pins_sha256": sha256_file(context.pins_path),
        "items": [
            {
                "stage": step.item.stage,
                "label": step.item.label,
                "key": step.artefact.key,
                "inputs": step.artefact.inputs,
                "outputs": typed.as_json(step.artefact.result),
            }
            for step in results
        ],
        "run": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "seconds": round(seconds, 2),
            "items": {
                step.item.label: {
                    "state": "made" if step.made_now else "in the store",
                    "seconds": step.artefact.seconds,
                }
                for step in results
            },
        },
    }


def is_receipt(document: Any) -> bool:
    """Return whether a document has a receipt's shape; anybody may have written the file."""
    items = document.get("items") if isinstance(document, dict) else None
    return isinstance(items, list) and all(
        isinstance(item, dict)
        and isinstance(item.get("stage"), str)
        and all(isinstance(item.get(name), dict) for name in ("inputs", "outputs"))
        for item in items
    )


def image_of(document: Mapping[str, Any], path: Path) -> ImageResult | None:
    """Return the image of a receipt; None where none was built.

    Raises:
        UsageError: another version wrote the receipt.
    """
    for item in document["items"]:
        if item.get("label") == "image":
            image = typed.load(ImageResult, item["outputs"])
            if image is None:
                msg = f"{path}: another version of sparkforge wrote its record of the image"
                raise UsageError(msg, "use that version, or build the image again")
            return image
    return None


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
