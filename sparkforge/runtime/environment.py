"""Wheels → a virtual environment, the result of a build without a container engine.

It has the same wheels from the same wheelhouse as the image.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.disk import read_json, write_file
from sparkforge.core.errors import BuildError, CommandError
from sparkforge.core.log import log
from sparkforge.core.run import call, have
from sparkforge.runtime.interpreter import uv_program


def python_path(folder: Path) -> Path:
    """Return the interpreter of an environment made by ``install``."""
    return folder / "venv" / "bin" / "python"


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """The inputs of a virtual environment."""

    python: Path
    lock: Path
    wheelhouse: Path
    """Folder that satisfies ``lock``."""
    unpacked: Path
    """uv's cache of unpacked wheels; no other process may use it meanwhile."""
    target: str
    """Names the wheelhouse for uv."""
    wheels: Mapping[Path, str]
    """Ours, installed over it, with their recorded sha256."""


def install(of: Ingredients, folder: Path) -> Path:
    """Create a virtual environment in ``folder/venv`` from local files.

    A disk or a power failure may have damaged uv's cache of a wheel, and uv does not check. So
    every byte is compared with the wheels, and damaged ones are unpacked anew.

    Raises:
        BuildError: the wheels conflict, or the disk damages them.
    """
    cache, venv = of.unpacked / "cache", folder / "venv"
    while True:
        first_use = not cache.exists()
        try:
            env = _installed(of, folder)
            wrong = damaged(folder)
            published = as_published(wrong, folder, of.wheelhouse.glob("*.whl"))
            wrong = [path for path in wrong if os.path.relpath(path, folder) not in published]
            if not wrong:
                break
            msg = f"{wrong[0]}: differs from its wheel ({len(wrong)} files do)"
            raise BuildError(msg, "check the disk, then run the build again")
        except BuildError as error:
            if first_use:
                raise
            log.warning(error.what)
            log.info("unpacking the wheels again")
        shutil.rmtree(cache)
        shutil.rmtree(venv, ignore_errors=True)
    try:
        call(uv_program(), "pip", "check", "--quiet", "--python", python_path(folder), env=env)
    except CommandError as error:
        raise _conflict(error) from error
    note(folder, published)
    # Python has no syncfs, and one fsync for each of 20,000 files takes minutes
    call("sync", "--file-system", folder)
    return venv


def _conflict(error: CommandError) -> BuildError:
    msg = f"the wheels do not install together:\n{error}"
    return BuildError(msg, "check the target's requirements and drop_requires")


def _installed(of: Ingredients, folder: Path) -> Mapping[str, str | None]:
    """Make ``folder/venv``; returns the variables for uv."""
    uv = uv_program()
    venv = folder / "venv"
    # uv identifies an unpacked wheel by the folder of the wheel: one name for every
    # wheelhouse of a target, only the wheels that are new are unpacked (27 s and 2.6 GB otherwise)
    stable = of.unpacked / f"wheels-{of.target}"
    fresh = of.unpacked / f".wheels-{of.target}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(of.wheelhouse.resolve())
    fresh.rename(stable)
    # a user's settings for uv (indexes, overrides, dates) must not count here
    foreign = [n for n in os.environ if n.startswith("UV_") and not n.startswith("UV_PYTHON_")]
    env: dict[str, str | None] = {
        **dict.fromkeys(foreign),
        "UV_CACHE_DIR": str(of.unpacked / "cache"),
        "UV_NO_CONFIG": "1",
        "UV_LINK_MODE": "hardlink",  # unpacked once into the cache, linked from there
        "VIRTUAL_ENV": "",
    }
    # relocatable: the folder is renamed when it is complete
    quiet = ("--quiet", "--python")
    call(uv, "venv", "--relocatable", "--no-python-downloads", *quiet, of.python, venv, env=env)
    install: list[str | Path] = [
        *(uv, "pip", "install", *quiet, venv / "bin" / "python"),
        *("--offline", "--no-index", "--no-deps"),
    ]
    log.info("installing third-party wheels")
    try:
        third_party = ("--require-hashes", "--find-links", stable.as_uri(), "-r", of.lock)
        call(*install, *third_party, env=env)
        log.info("installing " + ", ".join(wheel.name for wheel in of.wheels))
        ours = folder / "ours.txt"
        ours.write_text("".join(f"{line}\n" for line in _requirements(of.wheels)))
        # a cache of its own, since these wheels change; it is here, because this folder is swept
        # after a kill: --no-cache leaves hundreds of MB in /tmp then
        with tempfile.TemporaryDirectory(dir=folder) as own:
            once = {**env, "UV_CACHE_DIR": own}
            call(*install, "--require-hashes", "-r", ours, env=once)
        ours.unlink()
    except CommandError as error:
        raise _conflict(error) from error
    return env


