"""Checks before anything is downloaded or loaded."""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.serving import access, devices, memory, shards, vocabulary
from sparkforge.serving.document import DocumentError
from sparkforge.serving.errors import EX_NOINPUT, StartError
from sparkforge.serving.log import say
from sparkforge.serving.settings import Settings


def check(settings: Settings) -> None:
    """Check model, options, vocabulary, device and memory.

    Raises:
        StartError: the server cannot be started.
    """
    if settings.is_folder:
        checkpoint(Path(settings.model))
    access.check_options([*settings.target_options, *settings.caller_options])
    if settings.profile.vocabulary_sha256:
        vocabulary.check(settings.profile.vocabulary_sha256)
    if settings.profile.cuda_arch is not None and settings.backend_check != "off":
        _device(settings.profile.cuda_arch, strict=settings.strict)
    # the share is computed again before the server starts: hours may pass until then
    memory.options(
        settings.profile.memory, settings.caller_options, settings.memory_share, settings.machines
    )


def _device(arch: str, *, strict: bool) -> None:
    """Check the device; a warning where the user wants to continue, or has another device."""
    try:
        warning = devices.check(arch, devices.capabilities())
    except devices.DeviceError as error:
        if strict:
            raise
        warning = str(error)
    if warning:
        say(f"warning: {warning}")


def checkpoint(path: Path) -> None:
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
        raise StartError(
            f"the model in {path} is not complete: {damaged}; copy it there again", EX_NOINPUT
        )
    else:
        return
    msg = (
        f"the model directory {path} {problem}.\n"
        "Mount a checkpoint there (with Compose: SPARKFORGE_MODEL_DIR=/path/on/the/host), or name "
        "another one in SPARKFORGE_MODEL."
    )
    raise StartError(msg, EX_NOINPUT)


def _damaged(folder: Path) -> str:
    """Return what is wrong with the weight files of a checkpoint, or ""."""
    try:
        names = shards.named(folder)
    except (OSError, DocumentError) as error:
        return str(error)
    found = ((name, shards.read(folder / name).wrong) for name in names)
    wrong = [f"{name}: {problem}" for name, problem in found if problem]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}" if wrong else ""
