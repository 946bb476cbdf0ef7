"""Folders of compiled kernels: one for each build and device, locked while a server uses it.

A build must not use kernels of another build: the caches' own keys distinguish versions, but not
our patches. So all caches are in one folder, whose name has a digest of the image's parts and the
device. Models are the same for every build and stay outside.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sparkforge.serving import devices
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import StartError

GIB = 1 << 30

ALWAYS: Mapping[str, str] = {"HOME": "home", "XDG_CACHE_HOME": "xdg"}
"""For libraries without a variable of their own; the image sets both for other programs."""

VARIABLES: Mapping[str, str] = {
    "VLLM_CACHE_ROOT": "vllm",  # torch.compile's graphs are there, too
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "home",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "NUMBA_CACHE_DIR": "numba",
    "CUDA_CACHE_PATH": "cuda",
}
"""Folders by variable of the server; a user's own value has priority."""

# of share/inputs.json: what the kernels and their compilers depend on
_PARTS = ("wheels", "wheelhouse", "base", "system_packages", "python", "platform", "release")
_GONE = ".gone-"

# Not written by a compiler: locks, logs, and indexes. (vLLM's CPU build adds an entry of
# aotautograd at its second start, with every kernel in the cache.)
_BESIDE = re.compile(
    r"(^|/)(locks|modelinfos|aotautograd|startup_plan|tmp[^/]*|\.nfs[^/]*|warm-up-[^/]*)(/|$)"
    r"|\.(lock|log|tmp|pid)$|/\.ninja_(log|deps)$"
)
_FUSED = re.compile(rb"\b(triton_(?:poi|red|per|tem|mm)_\w+|cpp_fused\w*)")
_SEARCHED = 1 << 18  # bytes of a generated file


# -- which folder -----------------------------------------------------------------------------


def build_key(share: Path, release: str) -> str:
    """Return a short name of the image's build: its release, and a digest of its parts.

    Args:
        share: the image's folder; ``inputs.json`` in it lists the parts. Outside of an image the
            installed distributions are used instead.
    """
    try:
        found = Document.load(share / "inputs.json").get(dict, "items", "image")
        parts: Any = {name: found[name] for name in _PARTS}
    except (OSError, DocumentError, KeyError):
        parts = sorted(f"{dist.name}=={dist.version}" for dist in metadata.distributions())
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    plain = re.sub(r"[^A-Za-z0-9.+_]", "_", release) or "unreleased"
    return f"{plain}-{digest[:12]}"


