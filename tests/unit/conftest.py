"""Every test here runs apart from this machine's settings."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _isolated(isolated: Path) -> None:
    """Use ``isolated`` everywhere."""
