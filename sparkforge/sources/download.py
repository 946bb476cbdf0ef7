"""URL + sha256 → a verified file in the store. Resumes, retries, shows progress."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import FetchError, IntegrityError
from sparkforge.core.log import human_bytes, log
from sparkforge.store.store import Store

_CHUNK = 1 << 20
_TIMEOUT_S = (15, 60)  # connect, and the longest silence between two chunks
_REMOTE_S = (10, 10)  # the same of a store that a build can do without
_ATTEMPTS = 5
_MOST_BYTES = 4 << 30  # of a file without a pinned size, so that no answer fills the disk
_FIRST_WAIT_S = 1.0  # doubled with every attempt
_NETWORK = "check the network, proxy and certificates, then run again: it continues"


@dataclass(frozen=True)
class Fetches:
    """Downloads of an item: bytes by sha256 (two items may need the same file), and descriptions of
    those whose size is not pinned."""

    known: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def fetch(
    store: Store,
    *,
    name: str,
    sha256: str,
    locate: Callable[[], str],
    size: int | None = None,
    offline: bool = False,
) -> Path:
    """Return the verified file, downloaded if the store lacks it.

    ``locate`` returns the URL (http, https or file), only if needed. FetchError: offline and not in
    the store, or the network failed repeatedly; the next run continues. IntegrityError: another
    hash, or more bytes than ``size``.
    """
    with store.lock(f"download-{sha256[:32]}"):
        if store.verified(sha256, name):
            return store.download_path(sha256, name)
        if offline:
            msg = f"{name}: not in the store, and --offline is set"
            raise FetchError(msg, "run once without --offline on a machine with network")
        partial = store.partial_path(sha256)
        try:
            if from_remote(store, f"downloads/{sha256}/{name}", partial, name, size):
                return store.accept_download(partial, sha256, name)
        except IntegrityError as error:
            log.warning(f"{store.remote}: {error.what}: fetching it elsewhere")
        _download(locate(), partial, name, size)
        return store.accept_download(partial, sha256, name)


def from_remote(store: Store, path: str, into: Path, name: str, size: int | None = None) -> bool:
    """Download a file of the remote store, unchecked; False: there is none, or not this file."""
    if store.remote is None:
        return False
    try:
        _download(f"{store.remote}/{quote(path)}", into, name, size, remote=True)
    except FetchError as error:
        reply = getattr(error.__cause__, "response", None)
        if error.__cause__ is not None and (reply is None or reply.status_code >= 500):
            log.warning(f"--remote {store.remote}: {error.what}: going on without it")
            store.remote = None
        return False
    return True


def size_of(url: str, name: str) -> int:
    """Return the size of a file in bytes without downloading it; FetchError if that fails."""
    import requests

    if local := _local(url, name):
        return local.stat().st_size
    try:
        # not HEAD, which some mirrors refuse; the body is not read
        headers = {"Accept-Encoding": "identity"}
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as reply:
            reply.raise_for_status()
            return int(reply.headers["Content-Length"])
    except (requests.RequestException, KeyError, ValueError) as error:
        msg = f"{name}: cannot read its size: {type(error).__name__}: {error}"
        raise FetchError(msg, _NETWORK) from error


def _local(url: str, name: str) -> Path | None:
    """Return the file that a file: URL names; None: another URL."""
    if urlsplit(url).scheme != "file":
        return None
    path = Path(unquote(urlsplit(url).path))
    if not path.is_file():
        raise FetchError(f"{name}: {path} does not exist", "check the index or mirror")
    return path


def _download(
    url: str, partial: Path, name: str, size: int | None, *, remote: bool = False
) -> None:
    import requests
    from urllib3.exceptions import HTTPError

    # our own loop: urllib3's repeats a request, but does not resume a body, which is where a
    # download of gigabytes fails
    attempts, limit_s = (1, _REMOTE_S) if remote else (_ATTEMPTS, _TIMEOUT_S)
    for attempt in range(1, attempts + 1):
        try:
            if local := _local(url, name):
                with disk_errors(partial):
                    shutil.copyfile(local, partial)
                return
            _stream(url, partial, name, size, limit_s)
            return
        except (requests.RequestException, HTTPError, ValueError) as error:  # of odd redirects, too
            response = getattr(error, "response", None)
            status = 500 if response is None else response.status_code
            retries = status >= 500 or status in (408, 429)
            # ValueError: requests' errors for an invalid URL
            if attempt == attempts or not retries or isinstance(error, ValueError):
                msg = f"{name}: download failed after {attempt} attempts: {error}"
                raise FetchError(msg, _NETWORK) from error
            wait = _FIRST_WAIT_S * 2 ** (attempt - 1)
            log.warning(f"{name}: {error}; retrying in {wait:.0f} s")
            time.sleep(wait)


def _stream(url: str, partial: Path, name: str, size: int | None, limit_s: tuple[int, int]) -> None:
    """Request the missing bytes once, and append them."""
    import requests
    from urllib3.exceptions import HTTPError

    have = partial.stat().st_size if partial.exists() else 0
    # no transfer compression: to resume, byte positions must be those of the file
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=limit_s) as reply:
        if have and reply.status_code == requests.codes.requested_range_not_satisfiable:
            return  # all bytes are here (or too many: the hash is checked later)
        reply.raise_for_status()
        resumed = reply.status_code == requests.codes.partial_content
        done = have if resumed else 0  # else the server ignored the range: start over
        length = reply.headers.get("Content-Length", "")[:19]
        total = done + int(length) if length.isdecimal() else None
        of_all = f" of {human_bytes(total)}" if total else ""
        with disk_errors(partial), partial.open("ab" if resumed else "wb") as file:
            try:
                # iter_content would unpack a gzip encoding, which servers declare for a .tar.gz
                for chunk in reply.raw.stream(_CHUNK, decode_content=False):
                    done += len(chunk)
                    if done > (size or _MOST_BYTES):
                        partial.unlink()  # the next run starts over
                        limit = f"{size} are pinned" if size else f"{_MOST_BYTES} is the limit"
                        msg = f"{name}: at least {done} bytes, but {limit}"
                        raise IntegrityError(msg, "fix a wrong size in pins.yaml, or the index")
                    file.write(chunk)
                    log.progress(f"{name}: {human_bytes(done)}{of_all}")
            except HTTPError as error:
                raise requests.ConnectionError(error) from error
