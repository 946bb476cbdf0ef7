"""Doctor's readings of the machine, each with a time limit.

A reading is a text, or the reason for its absence. Probes only use readings, so a recording is
enough to check a remote machine.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkforge.core import plain, typed
from sparkforge.core.run import Glimpse, glimpse
from sparkforge.inspect.doctor.checkpoint import Checkpoint
from sparkforge.inspect.doctor.rights import Rights
from sparkforge.runtime import envfile
from sparkforge.serving import devices

FILES = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/net/tcp",
    "/proc/net/tcp6",
    "/etc/os-release",
    "/etc/dgx-release",
    "/proc/driver/nvidia/version",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/class/dmi/id/product_name",
    "/sys/class/dmi/id/bios_version",
    "/sys/class/dmi/id/bios_date",
    "/proc/cmdline",
)
DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "nvidia-smi": ("nvidia-smi", "-q", "-x"),
    "compute-cap": ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"),
    "docker": ("docker", "info", "--format", "{{json .}}"),
    "buildx": ("docker", "buildx", "version"),
    "compose": ("docker", "compose", "version", "--short"),
    "nvidia-ctk": ("nvidia-ctk", "--version"),
    "git": ("git", "--version"),
    "g++": ("g++", "--version"),
}
_VARIABLES = (
    "http_proxy",
    "https_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "all_proxy",
    "ALL_PROXY",
    "no_proxy",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "PIP_CERT",
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "HF_HUB_OFFLINE",
)


@dataclass(frozen=True)
class PathState:
    """Rights for a path; the defaults are for one that was not read."""

    exists: bool = False
    readable: bool = False
    writable: bool = True
    """A missing path: whether it can be created."""
    folder: bool = True


@dataclass(frozen=True)
class Disk:
    """A file system, in bytes."""

    path: str
    free: int
    total: int


@dataclass(frozen=True)
class Disks:
    """Readings of the disks; None: not read."""

    store: Disk | None = None
    model: Disk | None = None
    checkpoint: Checkpoint | None = None
    """The files of the model."""
    rights: Rights | None = None
    """Of the container's user in the folder that Compose mounts."""


@dataclass(frozen=True)
class Readings:
    """All readings of a machine."""

    files: Mapping[str, str | None] = field(default_factory=dict)
    """Text by path; None: missing or unreadable."""
    programs: Mapping[str, Glimpse] = field(default_factory=dict)
    """Output of each of ``PROGRAMS``."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """From Python: machine, kernel, page size, …; ``cuda_total``: bytes of an integrated GPU, or
    ""."""
    paths: Mapping[str, PathState] = field(default_factory=dict)
    disks: Disks = field(default_factory=Disks)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, and of .env."""
    late: tuple[str, ...] = ()
    """Names of readings without a result in time."""

    def output(self, name: str) -> Glimpse:
        """Return a program's output; without an exit code if it did not run."""
        return self.programs.get(name, Glimpse(None, problem=f"{name} was not read"))

    def state(self, path: str) -> PathState:
        """Return the rights for a path."""
        return self.paths.get(path, PathState())

    def text(self, path: str) -> str:
        """Return a file's text, or ""."""
        return (self.files.get(path) or "").strip()

    def dumps(self) -> str:
        """Return this as JSON for ``loads``."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def loads(cls, text: str) -> Readings:
        """Return the readings in a text of ``dumps``.

        Raises:
            ValueError: the text is invalid.
        """
        found = typed.load(cls, plain.json_of(text), exact=False)
        if found is None or not found.facts:
            raise ValueError("it has no readings of a machine")
        return found


def first_line(text: str) -> str:
    """Return the first line of a program's output, shortened to a line."""
    return (text.strip().splitlines() or [""])[0][:120]


