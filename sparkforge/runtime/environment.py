"""Wheels → a virtual environment, the result of a build without a container engine.

It has the same wheels from the same wheelhouse as the image. Its Python is the machine's own, else
the one that uv pins: uv, which is locked with the driver, has a CPython build with its sha256 for
each minor version, and refuses a file with another hash. The download is stored in the store.
"""

import json
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from sparkforge.core.disk import read_json, write_file
from sparkforge.core.errors import BuildError, CommandError, FetchError, IntegrityError
from sparkforge.core.index import pip_settings
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.store.store import INTERPRETERS, Store

VLLM_CACHE = "VLLM_CACHE_ROOT"
_LISTING = "files.json"


def python_path(folder: Path) -> Path:
    """Return the interpreter of an environment made by ``install``."""
    return folder / "venv" / "bin" / "python"


def install(
    folder: Path,
    wheels: Sequence[Path],
    *,
    python: Path,
    lock: Path,
    wheelhouse: Path,
    unpacked: Path,
    target: str,
) -> Path:
    """Create a virtual environment in ``folder/venv`` from local files.

    A disk or a power failure may have damaged uv's cache of a wheel, and uv does not check. So all
    files but scripts are compared with the wheels, if the cache is not new, and damaged ones are
    unpacked anew. BuildError: the wheels conflict, or the disk damages them again.

    Args:
        wheels: ours, installed over the others.
        wheelhouse: folder that satisfies ``lock``; ``target`` names it for uv.
        unpacked: uv's cache of unpacked wheels; no other process may use it meanwhile.
    """
    uv, venv, cache = uv_program(), folder / "venv", unpacked / "cache"
    # uv identifies an unpacked wheel by the folder of the wheel: one name for every
    # wheelhouse of a target, only the wheels that are new are unpacked (27 s and 2.6 GB otherwise)
    stable, fresh = unpacked / f"wheels-{target}", unpacked / f".wheels-{target}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(wheelhouse.resolve())
    fresh.rename(stable)
    # a user's settings for uv (indexes, overrides, dates) must not count here
    foreign = [n for n in os.environ if n.startswith("UV_") and not n.startswith("UV_PYTHON_")]
    env: dict[str, str | None] = {
        **dict.fromkeys(foreign),
        "UV_CACHE_DIR": str(cache),
        "UV_NO_CONFIG": "1",
        "UV_LINK_MODE": "hardlink",  # unpacked once into the cache, linked from there
        "VIRTUAL_ENV": "",
    }
    # addresses, since a path may have special characters
    ours = [f"{one.name.partition('-')[0]} @ {one.resolve().as_uri()}" for one in wheels]
    # relocatable: the folder is renamed when it is complete
    make = ("venv", "--relocatable", "--no-python-downloads", "--quiet", "--python", python, venv)
    pip: tuple[str | Path, ...] = (
        *("pip", "install", "--quiet", "--python", python_path(folder)),
        *("--offline", "--no-index", "--no-deps"),
    )

    used = cache.exists()

    def once() -> None:
        try:
            call(uv, *make, env=env)
            log.info("installing third-party wheels")
            locked = ("--require-hashes", "--find-links", stable.as_uri(), "-r", lock)
            call(uv, *pip, *locked, env=env)
            log.info("installing " + ", ".join(wheel.name for wheel in wheels))
            # a cache of its own, since these wheels change; it is here, because this folder is
            # swept after a kill: --no-cache leaves hundreds of MB in /tmp then
            with tempfile.TemporaryDirectory(dir=folder) as own:
                call(uv, *pip, *ours, env={**env, "UV_CACHE_DIR": own})
            call(uv, "pip", "check", "--quiet", "--python", python_path(folder), env=env)
        except CommandError as error:
            msg = f"the wheels do not install together:\n{error}"
            hint = "check requirements and drop_requires; for a wrong hash: --force wheelhouse"
            raise BuildError(msg, hint) from error
        if used and (wrong := _wrong(venv, [*wheelhouse.glob("*.whl"), *wheels])):
            msg = f"{wrong[0]}: differs from its wheel ({len(wrong)} files do)"
            raise BuildError(msg, "check the disk, then run the build again")

    try:
        once()
    except BuildError as error:
        if not used:
            raise
        log.warning(f"{error.what}\nunpacking the wheels again")
        shutil.rmtree(cache)
        shutil.rmtree(venv, ignore_errors=True)
        once()
    paths = (one for one in venv.rglob("*") if one.is_symlink() or one.is_file())
    kept = (str(one.relative_to(folder)) for one in paths if one.parent.name != "__pycache__")
    listing = {name: _state(f"{folder}/{name}") for name in kept}
    write_file(folder / _LISTING, json.dumps(listing).encode())
    # Python has no syncfs, and one fsync for each of 20,000 files takes minutes
    call("sync", "--file-system", folder)
    return venv


