"""The checkout whose pins and patches these tests are about.

It is this one, unless `build.py ablate` runs them: then its series lacks a patch. What a test
takes of pins.yaml or patches/ it must take from here; the tests' own files stay in ``ROOT``.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.maintain.patchtests import CHECKOUT as _VARIABLE
from sparkforge.store.store import Store

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = Path(os.environ.get(_VARIABLE, ROOT))


def store() -> Store:
    """Return the store that the tests use."""
    return Store(Path(os.environ.get("SPARKFORGE_STORE", Path.home() / ".cache" / "sparkforge")))
