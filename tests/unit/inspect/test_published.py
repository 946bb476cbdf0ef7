"""An image against what is attached to it: each statement has to describe the image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from sparkforge.build import image
from sparkforge.build.receipt import SBOM
from sparkforge.core.errors import VerifyError
from sparkforge.inspect.verify import published
from sparkforge.inspect.verify.ociarchive import Entry
from sparkforge.inspect.verify.published import Attached
from sparkforge.inspect.verify.reading import DPKG_STATUS, OS_RELEASE, Reading
from sparkforge.runtime.registry import Reference

ONE, TWO, BASE = "1" * 64, "2" * 64, "3" * 64
NAMED = Reference("r.example.org/x", f"sha256:{ONE}")
WHEEL = {"bom-ref": "wheel-a", "name": "a", "version": "1", "hashes": [{"content": TWO}]}
SYSTEM = {"bom-ref": "deb-tini-amd64", "name": "tini", "version": "0.19"}
STATUS = "Package: tini\nStatus: install ok installed\nVersion: 0.19\nArchitecture: amd64\n"
BILL: Mapping[str, Any] = {"components": [WHEEL, SYSTEM]}
HISTORY: Mapping[str, Any] = {
    "buildDefinition": {
        "externalParameters": {"target": "rtx", "platform": "linux/amd64"},
        "internalParameters": {"image": "the key"},
        "resolvedDependencies": [
            {"name": "a.whl", "digest": {"sha256": TWO}},
            {"name": "base image", "digest": {"sha256": BASE}},
            {"name": "sparkforge", "digest": {"gitCommit": "4" * 40}},
        ],
    }
}


def file(data: bytes) -> Entry:
    return Entry(sha256="", git_blob="", size=len(data), data=data)


FOUND = Reading(
    NAMED.digest,
    "linux/amd64",
    {
        image.TARGET_LABEL: "rtx",
        image.KEY_LABEL: "the key",
        "org.opencontainers.image.base.digest": f"sha256:{BASE}",
    },
    {
        f"{image.SHARE}/{SBOM}": file(json.dumps({"components": [WHEEL]}).encode()),
        DPKG_STATUS: file(STATUS.encode()),
        OS_RELEASE: file(b"ID=debian\n"),
    },
)


def compare(bill: Mapping[str, Any] = BILL, history: Mapping[str, Any] = HISTORY) -> list[str]:
    return published.compare(NAMED, FOUND, Attached((bill,), (history,)), same_manifest=True)


def test_what_describes_the_image_is_accepted() -> None:
    assert compare() == []


def changed(value: Mapping[str, Any], path: str, new: object) -> dict[str, Any]:
    """Return a copy with the value at a path of keys replaced."""
    result = deepcopy(dict(value))
    *keys, last = (int(key) if key.isdecimal() else key for key in path.split("/"))
    inner: Any = result
    for key in keys:
        inner = inner[key]
    inner[last] = new
    return result


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        ("components", [WHEEL], "package tini 0.19: not in the attached bill"),
        ("components", [SYSTEM], "image's sbom.cdx.json: wheel-a: not in the attached bill"),
        ("components/0/version", "2", "attached bill: wheel-a: differs from the image's"),
        ("components/1/version", "1", "attached bill: package tini 1: not in the image"),
    ],
)
def test_another_bill(path: str, new: object, said: str) -> None:
    assert any(said in line for line in compare(bill=changed(BILL, path, new)))


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        ("externalParameters/target", "cpu", "target is cpu, the image has rtx"),
        ("externalParameters/platform", "linux/arm64", "platform is linux/arm64"),
        ("internalParameters/image", "other", "key of the image is other"),
        ("resolvedDependencies/0/digest/sha256", ONE, "does not have a of the image"),
        ("resolvedDependencies/1/digest/sha256", ONE, "does not have the image's base"),
    ],
)
def test_another_provenance(path: str, new: object, said: str) -> None:
    (line,) = compare(history=changed(HISTORY, f"buildDefinition/{path}", new))
    assert said in line


def test_all_statements_count_and_the_digest_does() -> None:
    other = changed(BILL, "components", [])
    twice = Attached((BILL, other), (HISTORY,))
    assert published.compare(NAMED, FOUND, twice, same_manifest=True)
    moved = Reference(NAMED.repository, f"sha256:{TWO}")
    assert published.compare(moved, FOUND, None, same_manifest=True)
    assert published.compare(moved, FOUND, None, same_manifest=False) == []


@pytest.mark.parametrize("bill", [{}, {"components": [3]}, {"components": [{"bom-ref": "deb-x"}]}])
def test_a_statement_of_another_form_is_one_error(bill: Mapping[str, Any]) -> None:
    with pytest.raises(VerifyError):
        compare(bill=bill)
