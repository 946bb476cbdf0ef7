"""An archive of Debian's kind with snapshots, on the engine's bridge, and a base that reads it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .served import docker

NEWEST = "newest"
"""The snapshot that moves on, and the only one that the base's own sources name."""
SUITE = "made-up"
# what the Dockerfile installs and the tests' base lacks; none of it runs
_NAMES = ("haproxy", "libnuma1", "tini")
_WHO = "Nobody <nobody@example.invalid>"
# unsigned, so that no test needs gpg; and not by the proxy of a machine that has one
_BASE = """\
FROM {base}
RUN rm -rf /etc/apt/sources.list.d && \\
    echo 'deb {url}/{newest} {suite} main' >/etc/apt/sources.list && \\
    printf '%s\\n' 'Acquire::AllowInsecureRepositories "true";' \\
      'APT::Get::AllowUnauthenticated "true";' 'Acquire::http::Proxy::{host} "DIRECT";' \\
      >/etc/apt/apt.conf.d/90made-up
"""


def deb(
    folder: Path, name: str, maintainer: str, fields: str, path: str, version: str = "1"
) -> Path:
    """Write a package with one file; returns it."""
    tree = folder / name
    (tree / path).parent.mkdir(parents=True)
    (tree / path).write_text(f"# made up, {version}\n")
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: {maintainer}\n"
        f"{fields + chr(10) if fields else ''}Description: made up\n"
    )
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "--build", tree, folder],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder / f"{name}_{version}_all.deb"


class Mirror:
    """A web server on the engine's bridge: a folder with snapshots of an archive."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        (bridge,) = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"]
        self.host: str = bridge["Gateway"]
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def log_request(self, *_: object) -> None:
                asked.append(self.path)

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer((self.host, 0), partial(Handler, directory=str(folder)))
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self._http.server_address[1]}"

    @property
    def words(self) -> tuple[str, str]:
        """Options of a build that reads it."""
        return "--mirror", f"apt={self.url}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def publish(self, version: str, *snapshots: str) -> None:
        """Give all packages a version, in some snapshots; their lists expired long ago."""
        for snapshot in (*snapshots, NEWEST):
            pool = self.folder / snapshot / version
            pool.mkdir(parents=True)
            entries = []
            for name in _NAMES:
                made = deb(pool, name, _WHO, "", f"usr/share/{name}", version)
                data, fields = made.read_bytes(), ["dpkg-deb", "--field", str(made)]
                control = subprocess.run(fields, check=True, capture_output=True, text=True).stdout
                where = f"Filename: {version}/{made.name}\nSize: {len(data)}\n"
                entries.append(f"{control}{where}SHA256: {hashlib.sha256(data).hexdigest()}\n")
            packages, lines = "\n".join(entries).encode(), ""
            for arch in ("amd64", "arm64"):
                path = f"main/binary-{arch}/Packages"
                file = self.folder / snapshot / "dists" / SUITE / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(packages)
                lines += f" {hashlib.sha256(packages).hexdigest()} {len(packages)} {path}\n"
            (file.parents[2] / "Release").write_text(
                f"Codename: {SUITE}\nArchitectures: amd64 arm64\nComponents: main\n"
                "Date: Sat, 21 Nov 2020 00:00:00 UTC\nValid-Until: Sat, 28 Nov 2020 00:00:00 UTC\n"
                f"SHA256:\n{lines}"
            )

    def base(self, base: str, tag: str) -> str:
        """Build a base whose own sources are the newest snapshot; returns its digest."""
        recipe = _BASE.format(base=base, url=self.url, newest=NEWEST, suite=SUITE, host=self.host)
        build = ["docker", "buildx", "build", "--provenance=false", "--load", "--tag", tag, "-"]
        subprocess.run(build, input=recipe.encode(), check=True)
        return docker("inspect", "--format", "{{.Id}}", tag).strip()

    def pin(self, snapshot: str) -> str:
        """Return the value of ``apt`` in pins.yaml."""
        return f"{{snapshot: {snapshot}, suites: [{SUITE}], components: [main]}}"
