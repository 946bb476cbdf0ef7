"""``doctor --report``: readings, findings and logs of a machine in one archive, masked."""

from __future__ import annotations

import getpass
import io
import json
import re
import shlex
import socket
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkforge import __version__
from sparkforge.build import composing, receipt
from sparkforge.check.doctor.masking import mask_of
from sparkforge.check.doctor.readings import Machine, first_line
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.run import glimpse
from sparkforge.runtime import client

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


def new_path(folder: Path) -> Path:
    """Return the path of a new archive, named after the time."""
    return folder / time.strftime("sparkforge-report-%Y%m%d-%H%M%S.zip")


def write(path: Path, seen: Machine, target: str, findings: Any) -> dict[str, str]:
    """Collect, mask, and write the archive; return its files, each with its problem or "".

    Args:
        findings: document of ``--json``.

    Raises:
        StoreError: the disk is full.
    """
    secrets = composing.seen(Path(seen.root) / ".env")
    keys = [client.api_key(secrets)]
    mask = mask_of(secrets, keys, Path.home(), getpass.getuser(), socket.gethostname())
    parts = [
        (name, json.dumps(mask.tree(value), indent=1, sort_keys=True), "")
        for name, value in ((READINGS, seen.recording()), ("findings.json", findings))
    ]
    for name, text, problem in _parts(Path(seen.root), target):
        parts.append((name, mask.text(text), mask.text(problem)))
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text, _ in parts:
            archive.writestr(name, text.encode(errors="replace"))
    with disk_errors(path):
        write_file(path, raw.getvalue())
    return {name: problem for name, _, problem in parts}


def readings_in(path: Path) -> str:
    """Return the readings in an archive.

    Raises:
        ValueError: it has none, or is damaged.
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(READINGS).file_size > _MOST:
                raise ValueError("the readings are too large")
            return archive.read(READINGS).decode(errors="replace")
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError, RuntimeError) as error:
        raise ValueError(f"no archive of doctor --report: {error}") from None


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
    seen = glimpse(*words, timeout_s=_LOG_S)
    return name, f"{seen.out}{seen.err}", "" if seen.code == 0 else first_line(seen)
