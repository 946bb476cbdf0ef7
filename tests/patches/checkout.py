"""The checkout whose pins and patches these tests are about.

It is this one, unless `build.py ablate` runs them: then its series lacks a patch. What a test
takes of pins.yaml or patches/ it must take from here; the tests' own files stay in ``ROOT``.
"""

import os
from pathlib import Path
from typing import Any

from sparkforge.build.context import Context
from sparkforge.core.index import Index
from sparkforge.maintain.ablate import CHECKOUT as _VARIABLE
from sparkforge.pins import pins
from sparkforge.sources.project import store_of
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store
from tests.results import context_of

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = Path(os.environ.get(_VARIABLE, ROOT))
PINS = pins.load(CHECKOUT / "pins.yaml")
ACCESS = Access(Index(), {}, offline=False)


def store() -> Store:
    """Return the store that the tests use."""
    return store_of(None)


def context(target: str, **fields: Any) -> Context:
    """Return a target's build, with the tests' store unless ``fields`` has another."""
    return context_of(target, CHECKOUT, **{"store": store(), "access": ACCESS, **fields})
