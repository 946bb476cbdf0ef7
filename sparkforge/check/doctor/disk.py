"""Checks of disks, and of the settings with which Compose serves."""

from __future__ import annotations

import re
from pathlib import Path

from sparkforge.build import receipt
from sparkforge.check.doctor import host, model
from sparkforge.check.doctor.check import Found, check, error, ok, unknown, warning
from sparkforge.check.doctor.readings import Machine
from sparkforge.check.doctor.wanted import Wanted
from sparkforge.serving import profile as profiles

_LEAST = 2 * 10**9
_FREE = (
    "python3 build.py clean --superseded; docker builder prune; or on a larger disk:"
    " SPARKFORGE_STORE (store), SPARKFORGE_HF_CACHE (model), Docker's data-root (image)"
)


@check("store")
def store(seen: Machine, want: Wanted) -> Found:
    """It has downloads, wheels and environments."""
    access = seen.access(seen.store)
    if access.folder and access.writable:
        return ok(f"{seen.store} is writable")
    hint = f"ls -ld {seen.store}; or SPARKFORGE_STORE=/another/folder"
    return error(f"{seen.store} is not writable", hint)


@check("disk")
def disk(seen: Machine, want: Wanted) -> Found:
    """Store, image and model often share one disk, so their needs are added up for each disk."""
    here = seen.platform in want.platforms  # elsewhere only wheels are built
    built = seen.access(Path(seen.root) / "dist" / want.target / receipt.NAME).exists
    # name and folder → bytes that are to come, and those that certainly are
    needs = {("store", seen.store): (_LEAST if built else want.store_bytes, _LEAST)}
    docker = str(host.engine_info(seen).get("DockerRootDir") or "/var/lib/docker")
    if here and want.image and host.engine_socket(seen):
        needs["image", docker] = (0 if built else want.image_bytes, 0)
    if here and want.repository:
        found = model.checkpoint(seen, want)
        if model.mounted(seen):
            missing = 0 if found is not None and found.folder else want.model_bytes
            needs["model", str(model.hub_of(seen))] = (missing, missing)
        else:  # only root sees what the volume has
            needs["model", docker] = (want.model_bytes, 0 if built else want.model_bytes)
    needs = {key: sizes for key, sizes in needs.items() if sizes[0]}
    disks = {folder: seen.disk(folder) for _, folder in needs}
    findings = [
        unknown(f"{folder} is not readable", "df -h") for folder in disks if not disks[folder]
    ]
    for device, free in {each.device: each.free for each in disks.values() if each}.items():
        on = {
            key: size
            for key, size in needs.items()
            if (place := disks[key[1]]) and place.device == device
        }
        whole, least = (sum(sizes[i] for sizes in on.values()) for i in (0, 1))
        parts = ", ".join(f"{name} {size[0] / 1e9:.0f}" for (name, _), size in on.items())
        text = f"{next(iter(on))[1]}: {free / 1e9:.0f} GB free, needs {whole / 1e9:.0f} ({parts})"
        judged = error if free < least else warning if free < whole else ok
        findings.append(judged(text) if judged is ok else judged(text, _FREE))
    return findings


@check("profile")
def profile(seen: Machine, want: Wanted) -> Found:
    """The server does not start with a wrong one (docs/serving.md, exact, balanced, fast)."""
    given = seen.variables.get(profiles.VARIABLE)
    named, chosen = profiles.named(seen.variables), want.profile
    if not chosen.choices:
        return None
    if given is not None and not named:
        return unknown(f"of your own: {given}" if given else "none")
    try:
        if named:
            chosen = profiles.pick(chosen, named, profiles.VARIABLE)
    except profiles.ChoiceError as why:
        return error(why.what, why.hint)
    return ok(str(chosen.choice))


@check("port")
def port(seen: Machine, want: Wanted) -> Found:
    """The server cannot use a port that another program uses."""
    text = seen.variables.get("SPARKFORGE_PORT") or "8000"
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        return error(f"SPARKFORGE_PORT is {text!r}", "SPARKFORGE_PORT=8000")
    tables = f"{seen.text('/proc/net/tcp')}\n{seen.text('/proc/net/tcp6')}"
    # listeners have the state 0A
    row = r"^\s*\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A "
    if int(text) not in {int(number, 16) for number in re.findall(row, tables, re.MULTILINE)}:
        return ok(f"{text} is free")
    hint = f"ss -ltnp 'sport = :{text}'; or another: echo SPARKFORGE_PORT=8001 >>.env"
    return warning(f"{text} is in use, perhaps by the server itself", hint)
