#!/usr/bin/env python3
"""Write requirements/sizes.txt: the bytes of each locked file that a build fetches.

Run it after scripts/lock.sh.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build import ensure_environment  # noqa: E402


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path)
    store = parser.parse_args().store
    python = ensure_environment(ROOT / ".venv", ROOT / "requirements" / "driver.txt")
    if Path(sys.prefix).resolve() != python.parent.parent.resolve():
        os.execv(python, [str(python), __file__, *sys.argv[1:]])
    from sparkforge.maintain import companions
    from sparkforge.pins import pins
    from sparkforge.sources import sizes
    from sparkforge.sources.project import store_of

    text = companions.sizes_text(ROOT, pins.load(ROOT / "pins.yaml"), store_of(store))
    (ROOT / sizes.FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
