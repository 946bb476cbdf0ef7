"""The Python of a virtual environment: the machine's own, else the one that uv pins.

uv, which is locked with the driver, has a CPython build with its sha256 for each minor version, and
refuses a file with another hash. The download is stored in the store.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.core.errors import CommandError, FetchError, IntegrityError
from sparkforge.core.index import pip_settings
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.store.store import INTERPRETERS, Store


def uv_program() -> Path:
    """Return the uv that is locked with the driver."""
    from uv import find_uv_bin

    return Path(find_uv_bin())


def find(store: Store, version: str) -> Path | None:
    """Return an existing interpreter of this version, e.g. ``3.11``: the machine's or the store's.

    Nothing is downloaded or created.
    """
    words: tuple[str, ...] = ("python", "find", "--no-python-downloads", "--no-project", version)
    found = call(uv_program(), *words, check=False)
    if found.returncode != 0:
        words = (*words, "--managed-python")
        found = call(uv_program(), *words, env=_variables(store), check=False)
    return Path(os.fsdecode(found.stdout).strip()) if found.returncode == 0 else None


def ensure(store: Store, version: str, *, offline: bool) -> Path:
    """Return an interpreter of this version; if there is none, uv downloads its pinned one.

    uv's own settings apply: ``UV_PYTHON_INSTALL_MIRROR``, or ``python-install-mirror`` in uv.toml.

    Raises:
        FetchError: there is none that runs here, and no download.
        IntegrityError: the download has another hash.
    """
    if found := find(store, version):
        return found
    absent = f"this machine has no Python {version}, which the wheels are locked for"
    remedy = (
        f"run once without --offline, set a mirror in UV_PYTHON_INSTALL_MIRROR, install Python"
        f" {version} (the system's package manager, pyenv), or build an image with --base"
    )
    if offline:
        raise FetchError(f"{absent}, and --offline is set", remedy)
    folder = store.cache_path(INTERPRETERS)
    with store.lock(INTERPRETERS):
        log.info(f"{absent}: uv downloads its pinned build into {folder} and checks the hash")
        try:
            install = ("python", "install", "--no-bin", version)
            call(uv_program(), *install, env=_variables(store))
        except CommandError as error:
            wrong = "Hash mismatch" in error.what  # uv's message for a file with another hash
            kind = IntegrityError if wrong else FetchError
            raise kind(f"{absent}, and uv cannot download one:\n{error.what}", remedy) from error
    if found := find(store, version):
        return found
    raise FetchError(f"{absent}; the one in {folder} does not run here", remedy)


def _variables(store: Store) -> dict[str, str | None]:
    """Return the variables with which uv looks for interpreters in the store, and puts them."""
    # certificates of a company are in pip's settings; uv reads this variable
    cert = None if "SSL_CERT_FILE" in os.environ else pip_settings().get("cert")
    return {
        "UV_PYTHON_INSTALL_DIR": str(store.root / INTERPRETERS),
        "VIRTUAL_ENV": None,
        **({"SSL_CERT_FILE": cert} if cert else {}),
    }