def share_byte_code(source: Path, target: Path) -> None:
    """Link the byte code that servers of one environment left into another.

    Only of modules that are one file in both, as third-party ones are: Python itself compares dates
    and sizes, which two versions of a module may share. Files that cannot be linked are left out,
    and Python compiles them again: a running server may be writing one, or another user owns it.

    Args:
        source, target: folders made by ``install``.
    """
    for folder, _, names in os.walk(source / "venv" / "lib"):
        if not folder.endswith("__pycache__"):
            continue
        ours = target / Path(folder).relative_to(source)
        for name in names:
            module = Path(folder).with_name(f"{name.partition('.')[0]}.py")
            twin = ours.with_name(module.name)
            with suppress(OSError):
                if name.endswith(".pyc") and module.samefile(twin):
                    ours.mkdir(exist_ok=True)
                    (ours / name).hardlink_to(Path(folder) / name)


def _requirements(wheels: Mapping[Path, str]) -> Iterator[str]:
    """Yield a line for each wheel, as an address, since a path may have special characters."""
    for path, sha256 in wheels.items():
        name = path.name.partition("-")[0]
        yield f"{name} @ {path.resolve().as_uri()} --hash=sha256:{sha256}"


VLLM_CACHE = "VLLM_CACHE_ROOT"


def vllm_cache(cache: Path, name: str) -> Path:
    """Return the folder of vLLM's own cache, one for each environment.

    A start stores data about the model's class there (10 s of CPU), under the hash of that
    class's file, which does not cover the modules that the file imports.

    Args:
        cache: folder for the caches of all environments.
        name: of the environment.
    """
    return cache / "vllm" / name


def server_env(cache: Path, name: str = "") -> dict[str, str]:
    """Return the variables that a server from a virtual environment runs with.

    Args:
        cache: folder for the caches of vLLM and torch.
        name: of the environment, where several share the folder.
    """
    # without a C++ compiler torch.compile, which vLLM's CPU sampler calls even in eager mode,
    # would end the engine at its first token
    compiled = {} if have("c++") or have("g++") else {"TORCH_COMPILE_DISABLE": "1"}
    return {
        **compiled,
        # the first start writes the byte code of its imports, later ones are 30 s faster;
        # compiling all 20,000 modules in advance costs more (measured: 80 s)
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": "",  # a user's own modules must not replace the installed ones
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache / "hf"),
        VLLM_CACHE: str(vllm_cache(cache, name)),
        "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        # a build machine is not a user for upstream's statistics
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


_LISTING = "files.json"
_WIDTH = 4  # hashing lets other threads run


def note(folder: Path, published: Mapping[str, Sequence[str]]) -> None:
    """Write down the size and date of each file below ``folder/venv``, without byte code.

    Args:
        published: result of ``as_published``.
    """
    files: dict[str, list[str]] = {}
    for top, folders, names in os.walk(folder / "venv"):
        links = [name for name in folders if os.path.islink(f"{top}/{name}")]  # noqa: PTH114
        if (names or links) and not top.endswith("__pycache__"):
            files[os.path.relpath(top, folder)] = [*names, *links]
    document = {"files": files, "state": _state(folder, files), "published": published}
    write_file(folder / _LISTING, json.dumps(document).encode())


def changed(folder: Path) -> bool:
    """Return whether a file of ``note`` has gone or has another size or date; others may be new."""
    match read_json(folder / _LISTING):
        case {"files": dict(files), "state": str(state)}:
            try:
                return _state(folder, files) != state
            except (FileNotFoundError, NotADirectoryError):
                return True
    return True


