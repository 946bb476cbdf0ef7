"""A copy of the package that keys are made from, to be changed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from sparkforge.store import store as codekey
from tests.support import ROOT


@dataclass(frozen=True)
class CodeCopy:
    """The copy; the code that runs is the checkout's all the time."""

    root: Path

    def change(self, *files: str) -> None:
        """Add a line to modules of the package."""
        for file in files:
            with (self.root / file).open("a") as changed:
                changed.write("changed = 1\n")
        self.read_again()

    def read_again(self) -> None:
        """Forget what this process has read."""
        codekey._digest.cache_clear()


@contextmanager
def code_copy(folder: Path) -> Iterator[CodeCopy]:
    """Make keys from a copy of the package in a new folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    copy = CodeCopy(shutil.copytree(ROOT / "sparkforge", folder / "sparkforge", ignore=ignored))
    try:
        with mock.patch.object(codekey, "_ROOT", copy.root):
            copy.read_again()
            yield copy
    finally:
        copy.read_again()
