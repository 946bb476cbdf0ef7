"""Files: atomic writes, errors of the disk, hashes."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from sparkforge.core.errors import StoreError

_NAMES = "ENOSPC EDQUOT EACCES EPERM EROFS ENOENT ENOTDIR EEXIST EISDIR"
_REFUSED = {getattr(errno, name) for name in _NAMES.split()}
_HINT = (
    "free space (build.py clean) or give the user write access there, or choose another place with"
    " --store DIR; the next run continues from here"
)

# the C parser is five times as fast; a build of PyYAML without libyaml lacks it
YAML_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn the system's refusals to write into StoreErrors."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise StoreError(f"{error.filename or where}: {error.strerror}", _HINT) from error


def write_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, even if the power fails; its mode stays."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        fresh = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
            fresh.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
            fresh.rename(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def write_files(files: Mapping[Path, bytes | None]) -> None:
    """Replace files, each atomically; None removes one."""
    for path, data in files.items():
        path.unlink(missing_ok=True) if data is None else write_file(path, data)


def outdated(files: Mapping[Path, bytes | None]) -> dict[Path, bytes | None]:
    """Return those files that have other contents now; None: there must be none."""
    now = {path: path.read_bytes() if path.is_file() else None for path in files}
    return {path: data for path, data in files.items() if data != now[path]}


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON file's object; None if the file is missing or has no JSON object."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None  # cut off by a power failure, or damaged
    return value if isinstance(value, dict) else None


def read_yaml(path: Path) -> Any:
    """Return a YAML file's value; yaml.YAMLError: it is not YAML."""
    return yaml.load(path.read_bytes(), Loader=YAML_LOADER)


_READ: dict[tuple[int, ...], str] = {}
"""The sha256 of this run's files, by device, inode, size, mtime and ctime."""


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def intact(path: Path, sha256: str) -> bool:
    """Return whether a file exists with its recorded bytes.

    One run reads a file, under all its names, again only if the operating system reports a change.
    """
    try:
        now = path.stat()
    except (FileNotFoundError, ValueError):  # a name with NUL
        return False
    state = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    if state not in _READ:
        _READ[state] = sha256_file(path)
    return _READ[state] == sha256


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the sha256 of files by their names."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def key_of(inputs: Mapping[str, Any]) -> str:
    """Return the sha256 of the inputs in canonical JSON."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def code_digest(*files: Path) -> str:
    """Return one digest of files that affect an artefact; of modules: ``store.code_of``."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.name):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
