"""Real things for tests to work on: a loopback server, git repositories, wheels, sdists.

Nothing here reaches beyond this machine, and nothing stands in for code of sparkforge.
"""

import base64
import csv
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EPOCH = 1_700_000_000
# how long a test waits for an event: a busy machine may take minutes for a second of work
PATIENCE_S = 300.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""For servers of tests. With two cores vLLM has one thread in any case, and binds it, and all other
threads of its worker, to the first core: those of all servers of a machine, one for all."""


def linked_checkout(folder: Path) -> Path:
    """Make a checkout's folder, with the real pins, patches and locks; returns it."""
    folder.mkdir()
    shutil.copy(ROOT / "pins.yaml", folder)  # a link would lead to the real checkout
    for name in ("patches", "requirements", "kernels"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def sha256(data: bytes) -> str:
    """Return the sha256 of bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def wait_for(
    condition: Callable[[], bool], seconds: float = PATIENCE_S, every_s: float = 0.01
) -> None:
    """Wait until a condition holds; fail the test where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every_s)


def pip_variables() -> str:
    """Return the output of ``pip config list`` where no file is read, without pip's 0.5 s."""
    return "".join(
        f":env:.{name.removeprefix('PIP_').lower().replace('_', '-')}={value!r}\n"
        for name, value in os.environ.items()
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE"
    )


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def python(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start Python code in a process of its own, with this checkout importable."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe, same = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, env=env, text=True, stdout=pipe, stderr=same)


def finished(child: subprocess.Popen[str], seconds: float = PATIENCE_S) -> str:
    """Return a process's output once it ended well."""
    out, _ = child.communicate(timeout=seconds)
    assert child.returncode == 0, out
    return out


def inner(folder: Path) -> Path:
    """Return where our own requests go, in a folder for temporary files; makes its folder."""
    (folder / "sparkforge").mkdir(mode=0o700, exist_ok=True)
    return folder / "sparkforge" / "door.sock"


def health(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the image's health check; ``folder`` is the one for temporary files."""
    return health_check({"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)})


def health_check(env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the image's health check in an environment."""
    command = [sys.executable, str(ROOT / "scripts" / "healthcheck.py")]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


# -- http ------------------------------------------------------------------------


@dataclass
class Page:
    """What the server answers on a path."""

    body: bytes
    ranges: bool = True  # whether Range requests are honoured
    statuses: list[int] = field(default_factory=list)  # answers, one a request, before the body
    cut: int = 0  # in the first so many requests, end the connection after ``cut_at`` bytes
    cut_at: int = 0
    pause_s: float = 0.0  # between two pieces of ``piece`` bytes
    piece: int = 1 << 20
    headers: Mapping[str, str] = field(default_factory=dict)  # more of them
    length: bool = True  # whether to say how long the body is


class Server:
    """A web server on loopback: pages by path, and the requests that came."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.requests: list[tuple[str, str | None]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner._answer(self)

            def do_HEAD(self) -> None:
                self.send_error(405)  # as many do; uv then asks for the file itself

            def log_message(self, format: str, *args: object) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients of these tests are killed in the middle of an answer."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def add(self, path: str, page: Page) -> str:
        """Put a page on a path; returns its URL."""
        self.pages[path] = page
        return self.url(path)

    def ranges(self, path: str) -> list[str | None]:
        """Return the Range header of every request for a path."""
        return [header for asked, header in self.requests if asked == path]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        header = handler.headers.get("Range")
        self.requests.append((path, header))
        page = self.pages.get(path)
        if page is None or page.statuses:
            status = 404 if page is None else page.statuses.pop(0)
            _begin(handler, status, {"Content-Length": "0", **(page.headers if page else {})})
            return
        first, _, last = (header if header and page.ranges else "bytes=0-")[6:].partition("-")
        start, end = int(first), int(last) + 1 if last else len(page.body)
        if start and start >= len(page.body):
            handler.send_error(416)
            return
        body = page.body[start:end]
        part, headers = bool(start or last), {"Content-Type": "text/html", **page.headers}
        if page.length:
            headers["Content-Length"] = str(len(body))
        if part:
            headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(page.body)}"
        _begin(handler, 206 if part else 200, headers)
        if page.cut > 0:
            page.cut -= 1
            body = body[: max(0, page.cut_at - start)]
        for at in range(0, len(body), page.piece):
            handler.wfile.write(body[at : at + page.piece])
            handler.wfile.flush()
            time.sleep(page.pause_s)


def _begin(handler: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str]) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


def add_project(server: Server, project: str, files: Mapping[str, bytes]) -> None:
    """Put a project's page and files onto a server's simple index."""
    links = ""
    for name, data in files.items():
        server.add(f"/files/{name}", Page(data))
        links += f'<a href="/files/{name}#sha256={sha256(data)}">{name}</a><br>\n'
    server.add(f"/simple/{project}/", Page(f"<!doctype html><body>{links}</body>".encode()))


# -- git -------------------------------------------------------------------------


def write_files(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Write files (None removes one) below a folder."""
    for name, data in files.items():
        path = folder / name
        if data is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class Repo:
    """A throw-away git repository whose commits are the same in every run; new, or one there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / ".git").is_dir():
            path.mkdir(parents=True)
            self("init", "--quiet", "--initial-branch=main", "--template=")

    def __call__(self, *args: str, stdin: bytes | None = None) -> str:
        ada = {"NAME": "Ada", "EMAIL": "ada@example.invalid", "DATE": f"{EPOCH} +0200"}
        env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        for who in ("AUTHOR", "COMMITTER"):
            env |= {f"GIT_{who}_{what}": value for what, value in ada.items()}
        command = ["git", "-C", str(self.path), *args]
        done = subprocess.run(command, env=env, input=stdin, check=True, stdout=subprocess.PIPE)
        return done.stdout.decode(errors="surrogateescape").strip()

    def write(self, files: Mapping[str, bytes | None]) -> None:
        """Write files (None removes one) into the working tree."""
        write_files(self.path, files)

    def commit(self, files: Mapping[str, bytes | None], message: str = "A change") -> str:
        """Write files, commit everything, return the commit."""
        self.write(files)
        self("add", "--all", "--force")
        self("commit", "--quiet", "--allow-empty", "-F", "-", stdin=message.encode())
        return self("rev-parse", "HEAD")


BODY = """\
The release lacks this; a test of ours needs a patch that is well formed
in every respect, so this body says why it exists and what it costs.

Upstream-Status: Pending
Drop-when: test; upstream has it
Risk: build
Test: tests/test_it.py::test_it
"""


# -- wheels and sdists -----------------------------------------------------------


def record_line(name: str, data: bytes) -> tuple[str, str, str]:
    """Return a RECORD row."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(len(data))


def make_wheel(
    folder: Path,
    name: str = "demo",
    version: str = "1.0",
    files: Mapping[str, bytes] | None = None,
    *,
    tag: str = "py3-none-any",
    requires: Iterable[str] = (),
    info: Mapping[str, bytes] | None = None,
    executable: Iterable[str] = (),
    stored: Iterable[str] = (),
    descriptors: bool = False,
    metadata: bytes | None = None,
) -> Path:
    """Write a wheel with a right RECORD, packed as asked for.

    Args:
        info: more files of the .dist-info folder, by their name in it.
        descriptors: write sizes behind the data, as a packer to a pipe does.
    """
    stem = f"{name}-{version}"
    fields = [f"Requires-Dist: {one}" for one in requires]
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *fields])
    members = {
        **(files if files is not None else {"demo/__init__.py": b"x = 1\n"}),
        f"{stem}.dist-info/METADATA": metadata or f"{text}\n\nA demo.\n".encode(),
        f"{stem}.dist-info/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
        ),
        **{f"{stem}.dist-info/{key}": data for key, data in (info or {}).items()},
    }
    record = f"{stem}.dist-info/RECORD"
    rows = [
        (key, "", "") if key in (f"{record}.jws", f"{record}.p7s") else record_line(key, data)
        for key, data in members.items()
    ]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([*rows, (record, "", "")])
    members[record] = out.getvalue().encode()
    path = folder / f"{stem}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    sink = _Pipe() if descriptors else io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for key, data in members.items():
            entry = zipfile.ZipInfo(key, (2020, 2, 2, 2, 2, 2))
            entry.external_attr = (0o100755 if key in executable else 0o100664) << 16
            packing = zipfile.ZIP_STORED if key in stored else zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, packing)
    path.write_bytes(sink.getvalue())
    return path


class _Pipe(io.BytesIO):
    """A sink that can't seek: zipfile then writes data descriptors."""

    def tell(self) -> int:
        raise OSError("a pipe")


def tar_member(
    name: str,
    data: bytes = b"",
    *,
    mode: int = 0o644,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member for ``make_tar``."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.type, member.linkname = len(data), mode, kind, link
    member.mtime = EPOCH
    return member, data


def make_tar(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> Path:
    """Write a .tar.gz with the same bytes every time."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data) if member.isreg() else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return path


def make_sdist(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """Write an sdist with its single top folder."""
    top = f"{name}-{version}"
    members = [tar_member(f"{top}/{key}", data) for key, data in files.items()]
    return make_tar(folder / f"{top}.tar.gz", members)
