"""The digest of the build's code."""

from __future__ import annotations

import pytest

from sparkforge.store.codekey import code_of
from tests.codecopy import CodeCopy

WHEELS = "sparkforge.build.stages.wheels"


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("wheels/overlay.py", True),
        ("build/packs/include/cublasLt.h", True),
        ("core/git.py", True),
        ("cli/main.py", False),
        ("check/__init__.py", False),
        ("maintain/__init__.py", False),
        ("release/__init__.py", False),
    ],
)
def test_build_packages_alone_are_in_the_key(code: CodeCopy, file: str, changes: bool) -> None:
    before = code_of(WHEELS)
    code.change(file)
    assert (code_of(WHEELS) != before) == changes
