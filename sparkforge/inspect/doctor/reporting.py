"""``doctor --report``: all information about a first run on a Spark, in one archive."""

from __future__ import annotations

import getpass
import gzip
import io
import json
import socket
import tarfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.errors import UsageError
from sparkforge.core.log import human_bytes, log
from sparkforge.inspect.doctor import parts
from sparkforge.inspect.doctor.masking import mask_of
from sparkforge.inspect.doctor.parts import Part
from sparkforge.inspect.doctor.reading import Readings
from sparkforge.runtime import client

READINGS = "readings.json"
_MOST = 64 << 20  # bytes of readings in an archive
_CONTENTS = "CONTENTS.txt"


def path_of(chosen: str, folder: Path) -> Path:
    """Return the archive's path: the chosen file, else ("") a new one with the time.

    Raises:
        UsageError: the file already exists, or its folder does not.
    """
    path = (
        Path(chosen) if chosen else folder / time.strftime("sparkforge-report-%Y%m%d-%H%M%S.tar.gz")
    )
    if path.exists():
        raise UsageError(f"--report {path}: already exists", "give another file")
    if not path.parent.is_dir():
        hint = "give a file in an existing folder"
        raise UsageError(f"--report {path}: folder {path.parent} does not exist", hint)
    return path


def write(
    path: Path,
    root: Path,
    target: str,
    seen: Readings,
    findings: Mapping[str, Any],
    variables: Mapping[str, str],
    *,
    ask: bool,
) -> list[Part]:
    """Collect, mask, and write the archive; return its parts.

    Args:
        root: the checkout.
        seen: doctor's readings.
        findings: document of ``--json``.
        variables: of .env and environment, with secrets, which are masked.
        ask: include chats with a running server.

    Raises:
        StoreError: the disk is full.
    """
    place = client.place_of(variables)
    keys = [place.key] if place.key else []
    run = parts.Run(root, target, parts.find_container(target), place)
    mask = mask_of(variables, keys, Path.home(), getpass.getuser(), socket.gethostname())
    found = [
        Part(READINGS, "readings; judge them with doctor --readings", seen.dumps() + "\n"),
        Part("findings.json", "findings", json.dumps(findings, indent=1) + "\n"),
        *parts.collect(run, ask=ask),
    ]
    masked = [
        Part(part.file, part.what, mask.text(part.text), mask.text(part.problem)) for part in found
    ]
    with disk_errors(path):
        write_file(path, packed(masked))
    return masked


def show(path: Path, collected: Sequence[Part]) -> None:
    """Print the parts of an archive, and missing ones with the reason."""
    log.heading(f"{path} ({human_bytes(path.stat().st_size)})")
    there = [part for part in collected if part.text]
    log.table([(part.file, human_bytes(len(part.text.encode())), part.what) for part in there])
    for part in collected:
        if part.problem:
            state = "not complete" if part.text else "missing"
            log.info(f"{log.painted('33', '!')} {part.file}, {state}: {part.problem}")
    log.info(
        "API keys, tokens, passwords, serial numbers, and the names of user and machine are"
        " removed; check the archive before you send it"
    )


def document(path: Path, collected: Iterable[Part]) -> dict[str, object]:
    """Return the document of ``--json`` for a report."""
    return {
        "file": str(path),
        "parts": [
            {
                "file": part.file,
                "what": part.what,
                "bytes": len(part.text.encode()),
                "problem": part.problem,
            }
            for part in collected
        ],
    }


def packed(found: Iterable[Part]) -> bytes:
    """Return the archive: a file for each part, and a table of contents."""
    parts_ = list(found)
    rows = [
        f"{part.file}\t{len(part.text.encode())}\t{part.what}"
        + (
            f"\t{'not complete' if part.text else 'missing'}: {part.problem}"
            if part.problem
            else ""
        )
        for part in parts_
    ]
    files = {_CONTENTS: "\n".join([*rows, ""])}
    files |= {part.file: part.text for part in parts_ if part.text}
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for name, text in files.items():
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"sparkforge-report/{name}")
            member.size, member.mtime = len(data), int(time.time())
            archive.addfile(member, io.BytesIO(data))
    return raw.getvalue()


def readings_in(path: Path) -> str | None:
    """Return the readings in an archive; None: the file is not an archive.

    Raises:
        ValueError: it has no readings, or is damaged.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return None
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if member.isfile() and Path(member.name).name == READINGS:
                    inside = archive.extractfile(member)
                    if inside is not None and member.size <= _MOST:
                        return inside.read().decode(errors="replace")
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"a damaged archive: {error}") from None
    raise ValueError(f"an archive without {READINGS}")
