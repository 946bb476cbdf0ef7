"""Fixtures that all tests share."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from sparkforge.core import index
from sparkforge.core.log import log
from sparkforge.store.store import Store

from .support import Server, pip_variables

# A script's `&` and nohup start programs with these ignored, and that is inherited: the tests that
# press Ctrl-C need children that can feel it.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        )

# hundreds of tests start sparkforge: without byte code each start compiles the package, which is a
# third of its time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# numpy's second thread waits for the other worker's at every small product: the tests of the
# preflight took 16 s of CPU with two, 7 with one
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# how long one example takes says how busy the machine is
hypothesis.settings.register_profile("ours", deadline=None)
hypothesis.settings.load_profile("ours")

_KEPT = ("PIP_CERT",)
_DROPPED = ("PIP_", "GIT_", "UV_", "SPARKFORGE_", "XDG_", "GITHUB_")


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty home folder, and none of this machine's settings of git, pip and terminals."""
    for name in os.environ:
        if name.startswith(_DROPPED) and name not in _KEPT:
            monkeypatch.delenv(name)
    for name in (
        "NO_COLOR",
        "TERM",
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
        "SOURCE_DATE_EPOCH",
        "PYTHONPATH",
    ):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    # pytest started by a test: its plugins here (hypothesis, xdist) are half of its start
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # pip's word for: read no file
    monkeypatch.setattr(index, "pip_config", pip_variables)
    index.pip_settings.cache_clear()
    monkeypatch.setattr(log, "verbose", False)
    monkeypatch.setattr(log, "_to_stderr", False)
    return home


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for temporary files with sockets, whose paths have to be short."""
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def server() -> Iterator[Server]:
    """A web server on loopback."""
    running = Server()
    yield running
    running.close()
