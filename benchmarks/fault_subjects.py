"""What benchmarks/faults.py disturbs: a command, where it writes, and what it has to give.

A subject is a build that is run again and again with the same checkout, store and temporary
folder, so that all bytes of its results can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from build import ensure_environment
from sparkforge.core.run import call
from tests.e2e.targets import small_target
from tests.project import new_project
from tests.support import ROOT, Server, add_project, make_wheel, sha256, wait_for

MARK = "SPARKFORGE_FAULTS"
"""A variable that all processes of a subject have, whatever their session."""
PATIENCE_S = 1800.0  # for one undisturbed build
_ENDING_S = 30.0  # a guardian gives a server ten seconds
# what uv writes into an environment about the moment of an installation, not about its contents
_MOMENTS = ("uv_cache.json",)
_TEMPORARY = re.compile(r"(^|/)(\.[^/]+-[a-z0-9_]{8}|tmp_[^/]+|[^/]+\.lock)$")
_LOCKS = re.compile(r"(^|/)(locks/[^/]+|\.lock)$|^disk/store/unpacked/")


@dataclass(frozen=True)
class Subject:
    """A build that can be disturbed.

    Attributes:
        command: the program and its arguments, without the store.
        cwd: where it runs.
        folder: has ``disk/store/`` and ``tmp/`` (its TMPDIR) of the subject.
        dist: folder of its published results.
        env: its variables.
        parts: folders of the store that ``forget`` may remove.
        server: where its downloads are; None: it has them already.
        engine: whether it makes an image.
        left: seconds that builds took, by the results that were taken away before.
        mebibytes: that a disk for the store needs.
    """

    name: str
    command: Sequence[str]
    cwd: Path
    folder: Path
    dist: Path
    env: Mapping[str, str]
    parts: Sequence[str]
    server: Server | None = None
    engine: bool = False
    mebibytes: int = 64
    left: dict[frozenset[str], float] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        """Where a disk of the store's own can be mounted."""
        return self.folder / "disk"

    @property
    def store(self) -> Path:
        """Its store."""
        return self.disk / "store"

    def start(self) -> subprocess.Popen[str]:
        """Start the build in a session of its own."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = {**self.env, MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        return subprocess.Popen(
            [*self.command, "--store", str(self.store)],
            cwd=self.cwd,
            env=env,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def forget(self, dice: random.Random, share: float = 0.6) -> list[str]:
        """Remove folders of the store and published results at random; returns their names."""
        gone = [name for name in self.parts if dice.random() < share]
        gone = gone or [dice.choice(self.parts)]
        for name in gone:
            if name == "dist":
                shutil.rmtree(self.dist, ignore_errors=True)
            elif name == "image":
                for tag in (one["tag"] for one in self._images()):
                    call("docker", "image", "rm", "--force", tag)
            else:
                for path in self.store.glob(name):
                    shutil.rmtree(path)
        return gone

    def _images(self) -> list[Mapping[str, Any]]:
        receipt = self.dist / "receipt.json"
        if not receipt.exists():
            return []
        items = json.loads(receipt.read_text())["items"]
        return [one["outputs"] for one in items if one["label"] == "image"]

    def outcome(self) -> dict[str, str]:
        """Return the hash of everything that the build gave, by name."""
        found = {
            f"dist/{path.name}": _digest(path)
            for path in self.dist.iterdir()
            if path.is_file() and path.name != "receipt.json"
        }
        receipt = json.loads((self.dist / "receipt.json").read_text())
        receipt.pop("run")  # times, states
        found["receipt"] = hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()
        for path in self.store.glob("artefacts/image/*/venv"):
            found |= _tree(path)
        if self.engine:
            for image in self._images():
                said = call("docker", "image", "inspect", "--format", "{{.Id}}", image["tag"])
                found[f"image {image['tag']}"] = said.stdout.decode().strip()
        return found

    def files(self) -> set[str]:
        """Return the files that the subject has written; of git's and uv's, temporary ones."""
        found = {
            str(path.relative_to(self.folder))
            for top in ("disk", "tmp")
            for path in (self.folder / top).rglob("*")
            if not path.is_dir()
        }
        kept = {
            name
            for name in found
            if not name.startswith(("disk/store/git/", "disk/store/unpacked/"))
        }
        temporary = {name for name in found - kept if _TEMPORARY.search(name)}
        # a record of each result stays until `clean`; byte code is written by whoever runs first
        return {
            name
            for name in kept | temporary
            if not _LOCKS.search(name) and "/__pycache__/" not in name
        }

    def processes(self) -> dict[int, str]:
        """Return the living processes of the subject's builds, by id."""
        mark = f"{MARK}={self.folder}\0".encode()
        found = {}
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and mark in (process / "environ").read_bytes():
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    if words:  # none: a zombie
                        found[int(process.name)] = words.decode(errors="replace")[:120]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def mounts(self) -> list[str]:
        """Return the mount points in the subject's folder."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return sorted(at for line in lines if (at := line.split()[1]).startswith(str(self.folder)))

    def all_ended(self) -> bool:
        """Wait for the subject's processes; returns whether all have ended."""
        try:
            wait_for(lambda: not self.processes(), _ENDING_S, 0.05)
        except AssertionError:
            return False
        return True

    def end_all(self) -> None:
        """Kill what is left of the subject's builds."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tree(folder: Path) -> dict[str, str]:
    """Return the hashes of an environment's files; no byte code, and no moments."""

    def one(path: Path) -> tuple[str, str]:
        if path.name == "RECORD":
            lines = path.read_text().splitlines()
            text = "\n".join(line for line in lines if not any(m in line for m in _MOMENTS))
            return str(path), hashlib.sha256(text.encode()).hexdigest()
        return str(path), f"{path.lstat().st_mode & 0o777:o} {_digest(path)}"

    paths = [
        Path(top, name)
        for top, folders, names in os.walk(folder)
        for name in [*names, *(one for one in folders if Path(top, one).is_symlink())]
        if not top.endswith("__pycache__") and name not in _MOMENTS
    ]
    with ThreadPoolExecutor() as pool:
        return dict(pool.map(one, paths))


