"""Receipts of other versions, what is no receipt, and the options of the last build."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import receipt
from sparkforge.build.graph import last_variant
from sparkforge.build.options import VariantOptions
from sparkforge.build.results import ImageResult
from sparkforge.core import plain
from sparkforge.core.disk import write_file
from tests.results import build_of

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


@pytest.mark.parametrize("text", [None, "", "[]", '{"run": {"options": {"base": 3}}}'])
def test_last_options_come_from_the_receipt(tmp_path: Path, text: str | None) -> None:
    last = VariantOptions(engine="none", wheels="compile", source="git")
    build = build_of("cpu")
    path = tmp_path / "dist" / "cpu" / receipt.NAME
    whole = json.dumps(plain.as_json(receipt.of(build.context, [], 1.0, last)))
    write_file(path, (whole if text is None else text).encode())
    project: Any = type("Project", (), {"root": tmp_path, "access": build.context.access})
    found = last_variant(project, "cpu", VariantOptions())
    assert found == (VariantOptions() if text is not None else last)
    chosen = VariantOptions(wheels="overlay", base="mine")
    assert last_variant(project, "cpu", chosen).wheels == "overlay"
    assert last_variant(project, "cpu", chosen).base == "mine"
