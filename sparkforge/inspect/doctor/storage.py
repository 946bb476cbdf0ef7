"""Probes of disks, the model's files and the server's port: readings → findings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkforge.build.composing import MODELS_VOLUME
from sparkforge.inspect.doctor.checkpoint import Checkpoint
from sparkforge.inspect.doctor.finding import Finding
from sparkforge.inspect.doctor.reading import Readings
from sparkforge.inspect.doctor.rights import USER
from sparkforge.inspect.doctor.wanted import MODEL_BYTES, Wanted
from sparkforge.serving import profile as profiles

_GIB = 1 << 30
_LEAST = 2 * _GIB
_VOLUME = f"volume {MODELS_VOLUME}"
_LISTEN = "0A"  # the state in /proc/net/tcp


def store(seen: Readings, want: Wanted) -> Iterator[Finding]:
    disk = seen.disks.store
    if disk is None:
        hint = "df -h   # if a network disk is gone: --store DIR on another disk"
        yield Finding("store", "fail", "the disk of the store did not answer", hint)
        return
    state, free = seen.state(disk.path), disk.free
    summary = f"{disk.path}: {free / _GIB:.1f} GiB free"
    elsewhere = "python3 build.py clean --superseded; or SPARKFORGE_STORE=/larger/disk/sparkforge"
    if not (state.folder and state.writable):
        hint = f"ls -ld {disk.path}; or SPARKFORGE_STORE=/another/folder"
        yield Finding("store", "fail", f"{summary}; not writable", hint)
    elif free < _LEAST:
        yield Finding("store", "fail", summary, elsewhere)
    elif free < want.store_bytes:
        need = f"{want.store_bytes / _GIB:.0f} GiB"
        kind = "an estimate" if want.gpu else "measured"
        yield Finding("store", "warn", f"{summary}; a first build needs {need} ({kind})", elsewhere)
    else:
        yield Finding("store", "ok", summary)


def model(seen: Readings, want: Wanted) -> Iterator[Finding]:
    """Check the files of the model."""
    if want.model is None:
        yield Finding("model", "ok", f"target {want.target} builds its own tiny model")
        return
    name, repository, revision = want.model
    checkpoint = seen.disks.checkpoint
    if checkpoint is None:
        hint = "ls -l ~/.cache/huggingface/hub; sudo python3 build.py doctor"
        yield Finding("model", "warn", "its folder does not answer or is not readable", hint)
        return
    where = checkpoint.folder
    fetch = f"{_hf_home(seen, checkpoint)}hf download {repository} --revision {revision}"
    if not where:
        yield _absent(seen, want, checkpoint, _fetch_for_compose(seen, want, fetch))
        yield from _room(seen, name)
        return
    wrong = _wrong(checkpoint)
    halves = [*checkpoint.incomplete, *checkpoint.incomplete_here]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        text = f"{where}: {'; '.join(wrong[:3])}{more}"
        yield Finding("model", "fail", text, _again(checkpoint, fetch))
        yield from _room(seen, name)
    elif halves:
        text = f"{where}: complete, but with {len(halves)} unfinished downloads beside it"
        yield Finding("model", "warn", text, fetch)
    else:
        size = sum(shard.size or 0 for shard in checkpoint.shards.values())
        summary = f"{where}: {len(checkpoint.shards)} shards, {size / 1e9:.1f} GB"
        if checkpoint.hub and not folder_for_compose(seen.variables):
            text = (
                f"{summary}; but Compose uses its own {_VOLUME}, and downloads the model at the"
                " first start"
            )
            yield Finding("model", "warn", text, _mount(Path(checkpoint.hub), fetch, seen, want))
            return
        yield Finding("model", "ok", f"{summary}, each of the size in its header")


def folder_for_compose(variables: Mapping[str, str]) -> str:
    """Return the folder of this machine that Compose mounts as the hub's home; "" for its volume.

    In Compose a value without a slash is the name of a volume.
    """
    chosen = variables.get("SPARKFORGE_HF_CACHE") or ""
    return chosen if chosen.startswith(("/", ".", "~")) else ""


def _hf_home(seen: Readings, checkpoint: Checkpoint) -> str:
    folder = folder_for_compose(seen.variables)
    return f"HF_HOME={_quoted(folder)} " if folder and checkpoint.hub else ""


def _quoted(folder: str) -> str:
    """Quote a folder for the shell, except for a ~ to expand."""
    return f"~/{shlex.quote(folder[2:])}" if folder.startswith("~/") else shlex.quote(folder)


def _fetch_for_compose(seen: Readings, want: Wanted, fetch: str) -> str:
    """Return the commands that put a model into Compose's folder; the container is user 10001."""
    if folder := folder_for_compose(seen.variables):
        return f"{fetch} && {_shared(_quoted(folder))}"
    return f"python3 build.py model fetch --target {want.target}   # after the build"


def _shared(folder: str) -> str:
    """Return the command that adds the container's rights in a folder, and keeps its owner's.

    The last entry is for new files of the container.
    """
    return f"setfacl -R -m u:{USER}:rwX,d:u:{USER}:rwX,d:u:$(id -u):rwX {folder}"


