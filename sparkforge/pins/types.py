"""The types of pins.yaml's values.

Each accepts plain values of its users (git, CMake, apt, uv, container engines, the file system),
and nothing that they would read as an option, another place or another command.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

from sparkforge.core import plain

UNKNOWN = "unknown"
"""An unknown commit in receipt, SBOM, provenance and labels."""
REMEDIES: dict[str, str] = {}
"""Hints for a wrong value, by the pattern that it does not match."""


def shaped(pattern: str, remedy: str, longest: int = 200) -> StringConstraints:
    """Return the constraint of a text by a regular expression.

    Args:
        remedy: what a value should be, for the message.
        longest: characters at most.
    """
    REMEDIES[pattern] = remedy
    return StringConstraints(pattern=pattern, max_length=longest)


def number(value: Any) -> Any:
    """Turn a plain decimal number into an int; 010, 0x10, 1e3 and yes stay text and are refused."""
    plain = isinstance(value, str) and re.fullmatch(r"0|[1-9][0-9]{0,17}", value)
    return int(value) if plain else value


def _truth(value: Any) -> Any:
    """Turn true and false into a bool; yes, on and 1 stay text and are refused."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def padded(commit: str) -> bool:
    """Return whether a commit is an abbreviation padded with zeros."""
    # twelve zeros occur by chance once in 2.8e14 commits
    return commit.endswith("0" * 12)


def _whole(commit: str) -> str:
    if padded(commit):
        raise PydanticCustomError("padded", "an abbreviated SHA padded with zeros")
    return commit


def _place(path: str) -> str:
    # git and others read values that begin so as options or patterns
    wrong = "starts like an option or a pattern" if path.startswith(("-", ":")) else None
    if wrong := wrong or plain.path_problem(path.removesuffix("/")):
        raise ValueError(wrong)
    return path


def _file(path: str) -> str:
    if path.endswith("/"):
        raise ValueError("ends with a slash, but is not a folder")
    return _place(path)


Truth = Annotated[bool, BeforeValidator(_truth), Field(strict=True)]
Count = Annotated[int, BeforeValidator(number), Field(gt=0, strict=True)]
Commit = Annotated[
    str,
    shaped(r"^[0-9a-f]{40}$", "give the full 40-digit commit SHA (git rev-parse REF^{commit})"),
    AfterValidator(_whole),
]
Sha256 = Annotated[str, shaped(r"^[0-9a-f]{64}$", "give the full 64-digit sha256 (sha256sum FILE)")]
Digest = Annotated[
    str,
    shaped(r"^sha256:[0-9a-f]{64}$", "give the image digest, sha256: and 64 hex digits, not a tag"),
]
Name = Annotated[
    str, shaped(r"^[a-z0-9][a-z0-9._-]*$", "it must match ^[a-z0-9][a-z0-9._-]*$", 100)
]
Tag = Annotated[
    str,
    shaped(
        r"^v?[0-9]+(\.[0-9]+)+[0-9A-Za-z.]*$",
        "give a release tag such as v0.33.0; branches and 'latest' move",
    ),
]
Platform = Literal["linux/amd64", "linux/arm64"]
MACHINES: dict[str, Platform] = {
    "x86_64": "linux/amd64",
    "aarch64": "linux/arm64",
    "arm64": "linux/arm64",
}
"""By the kernel's name of the machine."""
Place = Annotated[str, AfterValidator(_place)]
"""A file, or with a trailing slash a folder, below the folder that the key is about."""
FilePath = Annotated[str, AfterValidator(_file)]
"""A file below that folder."""
AbsolutePath = Annotated[
    str,
    shaped(
        r"^(/[A-Za-z0-9_+][A-Za-z0-9_.+-]*)+$",
        "give an absolute path of a file in the image, without parts that start with a dot",
    ),
]
Module = Annotated[
    str,
    shaped(r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$", "give a Python module's name"),
]
FileName = Annotated[
    str, shaped(r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", "give a file name without folders")
]
ReleaseFileName = Annotated[
    str, shaped(r"^[A-Za-z0-9][A-Za-z0-9_.+-]*\.(whl|tar\.gz)$", "give a .whl or .tar.gz file")
]
GitUrl = Annotated[
    str,
    shaped(
        r"^https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?"
        r"(/[A-Za-z0-9_~][A-Za-z0-9._~-]*)+\.git$",
        "give https://HOST/PATH.git, without user, password, query or fragment",
    ),
]
Variable = Annotated[str, shaped(r"^[A-Z][A-Z0-9_]*$", "give a variable name in capitals")]
CMakeTarget = Annotated[str, shaped(r"^[A-Za-z_][A-Za-z0-9_]*$", "give a CMake target's name")]
CMakeWord = Annotated[
    str,
    shaped(
        r"^-D[A-Za-z0-9_]+(:[A-Z]+)?=([^{}]|\{device\})*$",
        "write -DNAME=VALUE; {device} is the only placeholder",
    ),
]
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
ImageRepository = Annotated[
    str,
    shaped(
        rf"^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{{1,5}})?/)?{_PART}(/{_PART})*$",
        "give [REGISTRY/]NAME in lower case, without tag and digest",
    ),
]
ImageTag = Annotated[
    str, shaped(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "give a tag: letters, digits, _ . -", 128)
]
ModelRepository = Annotated[
    str,
    shaped(
        r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*$", "give ORGANISATION/MODEL"
    ),
]
DebPackage = Annotated[
    str,
    shaped(
        # with a hyphen at the end apt would remove the package
        r"^[a-z0-9][a-z0-9+.-]*[a-z0-9+](=[0-9][A-Za-z0-9.+:~-]*)?$",
        "give a Debian package, NAME or NAME=VERSION",
    ),
]
TorchBackend = Annotated[
    str,
    shaped(
        r"^(cpu|xpu|cu[0-9]{2,3}|rocm[0-9]+(\.[0-9]+)*)$",
        "use uv's name of one PyTorch build: cpu, cu130, rocm6.4, xpu",
    ),
]
CudaArch = Annotated[
    str, shaped(r"^[1-9][0-9]?\.[0-9]$", 'give a compute capability in quotes: "12.1"')
]
GpuCode = Annotated[
    str, shaped(r"^[1-9][0-9]{1,2}[af]?$", "give an architecture as compilers name it: 121a")
]
LayerList = Annotated[
    str,
    shaped(
        r"^[a-z0-9_]+(=[a-z0-9_]+)?(,[a-z0-9_]+(=[a-z0-9_]+)?)*$",
        "list layers as in qkv,o,lm_head=mxfp8 (docs/kernels.md)",
    ),
]
Backend = Annotated[str, shaped(r"^[A-Z0-9_]+$", "give a backend name in capitals")]


class Model(BaseModel):
    """Base of all parts: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
