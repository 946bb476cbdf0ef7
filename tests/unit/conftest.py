"""Every test here runs apart from this machine's settings."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.codecopy import CodeCopy, code_copy


@pytest.fixture(autouse=True)
def _isolated(isolated: Path) -> None:
    """Use ``isolated`` everywhere."""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Undo what main() does to signal handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def code(tmp_path: Path) -> Iterator[CodeCopy]:
    """Give a copy of the package that keys are made from."""
    with code_copy(tmp_path / "code") as copy:
        yield copy
