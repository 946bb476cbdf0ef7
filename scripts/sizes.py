#!/usr/bin/env python3
"""Write requirements/sizes.txt: the bytes of each locked file that a target fetches.

    PYTHONPATH=. .venv/bin/python scripts/sizes.py

Reads the store, so that it says what the files have and not what an index promises. Run it after
scripts/lock.sh, and after ``build.py --target NAME --until wheelhouse`` for each target.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import get_args

from sparkforge.build.stages import kernels
from sparkforge.pins import pins
from sparkforge.pins.types import Platform
from sparkforge.sources import sizes
from sparkforge.sources.project import ROOT, store_of
from sparkforge.sources.wheelhouse import Locked, applying, in_store, read_lock

_HEAD = "# Bytes of the locked files; made by scripts/sizes.py. Do not edit.\n"


def locks(all_pins: pins.Pins) -> list[tuple[Path, str, Platform, bool]]:
    """Return (lock, Python, platform, must be complete) of everything that is fetched."""
    found = []
    for target in all_pins.targets.values():
        for platform, name in target.requirements.items():
            found.append((ROOT / name, target.python, platform, True))
        for platform, name in (target.builder or {}).items():
            found.append((ROOT / name, target.python, platform, False))
    for upstream in all_pins.upstreams.values():
        if upstream.kernels is not None:
            lock = ROOT / upstream.kernels.requirements
            found += [(lock, kernels.PYTHON, platform, False) for platform in get_args(Platform)]
    return found


def main() -> int:
    """Write the file; returns 1 where the store lacks files of a target's lock."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=os.environ.get("SPARKFORGE_STORE"))
    store = store_of(parser.parse_args().store)
    tools = [one for one in read_lock(ROOT / "requirements" / "driver.txt") if one.name == "uv"]
    lines, absent = set(), 0
    for lock, python, platform, needed in locks(pins.load(ROOT / "pins.yaml")):
        wanted: list[Locked] = applying(read_lock(lock), tools, python, platform)
        missing = []
        for item in wanted:
            found = in_store(store, item, python, platform)
            if found is None:
                missing.append(item.requirement)
            else:
                sha256, path = found
                lines.add(f"{sha256}  {path.stat().st_size}  {path.name}\n")
        if missing:
            sys.stderr.write(f"{lock.name}: {len(missing)} not in the store: {missing[:3]} …\n")
            absent += needed
    (ROOT / sizes.FILE).write_text(_HEAD + "".join(sorted(lines)), encoding="utf-8")
    return 1 if absent else 0


if __name__ == "__main__":
    raise SystemExit(main())