def bounded(works: Mapping[str, Callable[[], Any]], timeout_s: float) -> dict[str, Any]:
    """Run functions in parallel; return the results of those that ended in time.

    A hanging one (a network file system without its server) is left running. One that raises
    OSError has no result.
    """
    results: dict[str, Any] = {}

    def do(name: str, work: Callable[[], Any]) -> None:
        try:
            results[name] = work()
        except OSError:
            pass  # without a result for the probes

    threads = [
        threading.Thread(target=do, args=pair, daemon=True, name=pair[0]) for pair in works.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        if not thread.is_alive():
            continue
        timeout_s = 0.01  # all others had the same time
    return dict(results)


def take(
    *,
    store: Path,
    model: Path,
    env_file: Path,
    checkpoint: Callable[[], Checkpoint] | None = None,
    rights: Callable[[], Rights] | None = None,
    timeout_s: float = 8.0,
) -> Readings:
    """Read this machine.

    Args:
        model: folder of the model, existing or not.
        checkpoint: reads the model's files; None: the target has no model.
        rights: reads the rights of the container's user there; None: Compose mounts no folder.
        env_file: Compose's .env; the environment has priority.
        timeout_s: for each program; all run at once.
    """
    works: dict[str, Callable[[], Any]] = {}
    for name, words in PROGRAMS.items():
        works[f"program {name}"] = _asker(words, timeout_s)
    for path in FILES:
        works[f"file {path}"] = _reader(Path(path))
    socket = _socket(os.environ.get("DOCKER_HOST", ""))
    for path in (*DEVICES, *([socket] if socket else []), str(store)):
        works[f"path {path}"] = _state(Path(path))
    works["disk store"] = _disk(store)
    works["disk model"] = _disk(model)
    if checkpoint is not None:
        works["disk checkpoint"] = checkpoint
    if rights is not None:
        works["disk rights"] = rights
    works["variables"] = lambda: variables(env_file)
    works["python"] = lambda: _pythons(timeout_s)
    works["cuda"] = devices.unified_bytes
    done = bounded(works, timeout_s + 2)

    def of(kind: str) -> dict[str, Any]:
        return {n.partition(" ")[2]: v for n, v in done.items() if n.startswith(f"{kind} ")}

    facts = {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "page_size": str(os.sysconf("SC_PAGESIZE")),
        "python": platform.python_version(),
        "user": str(os.getuid()),
        "docker_socket": socket,
        "pythons": done.get("python", ""),
        "cuda_total": str(done.get("cuda") or ""),
    }
    running = {thread.name for thread in threading.enumerate()}
    late = tuple(sorted((works.keys() - done.keys()) & running))
    return Readings(
        of("file"),
        of("program"),
        facts,
        of("path"),
        Disks(**of("disk")),
        done.get("variables", {}),
        late,
    )


def _asker(words: tuple[str, ...], timeout_s: float) -> Callable[[], Glimpse]:
    return lambda: glimpse(*words, timeout_s=timeout_s)


def _reader(path: Path) -> Callable[[], str | None]:
    def read() -> str:
        with path.open("rb") as file:
            return file.read(1 << 20).decode(errors="replace")

    return read


def _state(path: Path) -> Callable[[], PathState]:
    def look() -> PathState:
        nearest = _existing(path)
        return PathState(
            exists=path.exists(),
            readable=os.access(path, os.R_OK),
            # a missing path is created in the nearest existing folder
            writable=os.access(nearest, os.W_OK | (os.X_OK if nearest.is_dir() else 0)),
            folder=path.is_dir() if path.exists() else nearest.is_dir(),
        )

    return look


def _existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def _disk(path: Path) -> Callable[[], Disk]:
    def look() -> Disk:
        usage = shutil.disk_usage(_existing(path))
        return Disk(str(path), usage.free, usage.total)

    return look


def _socket(docker_host: str) -> str:
    """Return the path of the engine's socket, or "" for an engine with another address."""
    if not docker_host:
        return "/var/run/docker.sock"
    return docker_host.removeprefix("unix://") if docker_host.startswith("unix://") else ""


def variables(env_file: Path) -> dict[str, str]:
    """Return the variables of Compose and the hub's tools, without tokens.

    From .env, overridden by the environment.
    """
    found = all_variables(env_file)
    return {name: value for name, value in found.items() if "TOKEN" not in name}


def all_variables(env_file: Path) -> dict[str, str]:
    """Return the same with tokens, to use or mask them."""
    found = envfile.read(env_file)
    for name, value in os.environ.items():
        if name in _VARIABLES or name.startswith(("SPARKFORGE_", "NCCL_", "GLOO_", "UCX_", "HF_")):
            found[name] = value
    return found


def _pythons(timeout_s: float) -> str:
    """Return the working versions of Python on the PATH, such as ``3.11 3.12``.

    A version manager's shim is on the PATH even if the version itself is not installed.
    """
    names = [f"3.{minor}" for minor in range(10, 16) if shutil.which(f"python3.{minor}")]
    asked = {name: _asker((f"python{name}", "--version"), timeout_s) for name in names}
    answers = bounded(asked, timeout_s)
    return " ".join(
        name
        for name in names
        if name in answers and answers[name].code == 0 and f"Python {name}." in answers[name].out
    )
