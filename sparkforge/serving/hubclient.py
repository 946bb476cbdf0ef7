"""Requests to the hub, in the process that downloads; every unusable answer is one StartError.

huggingface_hub handles proxies, tokens and addresses. Its own download (1.33.0) is not used: it
restarts each file after a kill, checks no hash, accepts file names of the server, and follows lists
and pauses without limit.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import parse_qsl, quote, urlsplit

import httpx
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._validators import validate_repo_id

from sparkforge.serving.access import shown
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import EX_DATAERR, EX_NOHOST, StartError
from sparkforge.serving.hubfiles import COMMIT, Listed, ListingError, listed, read_by_vllm
from sparkforge.serving.hubpart import Part, WrongBytesError

_ATTEMPTS = 6  # in a row without a new byte
_PAUSE_S = 8.0  # between two of them at most, without a Retry-After
_RETRY_AFTER_S = 60.0  # at most
_PAGES = 200
_PAGE_BYTES = 16 << 20
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_DOCUMENT_S = 120.0  # for one page of a list


class StoppedError(Exception):
    """Another file of the same download has failed."""


class Hub:
    """Client of the hub for one model."""

    def __init__(self, model: str) -> None:
        try:
            validate_repo_id(model)
        except HFValidationError as error:
            raise StartError(f"SPARKFORGE_MODEL is not a name on the hub: {shown(error)}") from None
        self.stopped = threading.Event()
        self.model, self.endpoint = model, constants.ENDPOINT.rstrip("/")
        self.host = shown(urlsplit(self.endpoint).netloc.rpartition("@")[2] or self.endpoint)
        self.headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        self.timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def commit(self, revision: str) -> str:
        """Return the commit of a branch or tag; StartError if the hub does not give it."""
        url = f"{self.endpoint}/api/models/{self.model}/revision/{quote(revision, safe='')}"
        body, _ = self._document(url, {}, revision)
        try:
            found = Document.parse("the hub's answer", body).get(str, "sha")
        except DocumentError as error:
            raise self._odd(error) from None
        if not COMMIT.fullmatch(found):
            raise self._odd(f"{revision} stands for {found[:100]!r}, which is not a commit")
        return found

    def files(self, commit: str) -> list[Listed]:
        """Return the files of a commit that vLLM reads."""
        try:
            return read_by_vllm(listed(self._pages(commit)))
        except (ListingError, DocumentError) as error:
            raise self._odd(error) from None

    def _pages(self, commit: str) -> Iterator[Document]:
        url = f"{self.endpoint}/api/models/{self.model}/tree/{commit}"
        query = {"recursive": "true", "expand": "false"}
        seen: list[dict[str, str]] = []
        while query not in seen:
            if len(seen) == _PAGES:
                raise ListingError(f"the list of files has more than {_PAGES} pages")
            seen.append(query)
            body, following = self._document(url, query, commit)
            yield Document.parse("the hub's list of files", body)
            if not following:
                return
            # only the query of the next page's address is used: the token goes to this host only
            query = dict(parse_qsl(urlsplit(following).query))
        raise ListingError("the list of files begins again after its last page")

    def _document(self, url: str, query: Mapping[str, str], revision: str) -> tuple[bytes, str]:
        """Return an answer's body, and the address of the next page, or ""."""
        found = bytearray()
        following = ""
        end = time.monotonic() + _DOCUMENT_S

        def take(response: httpx.Response) -> None:
            nonlocal following
            found.clear()
            following = response.links.get("next", {}).get("url", "")
            for piece in response.iter_bytes(1 << 16):
                found.extend(piece)
                if len(found) > _PAGE_BYTES:
                    raise self._odd(f"an answer has more than {_PAGE_BYTES >> 20} MiB")
                if time.monotonic() > end:
                    raise self._odd(f"an answer takes more than {_DOCUMENT_S:.0f} s")

        failures = 0
        while (why := self._get(url, query, {}, revision, take)) is not None:
            failures += 1
            self._pause(failures, why)
        return bytes(found), following

    def download(self, commit: str, part: Part) -> None:
        """Download the rest of a part.

        Raises:
            StartError: the hub does not send it.
            WrongBytesError: the hub sends other bytes.
            OSError: the disk is full.
        """
        url = f"{self.endpoint}/{self.model}/resolve/{commit}/{quote(part.file.path)}"
        best, failures = part.size, 0

        def take(response: httpx.Response) -> None:
            if part.size and response.status_code != 206:
                part.restart()  # a server without ranges starts again
            elif part.size and not response.headers.get("Content-Range", "").startswith(
                f"bytes {part.size}-"
            ):
                raise WrongBytesError(f"{part.file.path}: the hub sends another part of the file")
            for piece in response.iter_bytes():  # written at once, so that a kill loses none
                part.write(piece)
                if self.stopped.is_set():
                    raise StoppedError

        while part.size < part.file.size:
            span = {"Range": f"bytes={part.size}-"} if part.size else {}
            why = self._get(url, {}, span, commit, take)
            if part.size > best:
                best, failures = part.size, 0
            if part.size < part.file.size:
                failures += 1
                self._pause(failures, why or (f"{part.file.path} ends too early", 0.0))

    def _get(
        self,
        url: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        revision: str,
        take: Callable[[httpx.Response], None],
    ) -> tuple[str, float] | None:
        """Send one request; returns None, or a reason to retry and the hub's pause in seconds."""
        try:
            with get_session().stream(
                "GET",
                url,
                params=query or None,
                headers={**self.headers, **headers},
                timeout=self.timeout_s,
            ) as response:
                status = response.status_code
                if status in (408, 416, 429) or status >= 500:
                    after = response.headers.get("Retry-After", "")
                    pause_s = float(after) if re.fullmatch("[0-9]{1,6}", after) else 0.0
                    return f"it answers with status {status}", min(pause_s, _RETRY_AFTER_S)
                if status not in (200, 206):
                    raise self._refused(response, revision)
                take(response)
        except (httpx.TransportError, httpx.StreamError, httpx.DecodingError) as error:
            return f"{type(error).__name__}: {shown(error)}", 0.0
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict) as error:
            raise self._odd(f"{type(error).__name__}: {error}") from None
        return None

    def _pause(self, failures: int, why: tuple[str, float]) -> None:
        words, pause_s = why
        if failures >= _ATTEMPTS:
            proxies = [variable for variable in _PROXIES if os.environ.get(variable)]
            through = f" (through the proxy of {proxies[0]})" if proxies else ""
            msg = (
                f"{self.model} cannot be downloaded from {self.host}{through}: {words}; check the"
                " network, HTTPS_PROXY and HF_ENDPOINT; the next start continues where this one"
                " stopped"
            )
            raise StartError(msg, EX_NOHOST)
        if self.stopped.wait(max(pause_s, min(0.25 * 2**failures, _PAUSE_S))):
            raise StoppedError

    def _refused(self, response: httpx.Response, revision: str) -> StartError:
        status = response.status_code
        kind = response.headers.get("X-Error-Code", "")
        token = "HF_TOKEN" if "authorization" in self.headers else ""
        if kind == "RevisionNotFound":
            words = f"{self.model} has no revision {revision} at {self.host}: correct"
            return StartError(f"{words} SPARKFORGE_MODEL_REVISION")
        if kind == "EntryNotFound":
            return self._odd("a listed file does not exist")
        if kind == "GatedRepo":
            words = f"{self.model} has restricted access: accept its terms at"
            return StartError(f"{words} {self.host}/{self.model}, and set HF_TOKEN to your token")
        if status == 403:
            words = f"{self.host} refuses {self.model} (status 403): the token in HF_TOKEN may"
            return StartError(f"{words} lack the right, or a proxy forbids it (HTTPS_PROXY)")
        if status in (401, 404):
            words = (
                f"{self.host} has no model {self.model} at {revision}"
                if status == 404
                else f"{self.host} requires a valid token for {self.model}"
            )
            remedy = "the token in HF_TOKEN may not be accepted" if token else "or set HF_TOKEN"
            return StartError(f"{words} (status {status}): check its name; {remedy}")
        if status == 407:
            msg = f"the proxy for {self.host} requires a password (status 407): HTTPS_PROXY"
            return StartError(msg)
        return self._odd(f"status {status} for {self.model} at {revision}")

    def _odd(self, why: object) -> StartError:
        msg = (
            f"{self.host} gives an unusable answer for {self.model}: {shown(why)}; check"
            " HF_ENDPOINT, or let vLLM download with SPARKFORGE_DOWNLOAD=vllm"
        )
        return StartError(msg, EX_DATAERR)
