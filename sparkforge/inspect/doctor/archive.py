"""``doctor --report``: readings, findings and logs of a machine in one archive, masked."""

from __future__ import annotations

import getpass
import io
import json
import re
import shlex
import socket
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkforge import __version__
from sparkforge.build import receipt
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.errors import UsageError
from sparkforge.core.run import glimpse
from sparkforge.inspect.doctor.masking import mask_of
from sparkforge.inspect.doctor.readings import Machine, first_line
from sparkforge.runtime import client, envfile

READINGS = "readings.json"
_LOG_S = 60.0
_MOST = 64 << 20  # bytes of a file
_KERNEL = re.compile(r"nvrm|xid|nvidia|out of memory|oom[-_ ]|hung task|mce:", re.IGNORECASE)
# without its variables, which may be secrets
_CONTAINER = (
    '{"image": "{{.Image}}", "restarts": {{.RestartCount}}, "state": {{json .State}},'
    ' "host": {{json .HostConfig}}}'
)
_MEMORY = "cd /sys/fs/cgroup && head -v -n 50 memory.current memory.peak memory.max memory.stat"
_Part = tuple[str, str, str]
"""A file's name, its text, and why it is missing or incomplete, or ""."""


def path_of(chosen: str, folder: Path) -> Path:
    """Return the archive's path: the chosen file, else ("") a new one with the time.

    Raises:
        UsageError: the file already exists, or its folder does not.
    """
    name = time.strftime("sparkforge-report-%Y%m%d-%H%M%S.tar.gz")
    path = Path(chosen) if chosen else folder / name
    if path.exists() or not path.parent.is_dir():
        why = "already exists" if path.exists() else f"folder {path.parent} does not exist"
        raise UsageError(f"--report {path}: {why}", "give another file")
    return path


def write(path: Path, seen: Machine, target: str, findings: Any) -> dict[str, str]:
    """Collect, mask, and write the archive; return its files, each with its problem or "".

    Args:
        findings: document of ``--json``.

    Raises:
        StoreError: the disk is full.
    """
    secrets = envfile.seen(Path(seen.root) / ".env")
    keys = [client.api_key(secrets)]
    mask = mask_of(secrets, keys, Path.home(), getpass.getuser(), socket.gethostname())
    parts = [
        (name, json.dumps(mask.tree(value), indent=1, sort_keys=True), "")
        for name, value in ((READINGS, seen.recording()), ("findings.json", findings))
    ]
    for name, text, problem in _parts(Path(seen.root), target):
        parts.append((name, mask.text(text), mask.text(problem)))
    with disk_errors(path):
        write_file(path, packed(parts))
    return {name: problem for name, _, problem in parts}


def packed(parts: list[_Part]) -> bytes:
    """Return the archive: a file for each part, and a table of contents."""
    rows = [f"{name}\t{len(text.encode())}\t{problem}\n" for name, text, problem in parts]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text, _ in (("CONTENTS.txt", "".join(rows), ""), *parts):
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"sparkforge-report/{name}")
            member.size, member.mtime = len(data), int(time.time())
            archive.addfile(member, io.BytesIO(data))
    return raw.getvalue()


def readings_in(path: Path) -> str:
    """Return the readings in an archive, or the text of a file that is none.

    Raises:
        ValueError: the archive has no readings, or is damaged.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return path.read_text(encoding="utf-8")
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if member.isfile() and Path(member.name).name == READINGS and member.size <= _MOST:
                    inside = archive.extractfile(member)
                    assert inside is not None  # it is a file
                    return inside.read().decode(errors="replace")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"a damaged archive: {error}") from None
    raise ValueError(f"an archive without {READINGS}")


def _parts(root: Path, target: str) -> Iterator[_Part]:
    git = f"git -C {shlex.quote(str(root))}"
    state = f"echo sparkforge {__version__}; {git} log -1; {git} status -s"
    yield _output("checkout.txt", "sh", "-c", state)
    system = (
        "uname -a; head -v /etc/*-release /sys/class/dmi/id/*_name /sys/class/dmi/id/bios*; true"
    )
    yield _output("system.txt", "sh", "-c", system)
    for path in (root / "dist" / target / receipt.NAME, root / "build.log"):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield path.name, file.read(_MOST), ""
        except OSError as error:
            yield path.name, "", str(error.strerror)
    name, text, problem = _output("kernel.log", "journalctl", "-kb", "-o", "short-iso")
    yield name, "\n".join(line for line in text.splitlines() if _KERNEL.search(line)), problem
    service = f"label=com.docker.compose.service={target}"
    containers = glimpse("docker", "ps", "-aq", "--filter", service, timeout_s=_LOG_S)
    if not (box := containers.out.partition("\n")[0]):
        yield "container.log", "", containers.problem or "Compose has no container"
        return
    yield _output("container.json", "docker", "inspect", "--format", _CONTAINER, box)
    yield _output("memory.txt", "docker", "exec", box, "sh", "-c", _MEMORY)
    name, text, problem = _output("container.log", "docker", "logs", "--timestamps", box)
    # two streams; sorted by the time at the start of each line
    yield name, "\n".join(sorted(text.splitlines())), problem


def _output(name: str, *words: str) -> _Part:
    """Return a program's output, of both streams, as a part."""
    seen = glimpse(*words, timeout_s=_LOG_S, limit=_MOST)
    return name, f"{seen.out}{seen.err}", "" if seen.code == 0 else first_line(seen)
