"""Checks of the model's files, and of the container's rights to them."""

from __future__ import annotations

import os
import shlex
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.build.composing import MODELS_VOLUME
from sparkforge.check.doctor.check import Found, check, error, ok, unknown, warning
from sparkforge.check.doctor.readings import Machine, expanded
from sparkforge.check.doctor.wanted import Wanted
from sparkforge.serving import checkpoint as shards

_USER = 10001  # user and group of the image (Dockerfile)
_MOST_FILES = 10_000
# of linux/posix_acl_xattr.h and posix_acl.h: entries of other users than the owner
_ACL, _HEAD, _ENTRY = "system.posix_acl_access", 4, struct.Struct("<HHI")
_NAMED_USER, _OWNING_GROUP, _NAMED_GROUP, _MASK = 2, 4, 8, 16
_READ, _WRITE, _ENTER = 4, 2, 1


@dataclass(frozen=True)
class Checkpoint:
    """A model's files in a hub cache."""

    folder: str = ""
    """Of the pinned revision; "": it is not there."""
    revisions: tuple[str, ...] = ()
    """In the cache."""
    unfinished: int = 0
    """Partly downloaded files."""
    problems: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    """Files that are there and have to be downloaded again."""


@dataclass(frozen=True)
class Rights:
    """The first path that the container's user cannot read, or write, each "" for none."""

    unreadable: str = ""
    unwritable: str = ""


def mounted(seen: Machine) -> str:
    """Return the folder that Compose mounts as the hub's home; "" for its volume.

    In Compose a value without a slash is the name of a volume.
    """
    chosen = seen.variables.get("SPARKFORGE_HF_CACHE") or ""
    return chosen if chosen.startswith(("/", ".", "~")) else ""


def hub_of(seen: Machine) -> Path:
    """Return the hub's cache: Compose's if it is a folder of the host, else huggingface_hub's."""
    home = mounted(seen)
    if not home and (cache := seen.variables.get("HF_HUB_CACHE")):
        return expanded(cache)
    return expanded(home or seen.variables.get("HF_HOME") or "~/.cache/huggingface") / "hub"


def checkpoint(seen: Machine, want: Wanted) -> Checkpoint | None:
    """Return the model's files; None if they cannot be read."""
    hub = hub_of(seen)
    return seen.value("model", Checkpoint, lambda: read(hub, want.repository, want.revision))


@check("model", "model")
def model(seen: Machine, want: Wanted) -> Found:
    """A cut shard fails after minutes of loading; a missing one is downloaded at the start."""
    hub, folder, found = hub_of(seen), mounted(seen), checkpoint(seen, want)
    if found is None:
        return unknown(f"{hub} is not readable", "sudo python3 build.py doctor")
    fetch = f"hf download {want.repository} --revision {want.revision}"
    fetch = f"HF_HOME={_quoted(folder)} {fetch}" if folder else fetch
    volume = f"python3 build.py model fetch --target {want.target}   # after the build"
    if not found.folder:
        text = f"revision {want.revision[:12]} is not in {hub}"
        if found.revisions:
            text += f" (there: {', '.join(other[:12] for other in found.revisions)})"
        if _offline(seen):
            return error(f"{text}, and HF_HUB_OFFLINE is set", f"HF_HUB_OFFLINE=0 {fetch}")
        text += f"; Compose downloads {want.model_bytes / 1e9:.1f} GB into"
        text += f" {folder or f'its volume {MODELS_VOLUME}'} at the first start"
        return warning(text, f"{fetch} && {_share(folder)}" if folder else volume)
    if found.problems:
        more = f"; and {len(found.problems) - 3} more" if len(found.problems) > 3 else ""
        if found.damaged:  # the hub's client takes a file that is there for complete
            anew = fetch.replace(" --revision", f" {shlex.join(found.damaged)} --revision")
            fetch = f"{anew} --force-download && {fetch}"
        return error(f"{found.folder}: {'; '.join(found.problems[:3])}{more}", fetch)
    if not folder:
        home = str(hub.parent)  # Compose mounts the folder above the cache
        hint = f"{_share(home)} && echo SPARKFORGE_HF_CACHE={shlex.quote(home)} >>.env"
        text = f"{found.folder}: complete, but Compose uses its own volume {MODELS_VOLUME}"
        return warning(text, hint if hub.name == "hub" else volume)
    if found.unfinished:
        return warning(f"{found.folder}: {found.unfinished} unfinished downloads", fetch)
    return ok(f"{found.folder}: complete")


