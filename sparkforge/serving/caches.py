"""Folders of compiled kernels: one for each build and device, locked while a server uses it.

A build must not use kernels of another build: the caches' own keys distinguish versions, but not
our patches. So all caches are in one folder, whose name has a digest of the image's parts and the
device. Models are the same for every build and stay outside.

Compilers sync nothing: after a power cut a file can be empty or cut short under its final name. So
a list has the sizes of the files that are on the disk for sure (``settle``), and the lock names the
boot of the machine in which a server uses the folder. If that was an earlier boot, and a file is
not as in the list, all of them are compiled anew.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sparkforge.serving import cachefiles, devices, durable
from sparkforge.serving.cachefiles import compiled, listed, sizes
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import EX_CANTCREAT, EX_CONFIG, StartError

GIB = 1 << 30
BOOT = Path("/proc/sys/kernel/random/boot_id")

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

# of share/inputs.json: the parts that kernels and their compilers depend on
_PARTS = (
    "wheels",
    "wheelhouse",
    "base",
    "absent",
    "system_packages",
    "python",
    "platform",
    "release",
)
_GONE = ".gone-"

# -- which folder -----------------------------------------------------------------------------


def build_key(share: Path, release: str) -> str:
    """Return a short name of the image's build: its release, and a digest of its parts.

    Args:
        share: the image's folder; ``inputs.json`` in it lists the parts. Outside of an image the
            installed distributions are used instead.
    """
    try:
        found = Document.load(share / "inputs.json").get(dict, "image")
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
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


# -- held by a server ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Caches:
    """The folder of one build and device, locked by this process until it ends."""

    folder: Path
    """For all compiled files."""
    variables: Mapping[str, str]
    """Of the server."""
    watched: tuple[Path, ...]
    """All folders that the server compiles into, with the user's own."""
    _held: list[int] = field(default_factory=list, repr=False)

    def files(self) -> set[str]:
        """Return the paths of the compiled files, without locks and logs."""
        return {path for top in self.watched for path in compiled(top)}

    def settle(self) -> None:
        """Write the compiled files to the disk, and then the list of their sizes.

        Raises:
            OSError: they cannot be written.
        """
        found = sizes(self.files())
        for top in self.watched:
            if top.is_dir():
                durable.sync(top)
        cachefiles.enlist(self.folder, {self.shown(path): n for path, n in found.items()})

    def close(self, say: Callable[[str], None]) -> None:
        """Note that a power cut would harm nothing now; call it when the server has ended."""
        (handle,) = self._held
        try:
            self.settle()
            if _alone(handle):  # else another server compiles into it
                os.ftruncate(handle, 0)
                os.fsync(handle)
        except OSError as error:
            say(f"warning: compiled kernels are not on the disk for sure: {error}")
        finally:
            os.close(handle)
            self._held.clear()

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


def occupy(
    root: Path, key: str, variables: Mapping[str, str], say: Callable[[str], None]
) -> Caches:
    """Lock the folder of a key until ``close``; create it where it is missing.

    Args:
        variables: the server's; those that the user has set stay.

    Raises:
        OSError: the folder cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder, lock = root / key, root / f"{key}.lock"
    chosen: dict[str, str] = {}
    for name, sub in {**VARIABLES, **ALWAYS}.items():
        own = None if name in ALWAYS else variables.get(name)
        chosen[name] = own or str(folder / sub)
    outside = {Path(path) for path in chosen.values() if not Path(path).is_relative_to(folder)}
    held = Caches(folder, chosen, (folder, *sorted(outside)))
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        if _alone(handle) and _is_at(handle, lock):
            _renew(handle, held, say)
        fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_at(handle, lock):
            break
        os.close(handle)  # removed with its folder by another server, between two lines
    held._held.append(handle)
    os.utime(lock)
    for path in chosen.values():
        if Path(path).is_relative_to(folder):
            Path(path).mkdir(parents=True, exist_ok=True)
    return held


def _alone(handle: int) -> bool:
    """Try to lock exclusively; returns whether it did. An earlier lock of ours is lost."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _renew(handle: int, held: Caches, say: Callable[[str], None]) -> None:
    """Remove damaged files, also possibly damaged ones after a power cut; note the present boot.

    Args:
        handle: of the folder's lock, held by no other process. It has the boot of the last server,
            or nothing if that has ended well.
    """
    boot, before = BOOT.read_bytes().strip(), os.pread(handle, 100, 0)
    known, found = listed(held.folder), sizes(held.files())
    unsure = [
        path
        for path, size in found.items()
        if path != held.shown(path) and known.get(held.shown(path)) != size
    ]
    if unsure and before not in (b"", boot):
        say(
            f"the machine went down while a server ran: {len(unsure)} of {len(found)} compiled"
            " files may be incomplete, so all are compiled anew"
        )
        for sub in {*VARIABLES.values(), *ALWAYS.values()}:
            gone = held.folder.parent / f"{_GONE}{held.folder.name}-{sub}-{os.getpid()}"
            if _rename(held.folder / sub, gone, say):
                _remove(gone, say)
    if short := [path for path, size in found.items() if size < known.get(held.shown(path), 0)]:
        names = ", ".join(sorted(map(held.shown, short))[:3])
        say(f"{len(short)} compiled files are cut short, and compiled anew: {names}")
        for path in short:
            Path(path).unlink(missing_ok=True)
    for left in held.folder.glob("*.tmp"):  # of a killed write
        left.unlink()
    os.pwrite(handle, boot, 0)
    os.ftruncate(handle, len(boot))
    os.fsync(handle)


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
        held = occupy(root, key, variables, say)
        prune(root, key, budget, say)
    except OSError as error:
        msg = (
            f"compiled kernels cannot be stored in {root}: {error}; use a folder that user"
            f" {os.getuid()} may write, on a disk with room (SPARKFORGE_JIT_DIR)"
        )
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StartError(msg, EX_CANTCREAT if full else EX_CONFIG) from None
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
        entry.name: _size(entry)
        for entry in root.iterdir()
        if entry.is_dir() and not entry.is_symlink() and (root / f"{entry.name}.lock").is_file()
    }
    total = sum(sizes.values())
    for name in sorted(sizes.keys() - {keep}, key=lambda key: _used(root, key)):
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
    return sum(
        sizes(f"{top}/{name}" for top, _, names in os.walk(folder) for name in names).values()
    )


def _remove(folder: Path, note: Callable[[str], None]) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another server that starts now removes it, too
    except OSError as error:
        note(f"warning: {folder} cannot be removed: {error}")
