"""The Python of a virtual environment: the machine's, else uv's pinned one, from a loopback server.

No real interpreter is fetched. What stands for one starts the interpreter that runs the tests.
"""

from __future__ import annotations

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
from sparkforge.runtime import interpreter
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


def archive(*, runs: bool = True) -> bytes:
    """Return an archive like those of uv's, whose interpreter is ours."""
    script = f'#!/bin/sh\nexec {sys.executable} "$@"\n' if runs else "#!/bin/sh\nexit 1\n"
    name = sysconfig._get_sysconfigdata_name()  # type: ignore[attr-defined]
    files = {
        f"bin/python{VERSION}": (0o755, script.encode()),
        f"lib/python{VERSION}/{name}.py": (
            0o644,
            _SYSCONFIG,
        ),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, (mode, data) in files.items():
            info = tarfile.TarInfo(f"python/{path}")
            info.mode, info.size = mode, len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def offer(
    server: Server, monkeypatch: pytest.MonkeyPatch, data: bytes, sha256: str | None = None
) -> None:
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
        "sha256": sha256 or hashlib.sha256(data).hexdigest(),
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
    assert interpreter.ensure(store, VERSION, offline=False).exists()
    assert server.requests == []
    assert not (store.root / INTERPRETERS).exists()


def test_missing_interpreter_is_downloaded_once(
    store: Store,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer(server, monkeypatch, archive())
    assert interpreter.find(store, VERSION) is None
    assert not (store.root / INTERPRETERS).exists()  # looking makes nothing
    python = interpreter.ensure(store, VERSION, offline=False)
    assert call(python, "-c", "print(6 * 7)").stdout == b"42\n"
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 1
    assert f"this machine has no Python {VERSION}" in said
    assert "uv downloads its pinned build" in said
    assert any((store.root / INTERPRETERS).glob(f"cpython-{VERSION}*/bin/python{VERSION}"))
    fetched = server.requests.count(("/python.tar.gz", None))
    # it is here now, also without a network
    assert interpreter.ensure(store, VERSION, offline=True) == python
    assert server.requests.count(("/python.tar.gz", None)) == fetched == 1


def test_interpreter_with_wrong_hash_is_refused(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(server, monkeypatch, archive(), sha256="0" * 64)
    with pytest.raises(IntegrityError, match="differs from uv's pinned one"):
        interpreter.ensure(store, VERSION, offline=False)
    assert interpreter.find(store, VERSION) is None


def test_mirror_serves_the_pinned_interpreter(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", server.url("/mirror"))
    with pytest.raises(FetchError, match="uv cannot download one") as refusal:
        interpreter.ensure(store, "3.11", offline=False)
    assert "UV_PYTHON_INSTALL_MIRROR" in refusal.value.remedy
    ((asked, _),) = set(server.requests)
    assert asked.startswith("/mirror/")
    assert "/cpython-3.11." in asked
    # the mirror has that file, and it is another
    server.add(asked, Page(archive()))
    with pytest.raises(IntegrityError, match="differs from uv's pinned one"):
        interpreter.ensure(store, "3.11", offline=False)


def test_offline_without_interpreter_is_an_error(store: Store, server: Server) -> None:
    with pytest.raises(FetchError, match="--offline is set") as refusal:
        interpreter.ensure(store, "3.11", offline=True)
    assert "run once without --offline" in refusal.value.remedy
    assert "--base" in refusal.value.remedy
    assert not (store.root / INTERPRETERS).exists()
