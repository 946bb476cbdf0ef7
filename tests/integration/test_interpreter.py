"""The Python of a virtual environment: the machine's, else uv's pinned one, from a loopback server.

No real interpreter is fetched. What stands for one starts the interpreter that runs the tests.
"""

import hashlib
import io
import json
import platform
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from sparkforge.core.errors import FetchError, IntegrityError
from sparkforge.core.run import call
from sparkforge.runtime import environment
from sparkforge.store.store import INTERPRETERS, Store
from tests.support import Page, Server

# uv corrects the paths in this file, and wants its first line
_SYSCONFIG = b"""# system configuration generated and used by the sysconfig module
build_time_vars = {}
"""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def no_python(isolated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every interpreter of this machine: uv looks on the PATH, in .venv, in its own folder."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


def archive() -> bytes:
    """Return an archive like those of uv's, whose interpreter is ours."""
    script = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    name = sysconfig._get_sysconfigdata_name()  # type: ignore[attr-defined]
    files = {
        f"bin/python{VERSION}": (0o755, script.encode()),
        f"lib/python{VERSION}/{name}.py": (0o644, _SYSCONFIG),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, (mode, data) in files.items():
            info = tarfile.TarInfo(f"python/{path}")
            info.mode, info.size = mode, len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def offer(server: Server, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Have uv pin an archive, in place of those that it knows by itself."""
    major, minor, patch = sys.version_info[:3]
    entry = {
        "name": "cpython",
        "arch": {"family": platform.machine(), "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "url": server.add("/python.tar.gz", Page(data)),
        "variant": None,
        "build": "20260101",
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    key = f"cpython-{major}.{minor}.{patch}-linux-{platform.machine()}-gnu"
    url = server.add("/pins.json", Page(json.dumps({key: entry}).encode()))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", url)


def test_own_interpreter_is_used(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / f"python{VERSION}").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(own))
    offer(server, monkeypatch, archive())
    assert environment.ensure_python(store, VERSION, offline=False).exists()
    assert server.requests == []


def test_missing_interpreter_is_downloaded_once(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(server, monkeypatch, archive())
    assert environment.find_python(store, VERSION) is None
    assert not (store.root / INTERPRETERS).exists()  # looking makes nothing
    with pytest.raises(FetchError):
        environment.ensure_python(store, VERSION, offline=True)
    python = environment.ensure_python(store, VERSION, offline=False)
    assert call(python, "-c", "print(6 * 7)").stdout == b"42\n"
    assert environment.ensure_python(store, VERSION, offline=True) == python
    assert server.requests.count(("/python.tar.gz", None)) == 1


def test_mirror_and_hash_of_the_pinned_interpreter(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", server.url("/mirror"))
    with pytest.raises(FetchError):
        environment.ensure_python(store, "3.11", offline=False)
    ((asked, _),) = set(server.requests)
    assert asked.startswith("/mirror/")
    assert "/cpython-3.11." in asked
    server.add(asked, Page(archive()))  # the mirror has that file, and it is another
    with pytest.raises(IntegrityError):
        environment.ensure_python(store, "3.11", offline=False)
    assert environment.find_python(store, "3.11") is None