def device_key() -> str:
    """Return the device that kernels are compiled for: ``sm121``, or a digest of this CPU."""
    found = sorted({f"sm{major}{minor}" for major, minor in devices.capabilities()})
    if found:
        return "-".join(found)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((one for one in lines if one.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


# -- held by a server ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Caches:
    """The folder of one build and device, locked by this process until it ends."""

    folder: Path
    """For everything that is compiled."""
    variables: Mapping[str, str]
    """Of the server."""
    watched: tuple[Path, ...]
    """All folders that the server compiles into, with the user's own."""
    _held: list[int] = field(default_factory=list, repr=False)

    def files(self) -> set[str]:
        """Return the paths of the compiled files, without locks and logs."""
        found = set()
        for top in self.watched:
            for folder, _, names in os.walk(top):
                for name in names:
                    path = f"{folder}/{name}"
                    if not _BESIDE.search(path[len(str(top)) :]):
                        found.add(path)
        return found

    def shown(self, path: str) -> str:
        """Return a path below the folder as a relative one, others unchanged."""
        return path.removeprefix(f"{self.folder}/")

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Mark new files as this server's, for the other servers of this folder."""
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield
            os.utime(handle)
        finally:
            os.close(handle)

    def last_warm_up(self) -> int:
        """Return when a server's warm-up in this folder ended, in ns; 0 while one runs."""
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(handle).st_mtime_ns
        except BlockingIOError:
            return 0
        finally:
            os.close(handle)

    @property
    def _lock(self) -> Path:
        return self.folder / "warm-up.lock"


def occupy(root: Path, key: str, variables: Mapping[str, str]) -> Caches:
    """Lock the folder of a key until this process ends; create it where it is missing.

    Args:
        variables: the server's; those that the user has set stay.

    Raises:
        OSError: the folder cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder, lock = root / key, root / f"{key}.lock"
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(handle), lock.stat()):
                break
        except FileNotFoundError:
            pass
        os.close(handle)  # removed with its folder by another server, between the two lines
    os.utime(lock)
    chosen: dict[str, str] = {}
    for name, sub in {**VARIABLES, **ALWAYS}.items():
        own = None if name in ALWAYS else variables.get(name)
        chosen[name] = own or str(folder / sub)
        if not own:
            (folder / sub).mkdir(parents=True, exist_ok=True)
    outside = {Path(one) for one in chosen.values() if not Path(one).is_relative_to(folder)}
    return Caches(folder, chosen, (folder, *sorted(outside)), [handle])


def hold(
    root: Path, build: str, budget: int, variables: Mapping[str, str], say: Callable[[str], None]
) -> Caches:
    """Lock the folder of this build and device, and remove others beyond the budget.

    Args:
        budget: bytes of all builds and devices together.

    Raises:
        StartError: the folder cannot be used.
    """
    key = f"{build}-{device_key()}"
    try:
        held = occupy(root, key, variables)
        prune(root, key, budget, say)
    except OSError as error:
        msg = (
            f"compiled kernels cannot be stored in {root}: {error}; use a folder that user"
            f" {os.getuid()} may write, on a disk with room (SPARKFORGE_JIT_DIR)"
        )
        raise StartError(msg) from None
    say(f"compiled kernels are stored in {held.folder}")
    return held


def prune(root: Path, keep: str, budget: int, note: Callable[[str], None]) -> None:
    """Remove the folders of other keys, the longest unused first, until all fit into a budget.

    A folder without a lock of ``occupy`` is not ours, and stays: the user may have named a folder
    with other contents (the models, a home).

    Args:
        keep: this server's key.
        budget: bytes of all keys together.
    """
    for left in root.glob(f"{_GONE}*"):
        _remove(left, note)
    sizes = {
        one.name: _size(one)
        for one in root.iterdir()
        if one.is_dir() and not one.is_symlink() and (root / f"{one.name}.lock").is_file()
    }
    total = sum(sizes.values())
    for name in sorted(sizes.keys() - {keep}, key=lambda one: _used(root, one)):
        if total <= budget:
            return
        lock = root / f"{name}.lock"
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # a running server's
        else:
            if _rename(root / name, gone := root / f"{_GONE}{name}-{os.getpid()}", note):
                lock.unlink()
                note(f"removed {sizes[name] / GIB:.1f} GiB of kernels of another build, {name}")
                _remove(gone, note)
                total -= sizes[name]
        finally:
            os.close(handle)


def _used(root: Path, name: str) -> float:
    """Return when a server with this key last started, as a time of the file system."""
    for path in (root / f"{name}.lock", root / name):
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            continue
    return 0.0  # removed meanwhile, by another server that starts now


def _rename(folder: Path, gone: Path, note: Callable[[str], None]) -> bool:
    """Rename a folder first, so that a killed removal leaves no half of a cache."""
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return False  # another server that starts now was faster
    except OSError as error:
        note(f"warning: {folder} cannot be removed: {error}")
        return False
    return True


def _size(folder: Path) -> int:
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(f"{top}/{name}").st_size
            except FileNotFoundError:  # a temporary file of a running server
                continue
    return total


def _remove(folder: Path, note: Callable[[str], None]) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another server that starts now removes it, too
    except OSError as error:
        note(f"warning: {folder} cannot be removed: {error}")


# -- what is in it ------------------------------------------------------------------------------


def kernels(paths: Iterable[str]) -> list[str]:
    """Return the names of the kernels that some files of a cache belong to, sorted."""
    found = {_kernel(Path(one)) for one in paths}
    return sorted(one for one in found if one) or sorted({Path(one).name for one in paths})


def _kernel(path: Path) -> str:
    """Return the name of a file's kernel; "" where another file of the kernel gives it."""
    parts = path.parts
    if "cached_ops" in parts and (at := parts.index("cached_ops") + 1) < len(parts):
        return f"FlashInfer {parts[at]}"
    if path.suffix in (".cubin", ".ptx", ".ttir", ".ttgir", ".llir", ".json"):
        name = path.name.removeprefix("__grp__").partition(".")[0]
        return f"Triton {name}" if "triton" in parts else ""
    if path.suffix in (".py", ".cpp"):
        try:
            with path.open("rb") as opened:
                names = sorted(set(_FUSED.findall(opened.read(_SEARCHED))))
        except OSError:  # compiled, and moved on since
            names = []
        return f"torch.compile {', '.join(one.decode() for one in names[:3])}" if names else ""
    return ""
