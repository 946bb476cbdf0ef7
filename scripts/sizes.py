#!/usr/bin/env python3
"""Write requirements/sizes.txt: the bytes of each locked file that a build fetches.

    PYTHONPATH=. .venv/bin/python scripts/sizes.py

Sizes are those of the files, and not what an index promises. A file whose size is not recorded yet
is fetched into the store. Run it after scripts/lock.sh.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

from sparkforge.build.lockedcompiler import PYTHON
from sparkforge.build.packs.names import LOCK
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.pins.types import Platform
from sparkforge.runtime import interpreter
from sparkforge.sources import sizes, wheelhouse
from sparkforge.sources.project import ROOT, store_of
from sparkforge.sources.wheelhouse import Locked, Wanted
from sparkforge.store.store import Store

_HEAD = "# Bytes of the locked files; made by scripts/sizes.py. Do not edit.\n"


def wheelhouses(all_pins: pins.Pins) -> list[Wanted]:
    """Return everything that is fetched."""
    driver = wheelhouse.read_lock(ROOT / "requirements" / "driver.txt")
    tools = tuple(one for one in driver if one.name == "uv")
    found = []
    for target in all_pins.targets.values():
        for platform, name in (*target.requirements.items(), *(target.builder or {}).items()):
            backend = target.torch_backend
            found.append(Wanted(ROOT / name, tools, target.python, platform, backend))
    compilers = {LOCK, *(() if all_pins.plugin is None else (all_pins.plugin.requirements,))}
    for lock in sorted(compilers):
        found += [
            Wanted(ROOT / lock, (), PYTHON, platform, None) for platform in get_args(Platform)
        ]
    return found


def fetch(store: Store, missing: list[Locked], wanted: Wanted) -> None:
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


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=os.environ.get("SPARKFORGE_STORE"))
    store = store_of(parser.parse_args().store)
    known = sizes.read(ROOT / sizes.FILE)
    lines = set()
    for wanted in wheelhouses(pins.load(ROOT / "pins.yaml")):
        python, platform = wanted.python, wanted.platform
        locked = wheelhouse.read_lock(wanted.lock)
        missing = []
        for item in wheelhouse.applying(locked, wanted.tools, python, platform):
            if one := wheelhouse.recorded(item, python, platform, known):
                lines.add(f"{one.sha256}  {one.size}  {one.name}\n")
            else:
                missing.append(item)
        if missing:
            fetch(store, missing, wanted)
        for item in missing:
            found = wheelhouse.in_store(store, item, python, platform)
            assert found is not None  # fetched just now
            lines.add(f"{found[0]}  {found[1].stat().st_size}  {found[1].name}\n")
    (ROOT / sizes.FILE).write_text(_HEAD + "".join(sorted(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
