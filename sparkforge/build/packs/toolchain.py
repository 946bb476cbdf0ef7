"""The machine's C++ compiler for host code."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass

from sparkforge.core.errors import CommandError, MachineError
from sparkforge.core.run import call
from sparkforge.pins.types import MACHINES, Platform

_PREFIX = {"linux/amd64": "x86_64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}
_DEBIAN = {"linux/amd64": "x86-64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}
MISSING = "none on this machine"
"""In place of a compiler's identity, in a plan."""


@dataclass(frozen=True)
class Host:
    """The C++ compiler for a platform's host code.

    Attributes:
        program: its name.
        identity: for keys: its version, its target and its C library.
    """

    program: str
    identity: str


def host(wanted: Platform) -> Host:
    """Return the compiler for a platform: this machine's own, or the cross compiler.

    Raises:
        MachineError: it is missing.
    """
    here = MACHINES.get(platform.machine())
    program = "g++" if here == wanted else f"{_PREFIX[wanted]}-g++"
    package = "g++" if here == wanted else f"g++-{_DEBIAN[wanted]}"
    try:
        version = call(program, "--version").stdout.decode().splitlines()[0]
        macros = call(program, "-dM", "-E", "-include", "features.h", "-xc++", "/dev/null").stdout
        target = call(program, "-dumpmachine").stdout.decode().strip()
    except (MachineError, CommandError) as error:
        msg = f"{program} is missing, which compiles the host code of FlashInfer's modules"
        raise MachineError(msg, f"sudo apt-get install {package}") from error
    libc = dict(re.findall(r"#define __GLIBC(_MINOR)?__ (\d+)", macros.decode()))
    return Host(program, f"{version}, {target}, glibc {libc.get('')}.{libc.get('_MINOR')}")


def found(wanted: Platform) -> Host | None:
    """Return the compiler for a platform; None: it is missing."""
    try:
        return host(wanted)
    except MachineError:
        return None
