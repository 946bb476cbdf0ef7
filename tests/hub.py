"""A model hub on loopback, with the real hub's routes: enough of it for whoever downloads a model.

    /api/models/ID/revision/REV     {"sha": COMMIT, …}
    /api/models/ID/tree/REV         list of files
    /ID/resolve/REV/FILE            HEAD and GET, with ETag, X-Repo-Commit, X-Linked-Size,
                                    X-Linked-ETag and ranges

Standard library only, so that it runs in any container. Tests make it lie by changing its fields.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

COMMIT = "b5c939de8f754692c1647ca79fbf85e8c1e70f8a"
LARGE = (".safetensors", ".bin")  # the hub keeps these by their sha256, others by git's name


def entry(path: str, body: bytes) -> dict[str, Any]:
    """Return what the hub lists of a file."""
    blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    found: dict[str, Any] = {"type": "file", "oid": blob, "size": len(body), "path": path}
    if path.endswith(LARGE):
        oid = hashlib.sha256(body).hexdigest()
        found["lfs"] = {"oid": oid, "size": len(body), "pointerSize": 135}
    return found


class Request(NamedTuple):
    """One request that came."""

    method: str
    path: str


@dataclass
class Hub:
    """One model on a hub of its own."""

    files: dict[str, bytes]
    model: str = "some/model"
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})  # by branch or tag
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """Answers to give first, by path, one a request."""
    token: str = ""  # requests must carry it; "": none
    body: Callable[[str, bytes], bytes] = lambda path, data: data
    """Changes what is sent of a file."""
    requests: list[Request] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)  # files are sent while it is set
    _http: ThreadingHTTPServer | None = None

    def start(self, port: int = 0, host: str = "127.0.0.1") -> Hub:
        """Serve in the background, on any port."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients are killed in the middle of an answer

        self.held.set()
        self._http = Quiet((host, port), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def close(self) -> None:
        assert self._http is not None
        self.held.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def port(self) -> int:
        assert self._http is not None
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.port}"

    def asked_for(self, path: str) -> list[Request]:
        """Return the requests for a path, or below it."""
        return [one for one in self.requests if one.path.startswith(path)]

    # -- answers -----------------------------------------------------------------

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        path = unquote(url.path)
        auth = handler.headers.get("Authorization")
        self.requests.append(Request(handler.command, path))
        if self.statuses.get(path):
            self._send(handler, self.statuses[path].pop(0), b"{}")
            return
        if self.token and auth != f"Bearer {self.token}":
            self._send(handler, 403 if auth else 401, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        model = re.escape(self.model)
        if match := re.fullmatch(rf"/api/models/{model}(?:/revision/(.+))?", path):
            self._revision(handler, match[1] or "main")
        elif match := re.fullmatch(rf"/api/models/{model}/tree/([^/]+)/?", path):
            self._tree(handler, match[1])
        elif match := re.fullmatch(rf"/{model}/resolve/([^/]+)/(.+)", path):
            self._file(handler, match[1], match[2])
        else:
            self._send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _commit(self, handler: BaseHTTPRequestHandler, revision: str) -> str:
        commit = self.refs.get(revision, revision)
        if commit == revision and revision not in (COMMIT, *self.refs.values()):
            self._send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return ""
        return commit

    def _revision(self, handler: BaseHTTPRequestHandler, revision: str) -> None:
        if commit := self._commit(handler, revision):
            siblings = [{"rfilename": path} for path in self.files]
            found = {"id": self.model, "sha": commit, "siblings": siblings, "private": False}
            self._send(handler, 200, json.dumps(found).encode())

    def _tree(self, handler: BaseHTTPRequestHandler, revision: str) -> None:
        if not self._commit(handler, revision):
            return
        folders = {path.rpartition("/")[0] for path in self.files} - {""}
        found = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": one} for one in folders]
        found += [entry(path, body) for path, body in self.files.items()]
        self._send(handler, 200, json.dumps(found).encode())

    def _file(self, handler: BaseHTTPRequestHandler, revision: str, path: str) -> None:
        commit = self._commit(handler, revision)
        if not commit:
            return
        if path not in self.files:
            self._send(handler, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        known = entry(path, self.files[path])
        data = self.body(path, self.files[path])
        headers = {
            "ETag": f'"{known["oid"]}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
            "X-Linked-Size": str(known["size"]),
            "X-Linked-ETag": f'"{known.get("lfs", known)["oid"]}"',
        }
        status = 200
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range") or "")
        if span is not None:
            start, end = int(span[1]), int(span[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            status, data = 206, data[start : end + 1]
        self._send(handler, status, data, headers, slow=True)

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        slow: bool = False,
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if slow:
            self.held.wait()
        handler.wfile.write(body)
