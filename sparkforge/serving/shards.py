"""The weight files of a checkpoint, and whether they are whole.

The first bytes of a safetensors file give its length, so a truncated file is found without reading
the weights: 8 bytes (little endian) give the length of a JSON header, whose largest
``data_offsets`` is the length of the rest.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving import pagecache
from sparkforge.serving.document import Document, DocumentError

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # the format's own


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


def named(folder: Path) -> list[str]:
    """Return the weight files of a checkpoint: those of its index, or without one all there are.

    Raises:
        OSError: the index cannot be read.
        DocumentError: it is damaged, or names a file outside of the folder.
    """
    try:
        index = Document.load(folder / INDEX)
    except FileNotFoundError:
        return [file.name for file in pagecache.weight_files(folder)]
    names = sorted({str(name) for name in index.get(dict, "weight_map").values()})
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise DocumentError(f"{folder / INDEX} names {name[:100]!r}, which is no shard")
    return names


def read(path: Path) -> Shard:
    """Read the header of a weight file."""
    size = None
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= _HEADER_LIMIT or length > size:
                raise ValueError
            header = Document.parse(path.name, file.read(length)).get(dict)
        ends = [
            tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
        ]
        return Shard(size, 8 + length + max(ends, default=0))
    except FileNotFoundError:
        return Shard(problem="missing")
    except OSError as error:
        return Shard(problem=str(error.strerror))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Shard(size, problem="no safetensors header")