# -- the subjects ---------------------------------------------------------------------------


@contextmanager
def small(folder: Path, name: str) -> Iterator[Subject]:
    """Yield the small project of the tests, its files on a loopback index.

    Args:
        name: ``small`` for its wheels, ``small-environment`` for an environment of two wheels.
    """
    server = Server()
    try:
        project = new_project(folder, server)
        parts = ["artefacts", "downloads", "git", "last", "dist"]
        if name != "small":
            third = make_wheel(folder / "third", "third", "1.0", {"third.py": b"here = True\n"})
            add_project(server, "third", {third.name: third.read_bytes()})
            lock = f"third==1.0 --hash=sha256:{sha256(third.read_bytes())}\n"
            (project.root / "requirements" / "tiny.txt").write_text(lock)
            parts = ["artefacts/image", "unpacked", "artefacts/wheels", "artefacts", "downloads"]
        words = [sys.executable, str(ROOT / "build.py"), "--target", "tiny", "--json"]
        words += ["--pins", str(project.root / "pins.yaml"), "--engine", "none"]
        yield Subject(
            name,
            [*words, "--until", "wheels" if name == "small" else "image"],
            folder,
            folder,
            _dist(project.root, folder) / "tiny",
            {**_environ(), "PIP_INDEX_URL": server.url("/simple/")},
            parts,
            server,
        )
    finally:
        server.close()


def _environ() -> dict[str, str]:
    dropped = ("PIP_CONFIG_FILE", "SPARKFORGE_STORE")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _dist(checkout: Path, folder: Path) -> Path:
    """Put a checkout's dist/ on the disk of the store."""
    dist = folder / "disk" / "dist"
    dist.mkdir(parents=True)
    (checkout / "dist").symlink_to(dist)
    return dist


def target(folder: Path, until: str, downloads: Path) -> Subject:
    """Return a build of the cpu target in a clone of this checkout, without an engine.

    Args:
        downloads: a store whose downloads are copied.
    """
    checkout = folder / "checkout"
    call("git", "clone", "--quiet", ROOT, checkout)
    ensure_environment(ROOT / ".venv", ROOT / "requirements" / "driver.txt")
    shutil.copytree(ROOT / ".venv", checkout / ".venv", symlinks=True)
    store = folder / "disk" / "store"
    store.mkdir(parents=True)
    if (downloads / "downloads").is_dir():
        # --reflink: a copy that shares its blocks, where the file system can
        call("cp", "-a", "--reflink=auto", downloads / "downloads", store / "downloads")
    words = [sys.executable, str(checkout / "build.py"), "--target", "cpu", "--engine", "none"]
    parts = ["artefacts/wheels", "artefacts/series", "artefacts/sources", "git", "dist"]
    if until == "image":
        parts = ["artefacts/image", "unpacked", "artefacts/wheelhouse", "artefacts/wheels", "dist"]
    return Subject(
        "environment" if until == "image" else "wheels",
        [*words, "--until", until, "--json"],
        checkout,
        folder,
        _dist(checkout, folder) / "cpu",
        _environ(),
        parts,
        mebibytes=16_384,
    )


def baked(folder: Path, base: str, downloads: Path) -> Subject:
    """Return a build of a small image in the engine of DOCKER_HOST: target rtx with few wheels."""
    one = target(folder, "wheels", downloads)
    pins = small_target(one.cwd, "rtx", "linux/amd64")
    words = [sys.executable, str(one.cwd / "build.py"), "--target", "rtx", "--pins", str(pins)]
    return replace(
        one,
        name="image",
        command=[*words, "--engine", "docker", "--base", base, "--until", "image", "--json"],
        dist=one.dist.with_name("rtx"),
        parts=("image", "artefacts/image", "artefacts/wheels", "dist"),
        engine=True,
    )
