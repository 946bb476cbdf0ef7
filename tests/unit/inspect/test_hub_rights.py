"""A hub's cache of one's own in the container: what user 10001 may do there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sparkforge.inspect.doctor import rights, storage
from sparkforge.inspect.doctor.finding import Finding
from sparkforge.inspect.doctor.reading import Disks, Readings
from sparkforge.inspect.doctor.rights import Rights
from sparkforge.inspect.doctor.wanted import wanted
from sparkforge.pins import pins
from tests.support import ROOT

REPOSITORY = "openai/gpt-oss-120b"
# what Linux kept of `setfacl -m u:10001:rwX` on a file of mode 0600, and the same with r--
ACL = bytes.fromhex(
    "0200000001000600ffffffff020006001127000004000000ffffffff10000600ffffffff20000000ffffffff"
)
ONLY_READ = ACL[:-14] + b"\x04" + ACL[-13:]  # the mask


def cache(home: Path) -> Path:
    """Make a hub's home that holds a model, as its client does; returns a blob."""
    model = home / "hub" / "models--openai--gpt-oss-120b"
    for folder in ("blobs", "refs", "snapshots/b5"):
        (model / folder).mkdir(parents=True)
    blob = model / "blobs" / "aa"
    blob.write_text("weights")
    (model / "snapshots" / "b5" / "model.safetensors").symlink_to("../../blobs/aa")
    (home / "token").write_text("secret")
    (home / "token").chmod(0o600)
    for folder, _, files in os.walk(home):
        Path(folder).chmod(0o755)
        for name in files:
            if name != "token":
                (Path(folder) / name).chmod(0o644)
    return blob


def test_a_users_own_cache_can_be_read_and_not_written(tmp_path: Path) -> None:
    home = tmp_path / "huggingface"
    blob = cache(home)
    tmp_path.chmod(0o700)  # what lies above does not count in the container
    readable = Rights(exists=True, unwritable=str(home))
    assert rights.read(home, REPOSITORY) == readable
    blob.chmod(0o600)
    assert rights.read(home, REPOSITORY).unreadable == str(blob)
    home.chmod(0o700)
    assert rights.read(home, REPOSITORY).unreadable == str(home)
    assert rights.read(tmp_path / "no", REPOSITORY).exists is False


@pytest.mark.parametrize(("acl", "may"), [(ACL, 6), (ONLY_READ, 4), (None, 0)])
def test_lists_of_setfacl_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acl: bytes | None, may: int
) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o660)

    def getxattr(path: Path, name: str) -> bytes:
        assert name == "system.posix_acl_access"
        if acl is None:
            raise OSError
        return acl

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert rights.granted(file) == may
    assert rights.granted(file, user=file.stat().st_uid) == 6  # the owner has the owner's


def judged(variables: dict[str, str], **found: Any) -> list[Finding]:
    disks = Disks(rights=Rights(**{"exists": True, **found}))
    seen = Readings(disks=disks, variables=variables)
    return list(storage.model_rights(seen, wanted(pins.load(ROOT / "pins.yaml"), "spark")))


@pytest.mark.parametrize(
    ("more", "found", "state", "remedy"),
    [
        ({}, {}, "ok", ""),
        ({}, {"unwritable": "/hf"}, "warn", "echo HF_HUB_OFFLINE=1 >>.env"),
        ({"HF_HUB_OFFLINE": "1"}, {"unwritable": "/hf"}, "ok", ""),
        ({"HF_HUB_OFFLINE": "1"}, {"unwritable": "/hf", "unreadable": "/hf/x"}, "fail", "setfacl"),
        ({}, {"exists": False}, "fail", "mkdir -p '/my hf' && setfacl"),
    ],
)
def test_the_remedy_leaves_the_owner_his_access(
    more: dict[str, str], found: dict[str, Any], state: str, remedy: str
) -> None:
    (one,) = judged({"SPARKFORGE_HF_CACHE": "/my hf", **more}, **found)
    assert one.state == state
    assert remedy in one.remedy
    assert "chown" not in one.remedy
    if "setfacl" in one.remedy:
        acl = "u:10001:rwX,d:u:10001:rwX,d:u:$(id -u):rwX"
        assert f"setfacl -R -m {acl} '/my hf'" in one.remedy
        assert f"{acl} ~/.cache/huggingface" in (ROOT / "docs/serving.md").read_text()


def test_a_volume_is_not_judged() -> None:
    assert judged({}) == judged({"SPARKFORGE_HF_CACHE": "models"}) == []
