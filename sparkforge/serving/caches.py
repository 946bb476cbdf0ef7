"""The folder of compiled kernels: one for each build and device.

A build must not use kernels of another build: the caches' own keys distinguish versions, but not
our patches. So all caches are in one folder, whose name has a digest of the image's parts and the
device. Models are the same for every build and stay outside.
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
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sparkforge.serving import devices
from sparkforge.serving.errors import EX_CANTCREAT, EX_CONFIG, StartError, say

KEPT = 3
"""Builds and devices whose kernels are kept: also those of an image to roll back to."""
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
_PARTS = ("wheels", "wheelhouse", "base", "absent", "system_packages", "python", "platform")


@dataclass(frozen=True)
class Caches:
    """The folder of one build and device, locked by this process until it ends."""

    folder: Path
    variables: Mapping[str, str]
    """Of the server."""


def build_key(share: Path, release: str) -> str:
    """Return a short name of the image's build: its release, and a digest of its parts.

    Args:
        share: the image's folder; ``inputs.json`` in it lists the parts. Outside of an image the
            installed distributions are used instead.
    """
    try:
        found = json.loads((share / "inputs.json").read_bytes())["image"]
        parts: Any = {name: found[name] for name in (*_PARTS, "release")}
    except (OSError, ValueError, LookupError, TypeError):
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


def hold(root: Path, build: str, variables: Mapping[str, str]) -> Caches:
    """Lock the folder of this build and device, and remove those of the oldest others.

    Args:
        variables: the server's; those that the user has set stay.

    Raises:
        StartError: the folder cannot be used.
    """
    key = f"{build}-{device_key()}"
    folder = root / key
    chosen = {name: str(folder / sub) for name, sub in {**VARIABLES, **ALWAYS}.items()}
    chosen |= {name: variables[name] for name in VARIABLES if variables.get(name)}
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_SH)  # until this process ends
        os.pwrite(lock, b"used\n", 0)  # a full disk is an error here, not of a compiler
        os.utime(lock)
        for path in chosen.values():
            Path(path).mkdir(parents=True, exist_ok=True)
        _remove_old(root, key)
    except OSError as error:
        msg = (
            f"compiled kernels cannot be stored in {root}: {error}; use a folder that user"
            f" {os.getuid()} may write, on a disk with room (SPARKFORGE_JIT_DIR)"
        )
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StartError(msg, EX_CANTCREAT if full else EX_CONFIG) from None
    say(f"compiled kernels are stored in {folder}")
    return Caches(folder, chosen)


def _remove_old(root: Path, key: str) -> None:
    """Remove all folders but this one's and the last used ones; not one without a lock of ours."""
    locks = [lock for lock in root.glob("*.lock") if lock.with_suffix("").is_dir()]
    locks.sort(key=lambda lock: lock.stat().st_mtime, reverse=True)
    for lock in [lock for lock in locks if lock.stem != key][KEPT - 1 :]:
        handle = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""))
            lock.unlink()
            say(f"removed the kernels of an older build, {lock.stem}")
        except BlockingIOError:
            continue  # a running server's
        finally:
            os.close(handle)