def _wrong(venv: Path, wheels: Iterable[Path]) -> list[Path]:
    """Return the files that differ from the installed wheels' own, but scripts.

    The sums in a wheel's archive count: the RECORD of a published wheel can be wrong (two libraries
    of pynvvideocodec 2.0.4). A file that two wheels have may be either's: build_backend.py is in
    FlashInfer's and in torch-c-dlpack-ext's.
    """
    (site,) = venv.glob("lib/*/site-packages")
    known: dict[Path, set[int]] = {}
    wrong = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            members = {one.filename: one.CRC for one in archive.infolist() if not one.is_dir()}
        (record,) = (name for name in members if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
        if not (site / record).parent.exists():  # uv's, for images
            continue
        del members[record]  # uv writes its own
        if f"{record},," not in (site / record).read_text():
            wrong.append(site / record)
        for name, crc in members.items():
            data, _, moved = name.partition(".data/")
            kind, _, below = moved.partition("/")
            if not moved or "/" in data:
                known.setdefault(site / name, set()).add(crc)
            elif kind in ("purelib", "platlib", "data"):
                place = venv if kind == "data" else site
                known.setdefault(place / below, set()).add(crc)
    with ThreadPoolExecutor(4) as pool:  # zlib lets other threads run
        found = zip(known, pool.map(_crc, known), strict=True)
        return wrong + [path for path, crc in found if crc not in known[path]]


def _crc(path: Path) -> int:
    """Return the sum of a file's bytes; -1: there is no such file."""
    crc = 0
    with suppress(OSError), path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
        return crc
    return -1


def share_byte_code(source: Path, target: Path) -> None:
    """Link the byte code that servers of one environment left into another.

    Only of modules that are one file in both, as third-party ones are: Python itself compares dates
    and sizes, which two versions of a module may share.
    """
    for code in (source / "venv" / "lib").rglob("__pycache__/*.pyc"):
        module = code.parent.with_name(f"{code.name.partition('.')[0]}.py")
        ours = target / code.relative_to(source)
        with suppress(OSError):
            if module.samefile(target / module.relative_to(source)):
                ours.parent.mkdir(exist_ok=True)
                ours.hardlink_to(code)


def restored(folder: Path, files: Mapping[str, Path], to: Path) -> Path:
    """Link packages into a folder, for PYTHONPATH; ``files`` by path below site-packages differ."""
    (site,) = folder.glob("venv/lib/*/site-packages")
    for package in {name.partition("/")[0] for name in files}:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(site / package, to / package, ignore=skip, copy_function=os.link)
    for name, file in files.items():
        file.replace(to / name)
    return to


def server_env(cache: Path, name: str = "") -> dict[str, str]:
    """Return the variables of a server of the environment ``name``, with its caches in a folder."""
    # without a C++ compiler torch.compile, which vLLM's CPU sampler calls even in eager mode,
    # would end the engine at its first token
    compiled = {} if shutil.which("c++") or shutil.which("g++") else {"TORCH_COMPILE_DISABLE": "1"}
    return {
        **compiled,
        # the first start writes the byte code of its imports, later ones are 30 s faster;
        # compiling all 20,000 modules in advance costs more (measured: 80 s)
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": "",  # a user's own modules must not replace the installed ones
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache / "hf"),
        # what a start stores there of a model's class may depend on any module (10 s of CPU)
        VLLM_CACHE: str(cache / "vllm" / name),
        "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        # a build machine is not a user for upstream's statistics
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def changed(folder: Path) -> bool:
    """Return whether a file of ``install`` has gone or has another size or date.

    Others may be new, such as byte code.
    """
    if (listing := read_json(folder / _LISTING)) is None:
        return True
    try:
        return any(_state(f"{folder}/{name}") != then for name, then in listing.items())
    except OSError:
        return True


def _state(path: str) -> list[int]:
    """Return size and date of a file or link; of 30,000 in each build, so without pathlib."""
    found = os.lstat(path)
    return [found.st_size, found.st_mtime_ns]


def uv_program() -> Path:
    """Return the uv that is locked with the driver."""
    from uv import find_uv_bin

    return Path(find_uv_bin())


def find_python(store: Store, version: str) -> Path | None:
    """Return an existing interpreter of this version, e.g. ``3.11``: the machine's or the store's.

    Nothing is downloaded or created.
    """
    words = ("python", "find", "--no-python-downloads", "--no-project", version)
    for more, env in (((), None), (("--managed-python",), _variables(store))):
        found = call(uv_program(), *words, *more, env=env, check=False)
        if found.returncode == 0:
            return Path(os.fsdecode(found.stdout).strip())
    return None


def ensure_python(store: Store, version: str, *, offline: bool) -> Path:
    """Return an interpreter of this version; if there is none, uv downloads its pinned one.

    FetchError: there is none that runs here, and no download. IntegrityError: it has another hash.
    """
    if found := find_python(store, version):
        return found
    absent = f"this machine has no Python {version}, which the wheels are locked for"
    remedy = (
        f"run once without --offline, set a mirror in UV_PYTHON_INSTALL_MIRROR, install Python"
        f" {version} (the system's package manager, pyenv), or build an image with --base"
    )
    if offline:
        raise FetchError(f"{absent}, and --offline is set", remedy)
    log.info(f"{absent}: uv downloads its pinned build into the store and checks the hash")
    with store.lock(INTERPRETERS):
        words = ("python", "install", "--no-bin", version)
        done = call(uv_program(), *words, env=_variables(store), check=False)
    if found := find_python(store, version):
        return found
    said = done.stderr.decode(errors="replace")
    kind = IntegrityError if "Hash mismatch" in said else FetchError  # uv's words
    raise kind(f"{absent}, and uv cannot download one that runs here:\n{said}", remedy)


def _variables(store: Store) -> dict[str, str | None]:
    """Return the variables with which uv looks for interpreters in the store, and puts them."""
    # certificates of a company are in pip's settings; uv reads this variable
    cert = None if "SSL_CERT_FILE" in os.environ else pip_settings().get("cert")
    return {
        "UV_PYTHON_INSTALL_DIR": str(store.root / INTERPRETERS),
        "VIRTUAL_ENV": None,
        **({"SSL_CERT_FILE": cert} if cert else {}),
    }
