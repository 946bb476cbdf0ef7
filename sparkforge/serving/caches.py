"""Folders of compiled kernels: one for each build and device, held while a server uses it.

What one build compiled must never reach another: the caches' own keys tell versions apart, but not
a patch of ours. So all of them lie under one folder, named by what the image was made of and by the
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

GIB = 1 << 30

ALWAYS: Mapping[str, str] = {"HOME": "home", "XDG_CACHE_HOME": "xdg"}
"""Where libraries put what has no variable of its own; the image sets both for other programs."""

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
"""By variable of the server, its folder; a user's own value comes before."""

# of share/inputs.json: what decides which kernels there are and what compiles them
_PARTS = ("wheels", "wheelhouse", "base", "system_packages", "python", "platform", "release")
_GONE = ".gone-"

# Written without a compiler: locks, logs, and what is looked up again at each start. (vLLM's CPU
# build adds an entry of aotautograd at its second start, with every kernel in the cache.)
_BESIDE = re.compile(
    r"(^|/)(locks|modelinfos|aotautograd|startup_plan|tmp[^/]*|\.nfs[^/]*|warm-up-[^/]*)(/|$)"
    r"|\.(lock|log|tmp|pid)$|/\.ninja_(log|deps)$"
)
_FUSED = re.compile(rb"\b(triton_(?:poi|red|per|tem|mm)_\w+|cpp_fused\w*)")
_SEARCHED = 1 << 18  # bytes of a generated file


# -- which folder -----------------------------------------------------------------------------


def build_key(share: Path, release: str) -> str:
    """Return a short name of the build that this image is: its release, and a digest of its parts.

    Args:
        share: the image's folder; ``inputs.json`` in it says what the image was made of. Without
            one (no image) the installed distributions stand in.
    """
    try:
        found = Document.load(share / "inputs.json").get(dict, "items", "image")
        parts: Any = {name: found[name] for name in _PARTS}
    except (OSError, DocumentError, KeyError):
        parts = sorted(f"{one.name}=={one.version}" for one in metadata.distributions())
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    plain = re.sub(r"[^A-Za-z0-9.+_]", "_", release) or "unreleased"
    return f"{plain}-{digest[:12]}"


def device_key() -> str:
    """Return what kernels are compiled for: ``sm121``; without a CUDA device this CPU."""
    found = sorted({f"sm{major}{minor}" for major, minor in devices.capabilities()})
    if found:
        return "-".join(found)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((one for one in lines if one.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


# -- held by a server ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Caches:
    """The folder of one build and device, held by this process until it ends.

    Attributes:
        folder: receives everything that is compiled.
        variables: for the server.
        watched: all folders that it compiles into, a user's own among them.
    """

    folder: Path
    variables: Mapping[str, str]
    watched: tuple[Path, ...]
    _held: list[int] = field(default_factory=list, repr=False)

    def files(self) -> set[str]:
        """Return the paths of what compilers left there, locks and logs excepted."""
        found = set()
        for top in self.watched:
            for folder, _, names in os.walk(top):
                for name in names:
                    path = f"{folder}/{name}"
                    if not _BESIDE.search(path[len(str(top)) :]):
                        found.add(path)
        return found

    def shown(self, path: str) -> str:
        """Return a path below the folder as relative, any other as it is."""
        return path.removeprefix(f"{self.folder}/")

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Tell the other servers of this folder that what appears now is this one's."""
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield
            os.utime(handle)
        finally:
            os.close(handle)

    def last_warm_up(self) -> int:
        """Return when a server's warm-up in this folder ended, in ns; 0 while one is at it."""
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
    """Make the folder of a key where it is missing, and hold it until this process ends.

    Args:
        variables: the server's; what the user has set there stays.

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


def prune(root: Path, keep: str, budget: int, note: Callable[[str], None]) -> None:
    """Remove the folders of other keys, the longest unused first, until all fit into a budget.

    A folder without the lock that ``occupy`` makes first is none of ours, and stays: somebody may
    have named a folder that holds more (the models, a home).

    Args:
        keep: this server's key.
        budget: bytes of all keys together.
        note: is told of what was removed, or could not be.
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
    """When a server with this key was last started, as a time of the file system."""
    for path in (root / f"{name}.lock", root / name):
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            continue
    return 0.0  # removed meanwhile, by another server that starts now


def _rename(folder: Path, gone: Path, note: Callable[[str], None]) -> bool:
    """Take a folder's name away at once: a removal that is killed leaves no half of a cache."""
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
    """Name what some files of a cache belong to, each thing once, in order."""
    found = {_kernel(Path(one)) for one in paths}
    return sorted(one for one in found if one) or sorted({Path(one).name for one in paths})


def _kernel(path: Path) -> str:
    """Name the kernel of one file, or nothing where another file of the kernel will."""
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