@check("model-rights", "model", "image")
def model_rights(seen: Machine, want: Wanted) -> Found:
    """The container runs as user 10001: it reads at each start and writes when it downloads."""
    if not (folder := mounted(seen)):
        return None
    home, share = hub_of(seen).parent, _share(folder)
    if not seen.access(home).exists:
        text = f"{folder} does not exist; Docker would create it as root"
        return error(text, f"mkdir -p {_quoted(folder)} && {share}")
    found = seen.value("model rights", Rights, lambda: rights(home, want.repository))
    if found is None:
        return unknown(f"{folder} is not readable", share)
    if found.unreadable:
        return error(f"user {_USER} of the container cannot read {found.unreadable}", share)
    if found.unwritable and not _offline(seen):
        text = f"user {_USER} of the container cannot write to {found.unwritable}"
        hint = f"{share}   # or, if the model is complete: echo HF_HUB_OFFLINE=1 >>.env"
        return warning(text, hint)
    return ok(f"user {_USER} of the container may use {folder}")


def folder_of(hub: Path, repository: str) -> Path:
    """Return a model's folder in a hub cache."""
    return hub / f"models--{repository.replace('/', '--')}"


def read(hub: Path, repository: str, revision: str) -> Checkpoint:
    """Read a model's revision: its index, and the header of each shard.

    Raises:
        OSError: a folder is unreadable.
    """
    model = folder_of(hub, repository)
    snapshots, folder = model / "snapshots", model / "snapshots" / revision
    there = sorted(one.name for one in snapshots.iterdir()) if snapshots.is_dir() else []
    found = Checkpoint(
        revisions=tuple(there), unfinished=len(list((model / "blobs").glob("*.incomplete")))
    )
    if revision not in there:
        return found
    problems = [] if (folder / "config.json").is_file() else ["no config.json"]
    damaged, names = [], []
    try:
        names = shards.named(folder)
        problems += [] if names else ["no safetensors file"]
    except (OSError, ValueError) as why:
        problems.append(str(why))
        damaged.append(shards.INDEX)
    for name in names:
        if damage := shards.damage(folder / name):
            problems.append(f"{name}: {damage}")
            damaged += [] if damage == "missing" else [name]
    return replace(
        found, folder=str(folder), problems=tuple(problems), damaged=tuple(sorted(damaged))
    )


def granted(path: Path, user: int = _USER) -> int:
    """Return the rights of a user, whose group has the same number: bits 4 (read), 2, 1.

    Raises:
        OSError: it cannot be read.
    """
    state = path.stat()
    if state.st_uid == user:
        return state.st_mode >> 6 & 7
    try:
        acl = os.getxattr(path, _ACL)[_HEAD:]
    except OSError:  # has none, or the file system does not support them
        return (state.st_mode >> 3 if state.st_gid == user else state.st_mode) & 7
    entries = list(_ENTRY.iter_unpack(acl))
    mask = next((bits for tag, bits, _ in entries if tag == _MASK), 7)
    for tag, bits, of in entries:
        if tag == _NAMED_USER and of == user:
            return int(bits & mask)
    groups = [
        bits & mask
        for tag, bits, of in entries
        if (tag == _OWNING_GROUP and state.st_gid == user) or (tag == _NAMED_GROUP and of == user)
    ]
    return max(groups) if groups else state.st_mode & 7


def rights(home: Path, repository: str) -> Rights:
    """Return what the container's user lacks in a hub's home; folders above it do not matter."""
    folder = folder_of(home / "hub", repository)
    fixed = (home / "hub", home / "hub" / ".locks", home / "xet", folder)
    inside = sorted(folder.rglob("*"))[:_MOST_FILES]
    unreadable = unwritable = ""
    for path in (home, *(path for path in fixed if path.exists()), *inside):
        try:
            bits, is_folder = granted(path), path.is_dir()
        except OSError:
            bits, is_folder = 0, False
        need = _READ | _ENTER if is_folder else _READ
        if bits & need != need:
            unreadable = unreadable or str(path)
        # files are replaced, not changed; complete ones are only read
        if is_folder and not bits & _WRITE:
            unwritable = unwritable or str(path)
    return Rights(unreadable, unwritable)


def _offline(seen: Machine) -> bool:
    return seen.variables.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _quoted(folder: str) -> str:
    """Quote a folder for the shell, except for a ~ to expand."""
    return f"~/{shlex.quote(folder[2:])}" if folder.startswith("~/") else shlex.quote(folder)


def _share(folder: str) -> str:
    """Return the command that adds the container's rights in a folder, and keeps its owner's.

    The last entry is for new files of the container.
    """
    return f"setfacl -R -m u:{_USER}:rwX,d:u:{_USER}:rwX,d:u:$(id -u):rwX {_quoted(folder)}"