def model_rights(seen: Readings, want: Wanted) -> Iterator[Finding]:
    """Check the rights of the container's user in the mounted folder."""
    folder, found = folder_for_compose(seen.variables), seen.disks.rights
    if not folder or found is None or want.model is None:
        return
    share = _shared(_quoted(folder))
    if not found.exists:
        text = f"{folder} does not exist; Docker would create it as root"
        yield Finding("model-rights", "fail", text, f"mkdir -p {_quoted(folder)} && {share}")
    elif found.unreadable:
        text = f"user {USER} of the container cannot read {found.unreadable}"
        yield Finding("model-rights", "fail", text, share)
    elif not found.unwritable:
        yield Finding(
            "model-rights", "ok", f"user {USER} of the container may read and write {folder}"
        )
    elif offline(seen):
        yield Finding(
            "model-rights",
            "ok",
            f"user {USER} of the container may read {folder}, and"
            " HF_HUB_OFFLINE is set: it will not write",
        )
    else:
        text = f"user {USER} of the container cannot write to {found.unwritable}"
        hint = f"{share}   # or, if the model is complete: echo HF_HUB_OFFLINE=1 >>.env"
        yield Finding("model-rights", "warn", text, hint)


def _mount(hub: Path, fetch: str, seen: Readings, want: Wanted) -> str:
    """Return the commands that make Compose use an existing hub cache."""
    if hub.name != "hub":  # Compose mounts the folder above it
        return _fetch_for_compose(seen, want, fetch)
    home = shlex.quote(str(hub.parent))
    return f"{_shared(home)} && echo SPARKFORGE_HF_CACHE={home} >>.env"


def offline(seen: Readings) -> bool:
    """Return whether the hub must not be used."""
    return seen.variables.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")


def _absent(seen: Readings, want: Wanted, checkpoint: Checkpoint, fetch: str) -> Finding:
    assert want.model is not None
    summary = f"revision {want.model[2][:12]} is not in {checkpoint.hub}"
    if checkpoint.revisions:
        summary += f" (there: {', '.join(revision[:12] for revision in checkpoint.revisions)})"
    if checkpoint.incomplete:
        summary += f"; {len(checkpoint.incomplete)} unfinished downloads"
    if offline(seen):
        return Finding(
            "model", "fail", f"{summary}, and HF_HUB_OFFLINE is set", f"HF_HUB_OFFLINE=0 {fetch}"
        )
    size = MODEL_BYTES.get(want.model[0])
    amount = f" {size / 1e9:.1f} GB" if size else ""
    into = folder_for_compose(seen.variables) or f"its {_VOLUME}"
    text = f"{summary}; Compose downloads{amount} into {into} at the first start"
    return Finding("model", "warn", text, fetch)


def _again(checkpoint: Checkpoint, fetch: str) -> str:
    """Return the command that repairs a checkpoint; it removes damaged files."""
    if not checkpoint.hub:  # the user's own folder: nothing in it is overwritten
        target = shlex.quote(f"{checkpoint.folder}-anew")
        return f"{fetch} --local-dir {target}   # or copy yours again"
    damaged = [
        name
        for name, shard in checkpoint.shards.items()
        if shard.problem != "missing" and shard.size != shard.expected
    ]
    if checkpoint.index_problem:
        damaged.append("model.safetensors.index.json")
    if not damaged:
        return fetch
    # the hub's client assumes that an existing file is complete
    names = " ".join(sorted(damaged))
    anew = fetch.replace(" --revision", f" {names} --revision")
    return f"{anew} --force-download && {fetch}"


def _wrong(checkpoint: Checkpoint) -> list[str]:
    wrong = []
    if checkpoint.index_problem:
        wrong.append(checkpoint.index_problem)
    if not checkpoint.config:
        wrong.append("no config.json")
    shards = checkpoint.shards
    if not shards and not wrong:
        wrong.append("no safetensors file")
    for name, shard in shards.items():
        if shard.wrong:
            wrong.append(f"{name}: {shard.wrong}")
    return wrong


def _room(seen: Readings, name: str) -> Iterator[Finding]:
    disk, need = seen.disks.model, MODEL_BYTES.get(name)
    if disk is None or need is None:
        return
    summary = f"{disk.path}: {disk.free / 1e9:.0f} GB free, {name} needs {need / 1e9:.0f}"
    if disk.free < need:
        hint = "echo SPARKFORGE_HF_CACHE=/larger/disk/huggingface >>.env   # of user 10001"
        yield Finding("model-disk", "fail", summary, hint)
    else:
        yield Finding("model-disk", "ok", summary)


def profile(seen: Readings, want: Wanted) -> Iterator[Finding]:
    given = seen.variables.get(profiles.VARIABLE)
    named = profiles.named(seen.variables)
    if not want.profile.choices:
        return
    if given is not None and not named:
        yield Finding("profile", "note", f"of your own: {given}" if given else "none")
        return
    try:
        chosen = want.profile
        if named:
            chosen = profiles.pick(chosen, named, profiles.VARIABLE)
    except profiles.ChoiceError as error:
        yield Finding("profile", "fail", error.what, error.hint)
        return
    yield Finding("profile", "ok", f"{chosen.choice}")


def port(seen: Readings, want: Wanted) -> Iterator[Finding]:
    text = seen.variables.get("SPARKFORGE_PORT") or "8000"
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        yield Finding("port", "fail", f"SPARKFORGE_PORT is {text!r}", "SPARKFORGE_PORT=8000")
        return
    taken = listening(seen.text("/proc/net/tcp")) | listening(seen.text("/proc/net/tcp6"))
    if int(text) in taken:
        hint = f"ss -ltnp 'sport = :{text}'; or use another: SPARKFORGE_PORT=8001 docker compose up"
        yield Finding("port", "warn", f"{text} is in use, perhaps by the server itself", hint)
    else:
        yield Finding("port", "ok", f"{text} is free")


def listening(text: str) -> set[int]:
    """Return the ports with a listener in /proc/net/tcp (or tcp6)."""
    rows = re.findall(
        r"^\s*\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} (\w\w) ", text, re.MULTILINE
    )
    return {int(number, 16) for number, state in rows if state == _LISTEN}


PROBES = (store, model, model_rights, profile, port)
