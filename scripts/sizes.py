#!/usr/bin/env python3
"""Write requirements/sizes.txt: the bytes of each locked file that a target fetches.

    PYTHONPATH=. .venv/bin/python scripts/sizes.py

Reads the store, so that it says what the files have and not what an index promises. Of a file that
the store lacks, what is recorded stays. Run it after scripts/lock.sh, and after ``build.py --target
NAME --until wheelhouse`` for each target.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import get_args

from sparkforge.build.lockedcompiler import PYTHON
from sparkforge.build.stages import packs
from sparkforge.pins import pins
from sparkforge.pins.types import Platform
from sparkforge.sources import sizes
from sparkforge.sources.project import ROOT, store_of
from sparkforge.sources.wheelhouse import applying, in_store, read_lock, recorded

_HEAD = "# Bytes of the locked files; made by scripts/sizes.py. Do not edit.\n"


def locks(all_pins: pins.Pins) -> list[tuple[Path, str, Platform, bool]]:
    """Return (lock, Python, platform, must be complete) of everything that is fetched."""
    found = []
    for target in all_pins.targets.values():
        for platform, name in target.requirements.items():
            found.append((ROOT / name, target.python, platform, True))
        for platform, name in (target.builder or {}).items():
            found.append((ROOT / name, target.python, platform, False))
    compilers = {ROOT / packs.LOCK}
    for upstream in all_pins.upstreams.values():
        if upstream.kernels is not None:
            compilers.add(ROOT / upstream.kernels.requirements)
    for lock in sorted(compilers):
        found += [(lock, PYTHON, platform, False) for platform in get_args(Platform)]
    return found


def main() -> int:
    """Write the file; returns 1 where files of a target's lock are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=os.environ.get("SPARKFORGE_STORE"))
    store = store_of(parser.parse_args().store)
    tools = [one for one in read_lock(ROOT / "requirements" / "driver.txt") if one.name == "uv"]
    known = sizes.read(ROOT / sizes.FILE)
    lines, absent = set(), 0
    for lock, python, platform, needed in locks(pins.load(ROOT / "pins.yaml")):
        missing = []
        for item in applying(read_lock(lock), tools, python, platform):
            if found := in_store(store, item, python, platform):
                sha256, path = found
                lines.add(f"{sha256}  {path.stat().st_size}  {path.name}\n")
            elif before := recorded(item, python, platform, known):
                lines.add(f"{before.sha256}  {before.size}  {before.name}\n")
            else:
                missing.append(item.requirement)
        if missing:
            named = f"{len(missing)} neither in the store nor recorded: {', '.join(missing)}"
            sys.stderr.write(f"{lock.name}: {named}\n")
            absent += needed
    (ROOT / sizes.FILE).write_text(_HEAD + "".join(sorted(lines)), encoding="utf-8")
    return 1 if absent else 0


if __name__ == "__main__":
    raise SystemExit(main())
