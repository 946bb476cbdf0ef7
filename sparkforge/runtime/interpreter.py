"""The Python of a virtual environment: the machine's own, else the one that uv pins.

uv, which is locked with the driver, has a CPython build with its sha256 for each minor version, and
refuses a file with another hash. The download is stored in the store.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.core.errors import BuildError, CommandError, FetchError, IntegrityError
from sparkforge.core.index import pip_settings
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.store.store import INTERPRETERS, Store

_MISMATCH = "Hash mismatch"  # uv's message for a file with another hash
_REMEDY = "install Python {} (the system's package manager, pyenv), or build an image with --base"


def uv_program() -> Path:
    """Return the uv that is locked with the driver."""
    from uv import find_uv_bin

    return Path(find_uv_bin())


def find(store: Store, version: str) -> Path | None:
    """Return an existing interpreter of this version: the machine's, else the store's, or None.

    Nothing is downloaded or created.

    Args:
        version: e.g. ``3.11``.
    """
    return _found(version, None) or _found(version, store.root / INTERPRETERS)


def ensure(store: Store, version: str, *, offline: bool) -> Path:
    """Return an interpreter of this version; if there is none, uv downloads its pinned one.

    uv's own settings apply: ``UV_PYTHON_INSTALL_MIRROR``, or ``python-install-mirror`` in uv.toml.

    Raises:
        FetchError: there is none, and no download: offline, or no network.
        IntegrityError: the download has another hash.
        BuildError: the downloaded interpreter does not run here.
    """
    if found := find(store, version):
        return found
    absent = f"this machine has no Python {version}, which the wheels are locked for"
    remedy = _REMEDY.format(version)
    if offline:
        msg = f"{absent}, and --offline is set"
        raise FetchError(msg, f"run once without --offline; or {remedy}")
    folder = store.cache_path(INTERPRETERS)
    with store.lock(INTERPRETERS):
        log.info(f"{absent}: uv downloads its pinned build into {folder} and checks the hash")
        try:
            install = (uv_program(), "python", "install", "--no-bin", "--install-dir", folder)
            call(*install, version, env=_variables(folder))
        except CommandError as error:
            causes = [line.strip() for line in error.what.splitlines()[1:] if "cause:" in line]
            why = "\n".join(f"    {line}" for line in causes[-3:]) or error.what
            if _MISMATCH in error.what:
                msg = f"Python {version} as downloaded differs from uv's pinned one:\n{why}"
                raise IntegrityError(msg, "check UV_PYTHON_INSTALL_MIRROR and proxy") from error
            msg = f"{absent}, and uv cannot download one:\n{why}"
            hint = "check the network, or set a mirror in UV_PYTHON_INSTALL_MIRROR"
            raise FetchError(msg, f"{hint}; or {remedy}") from error
    if found := _found(version, folder):
        return found
    msg = f"the Python {version} that uv downloaded into {folder} does not run on this machine"
    raise BuildError(msg, remedy)


def _found(version: str, folder: Path | None) -> Path | None:
    """Return uv's interpreter: the machine's, or one that it downloaded into a folder."""
    if folder is not None and not folder.is_dir():
        return None
    only = ["--managed-python"] if folder is not None else []
    words = ("python", "find", "--no-python-downloads", "--no-project", *only, version)
    found = call(uv_program(), *words, env=_variables(folder), check=False)
    path = found.stdout.decode(errors="replace").strip()
    return Path(path) if found.returncode == 0 and path else None


def _variables(folder: Path | None) -> dict[str, str | None]:
    """Return the variables of uv for a folder of interpreters; None: those of its user."""
    if folder is None:
        return {}
    # certificates of a company are in pip's settings; uv reads this variable
    cert = None if "SSL_CERT_FILE" in os.environ else pip_settings().get("cert")
    return {
        "UV_PYTHON_INSTALL_DIR": str(folder),
        "VIRTUAL_ENV": None,
        **({"SSL_CERT_FILE": cert} if cert else {}),
    }