def _state(folder: Path, files: Mapping[str, Sequence[str]]) -> str:
    """Return a digest of the names, sizes and dates of files, which are given by folder."""
    lines: list[str] = []
    for top, names in files.items():
        # names in an open folder are looked up in two thirds of the time that whole paths take
        at = os.open(f"{folder}/{top}", os.O_PATH | os.O_DIRECTORY)
        try:
            for name in names:
                found = os.lstat(name, dir_fd=at)
                lines.append(f"{top}/{name} {found.st_size} {found.st_mtime_ns}\n")
        finally:
            os.close(at)
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def damaged(folder: Path) -> list[str]:
    """Return the files below ``folder/venv`` whose bytes are not those of their wheels.

    The wheels' RECORDs state them, and ``note`` where a RECORD is wrong. A file that two wheels
    have may be either's: build_backend.py is in FlashInfer's and in torch-c-dlpack-ext's.
    """
    listing = read_json(folder / _LISTING)
    published = listing.get("published", {}) if isinstance(listing, dict) else {}
    wrong: list[str] = []
    stated: dict[Path, list[list[str]]] = {}
    records = sorted((folder / "venv").glob("lib/*/site-packages/*.dist-info/RECORD"))
    for record in records:
        try:
            for path, *row in _stated(record):
                stated.setdefault(path, []).append(row)
        except (ValueError, csv.Error):  # not UTF-8, or no lines of a RECORD
            wrong.append(str(record))
    with ThreadPoolExecutor(_WIDTH) as pool:
        first = [(path, *rows[0]) for path, rows in stated.items()]
        for (path, rows), found in zip(stated.items(), pool.map(_found, first), strict=True):
            if found not in (*rows, published.get(str(path.relative_to(folder)))):
                wrong.append(str(path))
    return wrong if records else [str(folder / "venv")]


def as_published(
    paths: Iterable[str], folder: Path, wheels: Iterable[Path]
) -> dict[str, list[str]]:
    """Return digest and size of each file that is as in a wheel, by its path below ``folder``.

    The RECORD of a published wheel can be wrong: two libraries of pynvvideocodec 2.0.4 were changed
    after it was written.

    Args:
        paths: files in a site-packages folder below ``folder``.
        wheels: third-party ones that are installed; their hashes were checked.
    """
    sites = [path.partition("site-packages/") for path in paths]
    members = {name: Path(before + between) for before, between, name in sites}
    found = {}
    for wheel in wheels if members else ():
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            record = next((name for name in names if name.endswith(".dist-info/RECORD")), "")
            for name in members.keys() & names - {record}:
                path, installed = members[name] / name, members[name] / record
                there = path.is_file() and installed.is_file()
                same = there and path.read_bytes() == archive.read(name)
                if same and _row(installed.read_bytes(), name) == _row(archive.read(record), name):
                    found[os.path.relpath(path, folder)] = _found((path, "sha256", "any"))
    return found


def _row(record: bytes, name: str) -> list[str] | None:
    """Return a file's row in a RECORD."""
    rows = csv.reader(record.decode(errors="replace").splitlines())
    return next((row for row in rows if row[:1] == [name]), None)


def _stated(record: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each file of a RECORD that has a digest, with digest and size.

    A RECORD has no digest of itself: these two and its own row leave no part of it unchecked.
    """
    rows = list(csv.reader(record.read_text(encoding="utf-8").splitlines(), strict=True))
    if [f"{record.parent.name}/RECORD", "", ""] not in rows:
        raise ValueError(f"{record} does not list itself")
    for name, digest, size in rows:
        if digest:
            yield record.parent.parent / name, digest, size


def _found(entry: tuple[Path, str, str]) -> list[str]:
    """Return digest and size of a file, as its RECORD states them; [] where there are none."""
    path, digest, stated = entry
    algorithm = digest.partition("=")[0]
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).digest()
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError, binascii.Error):  # gone, or no algorithm
        return []
    text = base64.urlsafe_b64encode(found).rstrip(b"=").decode()
    return [f"{algorithm}={text}", stated and str(size)]
