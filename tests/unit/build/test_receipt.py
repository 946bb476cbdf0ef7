"""Receipts of other versions, and what is no receipt."""

import json
from pathlib import Path
from typing import Any

from sparkforge.build import receipt
from sparkforge.build.results import ImageResult
from sparkforge.core import plain

IMAGE = ImageResult("x:1", "sha256:1", None, "base", ())
RECEIPT = {
    "schema": 1,
    "sparkforge": "0.9",
    "target": "tiny",
    "platform": "linux/amd64",
    "pins_sha256": "0" * 64,
    "items": [],
    "run": {"machine": "x86_64", "python": "3.11.2", "seconds": 1, "items": {}},
}


def loaded(path: Path, outputs: dict[str, Any], **fields: Any) -> receipt.Receipt | None:
    item = {"stage": "image", "label": "any", "key": "0", "inputs": {}, "outputs": outputs}
    path.write_text(json.dumps({**RECEIPT, "items": [item], **fields}))
    return receipt.load(path)


def test_image_of_other_versions(tmp_path: Path) -> None:
    found = loaded(tmp_path / "r.json", {**plain.as_json(IMAGE), "kind": "image"}, more=3)
    assert found is not None
    assert (found.image, found.files) == (IMAGE, {})
    found = loaded(tmp_path / "r.json", {"image_id": "sha256:1"})
    assert found is not None and found.image is None
    assert loaded(tmp_path / "r.json", {}, items=[3]) is None
    assert receipt.load(tmp_path / "missing.json") is None
