"""Find programs, and describe their failures."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkforge.core.errors import CommandError, MachineError, SparkforgeError, StoreError

_TAIL_LINES = 40
_INSTALL_HINTS = {
    "git": "install git 2.34 or newer with the system's package manager",
    "docker": "install Docker Engine, or build without one: --engine none",
    "nvcc": "install NVIDIA's CUDA 13.0 toolkit (nvcc, crt, cudart headers), its bin on the PATH",
}


def failure_text(result: subprocess.CompletedProcess[bytes]) -> str:
    """Return a failed command and the end of its output."""
    lines = (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()
    tail = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
    return f"{shlex.join(result.args)} failed with exit code {result.returncode}\n{tail}"


def failure(result: subprocess.CompletedProcess[bytes]) -> SparkforgeError:
    """Return the error of a failed command."""
    text = failure_text(result)
    # git's fast-import reports it differently
    if os.strerror(errno.ENOSPC) in text or "Out of diskspace" in text:
        remedy = "free space, or put the store on a larger disk with --store DIR"
        return StoreError(f"the disk is full:\n{text}", remedy)
    return CommandError(text)


def have(program: str) -> bool:
    """Return whether a program is on the PATH."""
    return shutil.which(program) is not None


def merged(env: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return this process's environment with changes; None removes a variable."""
    merged = {**os.environ, **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


def resolve(args: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return a command line with the full path of its program; MachineError if it is missing."""
    command = [os.fspath(arg) for arg in args]
    program = shutil.which(command[0])
    if program is None:
        raise unusable(command[0], "not installed on this machine")
    return [program, *command[1:]]


def unusable(program: str, why: str) -> MachineError:
    """Return the error of a program that is missing or does not start."""
    name = Path(program).name
    hint = _INSTALL_HINTS.get(name, f"install {name} and put it on the PATH")
    return MachineError(f"{program}: {why}", hint)
