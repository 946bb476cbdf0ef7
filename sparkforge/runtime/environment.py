"""Wheels → a virtual environment, the result of a build without a container engine.

It has the same wheels from the same wheelhouse as the image.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.errors import CommandError, ImageError
from sparkforge.core.log import log
from sparkforge.core.run import call, have
from sparkforge.runtime import envfiles
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
        ImageError: the wheels conflict, or the disk damages them.
    """
    cache, venv = of.unpacked / "cache", folder / "venv"
    while True:
        first_use = not cache.exists()
        try:
            env = _installed(of, folder)
            wrong = envfiles.damaged(folder)
            published = envfiles.as_published(wrong, folder, of.wheelhouse.glob("*.whl"))
            wrong = [path for path in wrong if os.path.relpath(path, folder) not in published]
            if not wrong:
                break
            msg = f"{wrong[0]}: differs from its wheel ({len(wrong)} files do)"
            raise ImageError(msg, "check the disk, then run the build again")
        except ImageError as error:
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
    envfiles.note(folder, published)
    # Python has no syncfs, and one fsync for each of 20,000 files takes minutes
    call("sync", "--file-system", folder)
    return venv


def _conflict(error: CommandError) -> ImageError:
    msg = f"the wheels do not install together:\n{error}"
    return ImageError(msg, "check the target's requirements and drop_requires")


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
        call(*install, *third_party, env=env, guarded=True)
        log.info("installing " + ", ".join(wheel.name for wheel in of.wheels))
        ours = folder / "ours.txt"
        ours.write_text("".join(f"{line}\n" for line in _requirements(of.wheels)))
        # a cache of its own, since these wheels change; it is here, because this folder is swept
        # after a kill: --no-cache leaves hundreds of MB in /tmp then
        with tempfile.TemporaryDirectory(dir=folder) as own:
            once = {**env, "UV_CACHE_DIR": own}
            call(*install, "--require-hashes", "-r", ours, env=once, guarded=True)
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
