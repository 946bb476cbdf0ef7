"""A small project of its own: pins, one patch, an sdist and a wheel on a loopback index."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge import series
from tests.support import (
    BODY,
    EPOCH,
    ROOT,
    Page,
    Repo,
    Server,
    add_project,
    make_sdist,
    make_wheel,
    sha256,
)

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
    source: {{provider: release}}
    wheels:
      demo:
        files: {{{platform}: wheel}}
        local: spark
    requirements: {{{platform}: requirements/tiny.txt}}
    serve: []
"""


@dataclass
class Project:
    """The checkout (pins.yaml, patches/, requirements/), its store and where its files are."""

    root: Path
    store: Path
    server: Server
    repo: Repo

    def command(self, *words: str) -> list[str]:
        places = ["--pins", str(self.root / "pins.yaml"), "--store", str(self.store)]
        behind: list[str] = []
        if "--" in words:  # what stands behind is not ours
            at = words.index("--")
            words, behind = words[:at], list(words[at:])
        return [sys.executable, "-m", "sparkforge", *words, *places, *behind]

    def env(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **more}

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words), cwd=self.root.parent, env=self.env(**env), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, code: int = 0, timeout_s: float = 60, **env: str) -> tuple[str, str]:
        """Run one command; returns (stdout, stderr)."""
        child = self.start(*words, **env)
        out, err = child.communicate(timeout=timeout_s)
        assert child.returncode == code, f"exit {child.returncode}\n{out}\n{err}"
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
        (path,) = (self.root / "dist" / "tiny").glob("*.whl")
        return path

    @property
    def patches(self) -> Path:
        return self.root / "patches" / "demo"

    def patch(self, files: Mapping[str, bytes | None], subject: str = "") -> Path:
        """Write the series: one patch with these changes, nothing else."""
        self.repo("checkout", "--quiet", "--detach", "v1.0")
        self.repo.commit(files, f"{subject or 'Change a line of the module'}\n\n{BODY}")
        name, data = series.export(self.repo.path, "HEAD~1", "HEAD")[0]
        self.patches.mkdir(parents=True, exist_ok=True)
        for old in self.patches.glob("*.patch"):
            old.unlink()
        (self.patches / name).write_bytes(data)
        (self.patches / "series").write_text(f"{name}\n")
        return self.patches / name

    def edit_pins(self, old: str, new: str) -> None:
        path = self.root / "pins.yaml"
        text = path.read_text()
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new))

    def requests(self) -> list[str]:
        """Return what was asked of the server since the last call."""
        asked = [path for path, _ in self.server.requests]
        self.server.requests.clear()
        return asked


def new_project(folder: Path, server: Server) -> Project:
    """Make the project in a folder, its files on a server."""
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
    add_project(server, "demo", {"demo-1.0.tar.gz": sdist, "demo-1.0-py3-none-any.whl": wheel})
    (root / "pins.yaml").write_text(
        PINS.format(epoch=EPOCH, commit=commit, sdist=sha256(sdist), wheel=sha256(wheel),
                    sdist_size=len(sdist), wheel_size=len(wheel), platform=PLATFORM)
    )  # fmt: skip
    project = Project(root, folder / "store", server, repo)
    project.patch({"demo/mod.py": PATCHED})
    return project


def slow_down(server: Server, path: str, pieces: int = 40, pause_s: float = 0.02) -> Page:
    """Make a page of the server arrive in pieces."""
    page = server.pages[path]
    page.piece = max(1, len(page.body) // pieces)
    page.pause_s = pause_s
    return page
