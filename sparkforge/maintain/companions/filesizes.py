"""requirements/sizes.txt: the bytes of each locked file that a build fetches.

Sizes are those of the files, and not what an index promises. A file whose size is not recorded yet
is fetched into the store.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from sparkforge.build.packs.names import LOCK
from sparkforge.build.stages.thirdparty import PYTHON
from sparkforge.core.index import Index
from sparkforge.pins.pins import Pins
from sparkforge.pins.types import Platform
from sparkforge.runtime import interpreter
from sparkforge.sources import sizes, wheelhouse
from sparkforge.sources.wheelhouse import Locked, Wanted
from sparkforge.store.store import Store

_HEAD = "# Bytes of the locked files; made by scripts/sizes.py. Do not edit.\n"


def text(root: Path, pins: Pins, store: Store) -> str:
    """Return what the file of a checkout has to be.

    Raises:
        FetchError, IntegrityError: a locked file cannot be had.
    """
    known = sizes.read(root / sizes.FILE)
    lines = set()
    for wanted in _wheelhouses(root, pins):
        python, platform = wanted.python, wanted.platform
        missing = []
        for item in wheelhouse.applying(
            wheelhouse.read_lock(wanted.lock), wanted.tools, python, platform
        ):
            if one := wheelhouse.recorded(item, python, platform, known):
                lines.add(f"{one.sha256}  {one.size}  {one.name}\n")
            else:
                missing.append(item)
        if missing:
            _fetch(store, missing, wanted)
        for item in missing:
            found = wheelhouse.in_store(store, item, python, platform)
            assert found is not None  # fetched just now
            lines.add(f"{found[0]}  {found[1].stat().st_size}  {found[1].name}\n")
    return _HEAD + "".join(sorted(lines))


def _wheelhouses(root: Path, pins: Pins) -> list[Wanted]:
    """Return everything that is fetched."""
    driver = wheelhouse.read_lock(root / "requirements" / "driver.txt")
    tools = tuple(one for one in driver if one.name == "uv")
    found = []
    for target in pins.targets.values():
        for platform, name in (*target.requirements.items(), *(target.builder or {}).items()):
            backend = target.torch_backend
            found.append(Wanted(root / name, tools, target.python, platform, backend))
    compilers = {LOCK, *(() if pins.plugin is None else (pins.plugin.requirements,))}
    for lock in sorted(compilers):
        if (root / lock).is_file():
            found += [
                Wanted(root / lock, (), PYTHON, platform, None) for platform in get_args(Platform)
            ]
    return found


def _fetch(store: Store, missing: list[Locked], wanted: Wanted) -> None:
    """Fetch some lines of a lock into the store."""
    with store.temporary("sizes") as work:
        part, wheels = work / wanted.lock.name, work / "wheels"
        lines = (
            f"{one.requirement} {' '.join(f'--hash=sha256:{sha}' for sha in sorted(one.sha256s))}\n"
            for one in missing
        )
        part.write_text("".join(lines), encoding="utf-8")
        wheels.mkdir()
        these = replace(wanted, lock=part, tools=())
        uv = interpreter.uv_program()
        wheelhouse.fill(store, these, Index(), uv, offline=False, into=wheels)
