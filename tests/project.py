"""A small project of its own: pins, one patch, an sdist and a wheel on a loopback index."""

import atexit
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.cli import main
from sparkforge.series import series
from tests import forked
from tests.support import (
    BODY,
    EPOCH,
    PATIENCE_S,
    ROOT,
    Page,
    Repo,
    Server,
    add_project,
    make_sdist,
    make_wheel,
    sha256,
)

_APP = main.app()
PLATFORM = "linux/arm64" if platform.machine() in ("aarch64", "arm64") else "linux/amd64"
FILES: Mapping[str, bytes] = {
    "demo/__init__.py": b"x = 1\n",
    "demo/mod.py": b"".join(b"line_%d = 1\n" % i for i in range(30)),
    "csrc/kernel.cu": b"// native\n",
    "tests/test_mod.py": b"def test_mod(): ...\n",
}
PATCHED = FILES["demo/mod.py"].replace(b"line_20 = 1", b"line_20 = 2")
PATCH = "change-a-line-of-the-module.patch"

PINS = """\
schema: 1
release: {{counter: 3, source_date_epoch: {epoch}}}
upstreams:
  demo:
    git: https://127.0.0.1:9/demo.git
    tag: v1.0
    commit: {commit}
    version: 1.0
    files:
      sdist: {{project: demo, file: demo-1.0.tar.gz, sha256: {sdist}, size: {sdist_size}}}
      wheel: {{project: demo, file: demo-1.0-py3-none-any.whl, sha256: {wheel}, size: {wheel_size}}}
    source_file: sdist
    paths:
      - {{repo: demo/, wheel: demo/}}
      - {{repo: tests/, wheel: null}}
images: {{}}
models: {{}}
vocabularies: {{}}
targets:
  tiny:
    summary: a small target
    platforms: [{platform}]
    python: 3.11
    source: release
    wheels:
      demo:
        files: {{{platform}: wheel}}
        local: spark
    requirements: {{{platform}: requirements/tiny.txt}}
    serve: []
"""


def within(words: Sequence[str], pins: Path, store: Path) -> list[str]:
    """Return the options that have a command use a project and a store, of those that it has."""
    _, apps, _ = _APP.parse_commands(main.spelled_out(words))
    known = {name for one in apps[-1].assemble_argument_collection() for name in one.names}
    places = {"--pins": pins, "--store": store}
    return [str(one) for name in places if name in known for one in (name, places[name])]


@dataclass
class Project:
    """The checkout (pins.yaml, patches/, requirements/), its store and where its files are."""

    root: Path
    store: Path
    server: Server
    repo: Repo

    def command(self, *words: str) -> list[str]:
        places = within(words, self.root / "pins.yaml", self.store)
        behind: list[str] = []
        if "--" in words:  # what stands behind is not ours
            at = words.index("--")
            words, behind = words[:at], list(words[at:])
        return [sys.executable, "-m", "sparkforge", *words, *places, *behind]

    def env(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **more}

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            cwd=self.root.parent,
            env=self.env(**env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(
        self, *words: str, code: int = 0, timeout_s: float = PATIENCE_S, **env: str
    ) -> tuple[str, str]:
        """Run one command; returns (stdout, stderr)."""
        if any(name.startswith("PYTHON") for name in env):  # what Python reads as it starts
            child = self.start(*words, **env)
            out, err = child.communicate(timeout=timeout_s)
            found = child.returncode
        else:
            found, out, err = forked.run(
                self.command(*words)[3:], self.root.parent, self.env(**env), timeout_s
            )
        assert found == code, f"exit {found}\n{out}\n{err}"
        assert "Traceback" not in out + err
        return out, err

    def build(self, *words: str, until: str = "wheels") -> Any:
        """Build up to a stage; returns the receipt."""
        out, _ = self.run(
            "build", "--target", "tiny", "--engine", "none", "--until", until, "--json", *words
        )
        return json.loads(out)

    @property
    def wheel(self) -> Path:
        (path,) = (self.root / "dist" / "tiny").glob("demo-*.whl")
        return path

    @property
    def patches(self) -> Path:
        return self.root / "patches" / "demo"

    def patch(self, files: Mapping[str, bytes | None], subject: str = "") -> Path:
        """Write the series: one patch with these changes, nothing else."""
        return write_patch(self.repo, self.patches, files, subject)

    def edit_pins(self, old: str, new: str) -> None:
        path = self.root / "pins.yaml"
        text = path.read_text()
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new))

    def requests(self) -> list[str]:
        """Return the paths that the server was asked for since the last call."""
        asked = [path for path, _ in self.server.requests]
        self.server.requests.clear()
        return asked


def new_project(folder: Path, server: Server) -> Project:
    """Make the project in a folder, its files on a server."""
    shutil.copytree(_template(), folder, dirs_exist_ok=True)
    release = folder / "release"
    add_project(
        server, "demo", {path.name: path.read_bytes() for path in sorted(release.iterdir())}
    )
    return Project(folder / "project", folder / "store", server, Repo(folder / "upstream"))


@functools.cache
def _template() -> Path:
    """Make the project once, which takes twenty runs of git; tests get a copy."""
    holder = tempfile.TemporaryDirectory(prefix="sparkforge-project-")
    atexit.register(holder.cleanup)
    folder = Path(holder.name)
    repo = Repo(folder / "upstream")
    commit = repo.commit(dict(FILES))
    repo("tag", "v1.0")
    root = folder / "project"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements" / "tiny.txt").touch()
    (root / "requirements" / "driver.txt").touch()
    (root / "tests").mkdir()
    (root / "tests" / "test_it.py").write_text("def test_it() -> None: ...\n")
    sdist = make_sdist(folder / "release", "demo", "1.0", FILES).read_bytes()
    inside = {name: data for name, data in FILES.items() if name.startswith("demo/")}
    wheel = make_wheel(folder / "release", "demo", "1.0", inside).read_bytes()
    (root / "pins.yaml").write_text(
        PINS.format(
            epoch=EPOCH,
            commit=commit,
            sdist=sha256(sdist),
            wheel=sha256(wheel),
            sdist_size=len(sdist),
            wheel_size=len(wheel),
            platform=PLATFORM,
        )
    )
    write_patch(repo, root / "patches" / "demo", {"demo/mod.py": PATCHED})
    return folder


def write_patch(
    repo: Repo, folder: Path, files: Mapping[str, bytes | None], subject: str = ""
) -> Path:
    """Write the series: one patch with these changes, nothing else."""
    repo("checkout", "--quiet", "--detach", "v1.0")
    repo.commit(files, f"{subject or 'Change a line of the module'}\n\n{BODY}")
    name, data = series.export(repo.path, "HEAD~1", "HEAD")[0]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.patch"):
        old.unlink()
    (folder / name).write_bytes(data)
    (folder / "series").write_text(f"{name}\n")
    return folder / name


def slow_down(server: Server, path: str, pieces: int = 40, pause_s: float = 0.02) -> Page:
    """Make a page of the server arrive in pieces."""
    page = server.pages[path]
    page.piece = max(1, len(page.body) // pieces)
    page.pause_s = pause_s
    return page
