"""The files of a model on this machine, the check that they are whole, and its vocabulary."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.errors import EX_NOINPUT, StartError

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # the format's own
RANKS = 199_998
"""Ranks of o200k_base; special tokens follow and are not part of the file."""


@dataclass(frozen=True)
class Shard:
    """A safetensors file; sizes in bytes, None: not known."""

    size: int | None = None
    expected: int | None = None
    """By its header."""
    problem: str = ""

    @property
    def wrong(self) -> str:
        """What is wrong with it, or ""."""
        if self.problem or self.size == self.expected:
            return self.problem
        return f"{self.size} bytes, its header says {self.expected}"


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def named(folder: Path) -> list[str]:
    """Return the weight files of a checkpoint: those of its index, or without one all there are.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is damaged, or names a file outside of the folder.
    """
    try:
        weights = json.loads((folder / INDEX).read_bytes())["weight_map"]
        names = sorted({str(name) for name in weights.values()})
    except FileNotFoundError:
        return [file.name for file in weight_files(folder)]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder / INDEX} is damaged: {error}") from None
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ValueError(f"{folder / INDEX} names {name[:100]!r}, which is no shard")
    return names


def read(path: Path) -> Shard:
    """Read the header of a weight file.

    8 bytes (little endian) give the length of a JSON header, whose largest ``data_offsets`` is the
    length of the rest. So a truncated file is found without reading the weights.
    """
    size = None
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= _HEADER_LIMIT or length > size:
                raise ValueError
            header = json.loads(file.read(length))
        ends = [
            tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
        ]
        return Shard(size, 8 + length + max(ends, default=0))
    except FileNotFoundError:
        return Shard(problem="missing")
    except OSError as error:
        return Shard(problem=str(error.strerror))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Shard(size, problem="no safetensors header")


def check(path: Path) -> None:
    """Check the folder of a checkpoint; vLLM's own errors give no hint.

    Raises:
        StartError: the folder is missing, empty or unreadable, or a file in it is cut off.
    """
    if not path.is_dir():
        problem = "does not exist"
    elif not os.access(path, os.R_OK | os.X_OK):
        problem = f"cannot be read by user {os.getuid()}: chmod -R a+rX it on the host"
    elif not (path / "config.json").is_file():
        problem = "has no config.json" if any(path.iterdir()) else "is empty"
    elif any(file.is_file() and not os.access(file, os.R_OK) for file in path.iterdir()):
        problem = f"has files that user {os.getuid()} cannot read: chmod -R a+rX it on the host"
    elif damaged := _damaged(path):
        msg = f"the model in {path} is not complete: {damaged}; copy it there again"
        raise StartError(msg, EX_NOINPUT)
    else:
        return
    msg = (
        f"the model directory {path} {problem}.\n"
        "Mount a checkpoint there (with Compose: SPARKFORGE_MODEL_DIR=/path/on/the/host), or name "
        "another one in SPARKFORGE_MODEL."
    )
    raise StartError(msg, EX_NOINPUT)


def _damaged(folder: Path) -> str:
    """Return what is wrong with the first damaged weight file of a checkpoint, or ""."""
    try:
        found = ((name, read(folder / name).wrong) for name in named(folder))
        return next((f"{name}: {problem}" for name, problem in found if problem), "")
    except (OSError, ValueError) as error:
        return str(error)


# -- the hub's cache -------------------------------------------------------------------------------


def expanded(folder: str) -> Path:
    """Expand ~, unless the user is unknown, as the hub's own code does."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        return Path(folder)


def cache(variables: Mapping[str, str]) -> Path:
    """Return the folder of the hub's cache, as the hub's own library finds it."""
    home = expanded(variables.get("HF_HOME") or "~/.cache/huggingface")
    return expanded(variables.get("HF_HUB_CACHE") or str(home / "hub"))


def snapshot(hub: Path, name: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the hub's cache, or None.

    Args:
        revision: commit, branch or tag; None: the one that ``main`` named at the last download.
    """
    folder = hub / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = revision or ""
    found = folder / "snapshots" / commit
    return found if commit and found.is_dir() else None


# -- the vocabulary of chats -----------------------------------------------------------------------


def tokens() -> list[bytes]:
    """Return the bytes of each token of vLLM's chat endpoint by its rank, without special tokens.

    oss-harmony has the vocabulary in its extension. The variable TIKTOKEN_ENCODINGS_BASE replaces
    it with a file, and a wrong file would only show at the first chat request, as status 500.
    """
    try:
        from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
    except ImportError as error:
        raise StartError(f"the package oss-harmony is missing: {error}") from error
    try:
        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        return [encoding._inner.decode_bytes([rank]) for rank in range(RANKS)]
    except HarmonyError as error:
        msg = (
            f"the Harmony vocabulary cannot be loaded: {error}; unset TIKTOKEN_ENCODINGS_BASE to"
            " use the one in the package, or correct the file there"
        )
        raise StartError(msg) from error


def vocabulary() -> bytes:
    """Return the vocabulary as o200k_base.tiktoken: a line with base64 and rank for each token."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens()))
    return b"".join(lines)


def check_vocabulary(sha256: str) -> None:
    """Compare with the pinned sha256 (64 hex digits); StartError if it is another."""
    if (found := hashlib.sha256(vocabulary()).hexdigest()) != sha256:
        msg = f"the Harmony vocabulary has sha256 {found}, and pins.yaml says {sha256}"
        raise StartError(msg)
