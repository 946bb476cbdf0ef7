"""Checks of the model's files, and of the container's rights to them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from sparkforge.build.composing import MODELS_VOLUME
from sparkforge.check.doctor.machine import (
    Finding,
    Machine,
    Want,
    check,
    error,
    ok,
    unseen,
    warning,
)
from sparkforge.pins.pins import ModelPin
from sparkforge.serving import checkpoint as shards

MISSING = "not there"
# of OpenAI's safetensors files; docs/kernels.md computes the same from the shapes
_MODEL_GB = {"gpt-oss-120b": 65.2, "gpt-oss-20b": 13.8}
_USER = 10001  # user and group of the image (Dockerfile)


def size_of(want: Want) -> int:
    """Return the bytes of the target's model; 0: unknown."""
    return int(_MODEL_GB.get(str(want.target.model), 0) * 10**9)


def mounted(seen: Machine) -> str:
    """Return the folder that Compose mounts as the hub's home; "" for a volume (no slash)."""
    chosen = seen.variables.get("SPARKFORGE_HF_CACHE") or ""
    return chosen if chosen.startswith(("/", ".", "~")) else ""


def hub_of(seen: Machine) -> Path:
    """Return the hub's cache: Compose's if it is a folder of the host, else this user's own."""
    home = mounted(seen) or seen.variables.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"


def _folder(hub: Path, model: ModelPin) -> Path:
    return hub / f"models--{model.repository.replace('/', '--')}"


def problems(seen: Machine, model: ModelPin) -> list[str] | None:
    """Return what is wrong with the model's files; None if they cannot be read."""
    folder = _folder(hub_of(seen), model) / "snapshots" / model.revision
    return seen.value("model", list[str], lambda: read(folder))


def read(folder: Path) -> list[str]:
    """Return the problems of a checkpoint: its index, and the header of each shard."""
    if not folder.exists():
        return [MISSING]
    found = [] if (folder / "config.json").is_file() else ["config.json: missing"]
    try:
        names = shards.named(folder)
    except (OSError, ValueError) as why:
        return [*found, f"{shards.INDEX}: {why}"]
    wrong = ((name, shards.damage(folder / name)) for name in names or ["*.safetensors"])
    return [*found, *(f"{name}: {problem}" for name, problem in wrong if problem)]


@check("model")
def model(seen: Machine, want: Want) -> Finding:
    """A cut shard fails after minutes of loading; a missing one is downloaded at the start."""
    assert want.model is not None  # the check needs one
    hub, folder, found = hub_of(seen), mounted(seen), problems(seen, want.model)
    fetch = f"{f'HF_HOME={_quoted(folder)} ' if folder else ''}hf download {want.model.repository}"
    revision = f"--revision {want.model.revision}"
    if found is None:
        return unseen(f"{hub} is not readable", "sudo python3 build.py doctor")
    if found == [MISSING]:
        text = f"revision {want.model.revision[:12]} is not in {hub}; Compose downloads"
        text += f" {size_of(want) / 1e9:.1f} GB into {folder or f'its volume {MODELS_VOLUME}'}"
        volume = f"python3 build.py model fetch --target {want.name}   # after the build"
        hint = f"{fetch} {revision} && {_share(folder)}" if folder else volume
        return warning(f"{text} at the first start", hint)
    if found:
        # the hub's client takes a file that is there for complete
        files = shlex.join(one.partition(":")[0] for one in found)
        hint = f"{fetch} {files} --force-download {revision}"
        return error(f"{hub}: {'; '.join(found[:3])}", hint)
    if not folder:
        home = str(hub.parent)  # Compose mounts the folder above the cache
        text = f"complete in {hub}, but Compose uses its own volume {MODELS_VOLUME}"
        hint = f"{_share(home)} && echo SPARKFORGE_HF_CACHE={shlex.quote(home)} >>.env"
        return warning(text, hint)
    return ok(f"complete in {hub}")


@check("model", "image")
def model_rights(seen: Machine, want: Want) -> Finding | None:
    """The container runs as user 10001: it reads at each start and writes when it downloads."""
    assert want.model is not None  # the check needs one
    if not (folder := mounted(seen)):
        return None
    hub, share = hub_of(seen), _share(folder)
    if seen.access(hub.parent) not in ("read", "write"):
        text = f"{folder} does not exist; Docker would create it as root"
        return error(text, f"mkdir -p {_quoted(folder)} && {share}")
    for path in (hub.parent, hub, _folder(hub, want.model)):
        # user:10001:rwx, if need be with its effective rights; else the last line: other::r-x
        output = seen.run("getfacl", "-n", str(path)).out
        who = "" if f"# owner: {_USER}\n" in output else _USER
        rights = re.search(rf"(?m)^(?:user:{who}|other:):(?:.*effective:)?([r-][w-][x-])", output)
        if rights is None:
            return unseen(f"getfacl tells nothing of {path}", "sudo apt-get install acl")
        if rights[1][0::2] != "rx":
            return error(f"user {_USER} of the container cannot read {path}", share)
        if rights[1][1] != "w":  # a complete model is only read
            return warning(f"user {_USER} of the container cannot write to {path}", share)
    return ok(f"user {_USER} of the container may use {folder}")


def _quoted(folder: str) -> str:
    """Quote a folder for the shell, except for a ~ to expand."""
    return f"~/{shlex.quote(folder[2:])}" if folder.startswith("~/") else shlex.quote(folder)


def _share(folder: str) -> str:
    """Return the command that adds the container's rights, for new files too, to the owner's."""
    return f"setfacl -R -m u:{_USER}:rwX,d:u:{_USER}:rwX,d:u:$(id -u):rwX {_quoted(folder)}"
