"""The mark of tests that start a door: not in tests.support, which also runs without pytest."""

import os
import shutil

import pytest

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin") is None,
    reason="haproxy is not on this machine",
)
