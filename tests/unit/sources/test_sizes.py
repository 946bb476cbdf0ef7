"""Recorded sizes of locked files, and the progress line that they allow."""

from pathlib import Path
from typing import get_args

from sparkforge.build.packs.modules import LOCK
from sparkforge.build.stages.thirdparty import PYTHON
from sparkforge.pins import pins
from sparkforge.pins.types import Platform
from sparkforge.sources import sizes
from sparkforge.sources.download import Fetches
from sparkforge.sources.wheelhouse import Wanted, applying, read_lock, recorded, to_fetch
from sparkforge.store.store import Store
from tests.support import ROOT

A, B = "a" * 64, "b" * 64


def test_every_wheel_of_every_lock_has_a_recorded_size() -> None:
    known, loaded = sizes.read(ROOT / sizes.FILE), pins.load(ROOT / "pins.yaml")
    assert loaded.plugin is not None
    locks: list[tuple[str, str, Platform]] = [
        (name, PYTHON, platform)
        for name in (LOCK, loaded.plugin.requirements)
        for platform in get_args(Platform)
    ]
    for target in loaded.targets.values():
        for platform, name in (*target.requirements.items(), *target.builder.items()):
            locks.append((name, target.python, platform))
    for name, python, platform in locks:
        for item in applying(read_lock(ROOT / name), (), python, platform):
            file = recorded(item, python, platform, known)
            assert file is not None, f"{name}: {item.requirement}: run scripts/sizes.py"
            assert file.size > 0


def test_what_the_store_has_is_not_fetched(store: Store, tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        f"one==1.0 --hash=sha256:{A}\ntwo==1.0 --hash=sha256:{B}\n"
        f"three==1.0 --hash=sha256:{'c' * 64}\n"
    )
    known = {
        A: sizes.Known(A, 10, "one-1.0-py3-none-any.whl"),
        B: sizes.Known(B, 7, "two-1.0-py3-none-any.whl"),
    }
    want = Wanted(lock, (), "3.11", "linux/amd64", None)
    assert to_fetch(store, want, known) == Fetches({A: 10, B: 7}, ("1 wheels of lock.txt",))
    there = store.download_path(A, "one-1.0-py3-none-any.whl")
    there.parent.mkdir(parents=True)
    there.write_bytes(b"x")
    assert to_fetch(store, want, known) == Fetches({B: 7}, ("1 wheels of lock.txt",))
