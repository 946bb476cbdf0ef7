"""The files of a model: whether they are whole, where the hub's cache has them, their download.

    python -I checkpoint.py CACHE MODEL REVISION

vLLM's own download runs while it loads, so up to 65 GB of page cache compete with the weights. Here
a child runs huggingface_hub's first. A snapshot with checked hashes needs no request to the hub.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

# run by its path, with -I: the folder that holds the package is not searched
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sparkforge.serving import health, options
from sparkforge.serving.options import EX_CANTCREAT, EX_DATAERR, EX_NOHOST, StartError, say

if TYPE_CHECKING:
    from sparkforge.serving.supervise import Signals

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # the format's own
RANKS = 199_998  # ranks of o200k_base; special tokens follow and are not part of the file


def named(folder: Path) -> list[str]:
    """Return the weight files of a checkpoint: those of its index, or without one all there are."""
    if not (folder / INDEX).exists():
        return sorted(file.name for file in folder.glob("*.safetensors"))
    names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    if not all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise ValueError("a name in it is no shard's")
    return sorted(names)


def check(path: Path) -> None:
    """Check the folder of a checkpoint, since vLLM's own errors give no hint; StartError."""
    part = "config.json"
    try:
        (path / part).open("rb").close()
        part = INDEX
        for part in named(path):
            with (path / part).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # 8 bytes, the length of a JSON header; its largest offset is that of the rest
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _HEADER_LIMIT)))
            header.pop("__metadata__", None)
            ends = (int(one["data_offsets"][1]) for one in header.values())
            if size != (whole := 8 + length + max(ends, default=0)):
                raise ValueError(f"{size} bytes, its header says {whole}")
    except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        msg = f"the model in {path} is not complete: {part}: {getattr(error, 'strerror', error)};"
        msg += f" mount a checkpoint there that user {os.getuid()} may read (Compose:"
        msg += " SPARKFORGE_MODEL_DIR=/path/on/the/host), or name another in SPARKFORGE_MODEL"
        raise StartError(msg, options.EX_NOINPUT) from None


def vocabulary() -> bytes:
    """Return the vocabulary of vLLM's chats as o200k_base.tiktoken: lines of base64 and rank."""
    try:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        inner = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)._inner
    except Exception as error:  # its own, or the package is missing
        msg = f"the Harmony vocabulary cannot be loaded: {error}; correct TIKTOKEN_ENCODINGS_BASE"
        raise StartError(msg) from error
    tokens = ((base64.b64encode(inner.decode_bytes([rank])), rank) for rank in range(RANKS))
    return b"".join(b"%s %d\n" % token for token in tokens)


def check_vocabulary(sha256: str) -> None:
    """Compare with the pinned sha256 (64 hex digits); StartError if it is another."""
    if (found := hashlib.sha256(vocabulary()).hexdigest()) != sha256:
        raise StartError(f"the Harmony vocabulary has sha256 {found}, and pins.yaml says {sha256}")


def fetch(model: str, revision: str, variables: Mapping[str, str], signals: Signals) -> Path:
    """Return the folder of a model's snapshot, downloaded by a child; StartError, StoppedError."""
    from sparkforge.serving import supervise

    home = Path(variables.get("HF_HOME") or "~/.cache/huggingface")
    hub = Path(variables.get("HF_HUB_CACHE") or home / "hub").expanduser()
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    env = {**variables, **quiet, "HF_HUB_VERBOSITY": "error"}
    program = [sys.executable, "-I", __file__, str(hub), model, revision]
    child = signals.child = supervise.start(program, env, stdout=None)
    try:
        code = child.wait()
    finally:
        supervise.kill(child.pid)
        signals.child = None
    if signals.came:
        raise supervise.StoppedError
    found = health.read_mark("model")
    if code or found is None:
        raise StartError(f"{model} was not downloaded", code if code > 0 else EX_NOHOST)
    return Path(found)


def download(hub: Path, model: str, revision: str) -> Path:
    """Return the folder of a model's snapshot, downloading what is missing; StartError."""
    import httpx
    from huggingface_hub import constants, errors, snapshot_download

    revision = revision or "main"
    here = None
    with suppress(OSError, ValueError):  # incomplete, by the hub's list or the model's index
        files = Path(snapshot_download(model, revision=revision, local_files_only=True, **_at(hub)))
        names = named(files)
        if names and all((files / name).is_file() for name in ("config.json", *names)):
            here = files
    checked = here is not None and revision == here.name and _mark(here).exists()
    if here is not None and (checked or constants.HF_HUB_OFFLINE):
        return here
    if constants.HF_HUB_OFFLINE:
        msg = f"HF_HUB_OFFLINE is set, and {model} at {revision} is not complete in {hub}: set"
        raise StartError(f"{msg} HF_HUB_OFFLINE=0 for one start, or run build.py model fetch")
    say(f"{model} at {revision}: checking which files are missing in {hub}")
    try:
        return _download(hub, model, revision)
    except errors.HFValidationError as error:
        raise StartError(f"SPARKFORGE_MODEL is not a name on the hub: {error}") from None
    except (errors.RevisionNotFoundError, errors.RepositoryNotFoundError):
        msg = f"there is no model {model} at {revision}, or HF_TOKEN may not read it: check its"
        raise StartError(f"{msg} name in SPARKFORGE_MODEL, and HF_TOKEN") from None
    except (OSError, httpx.TransportError) as error:  # also those of the hub
        where, why = options.shown(constants.ENDPOINT), options.shown(error)
        code, msg = EX_NOHOST, f"{model} cannot be downloaded from {where}: {why}; check the"
        msg += " network, HTTPS_PROXY and HF_ENDPOINT; the next start continues"
        if isinstance(error, OSError) and error.errno is not None:
            code, msg = EX_CANTCREAT, f"the model cannot be stored in {hub}: {error.strerror}; it"
            msg += f" needs room, and user {os.getuid()} must be allowed to write there"
        if here is None:
            raise StartError(msg, code) from None
        say(f"warning: {msg}; serving the downloaded files: {here}")
        return here


def _at(hub: Path) -> dict[str, Any]:
    """Return the files that vLLM reads: at the top, since folders have gpt-oss' weights again."""
    kinds = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
    return {"cache_dir": hub, "allow_patterns": [*kinds], "ignore_patterns": ["*/*"]}


def _mark(files: Path) -> Path:
    """Return the file that exists once the hashes of a snapshot have been checked."""
    return files.parents[1] / "sparkforge" / files.name


def _download(hub: Path, model: str, revision: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    api, folder, over = HfApi(), hub / f"models--{model.replace('/', '--')}", threading.Event()
    commit = str(api.model_info(model, revision=revision).sha)
    files = snapshot_download(model, revision=commit, dry_run=True, **_at(hub))
    names = {file.filename for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        msg = f"{model} at {commit} has no config.json or no weights in safetensors"
        raise StartError(msg, EX_DATAERR)
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    folder.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(folder).free
    if missing > room:
        raise OSError(errno.ENOSPC, f"{missing / 1e9:.1f} GB of the model are missing")

    def report() -> None:  # about what the disk has less than before
        for seconds in itertools.count():
            if over.wait(1):
                return
            have = min(max(room - shutil.disk_usage(folder).free, 0), missing)
            text = f"downloading {have / 1e9:.1f} of {missing / 1e9:.1f} GB"
            health.tell(text)
            if seconds % 15 == 0:
                say(text)

    threading.Thread(target=report, daemon=True).start()
    try:
        found = Path(snapshot_download(model, revision=revision, max_workers=4, **_at(hub)))
    finally:
        over.set()
    if not _mark(found).exists():
        say(f"{model}: checking the hashes of {found}")
        wrong = api.verify_repo_checksums(model, revision=commit, cache_dir=hub).mismatches
        for file in wrong:
            (found / file["path"]).resolve().unlink(missing_ok=True)  # to be downloaded again
            (found / file["path"]).unlink(missing_ok=True)
        if wrong:
            msg = f"{wrong[0]['path']} has another hash than the hub lists, and has been removed;"
            raise StartError(f"{msg} a proxy or a mirror may change files", EX_DATAERR)
        os.sync()  # a power cut would leave files that are cut short
        _mark(found).parent.mkdir(exist_ok=True)
        _mark(found).touch()
    say(f"{model} is complete in {found}")
    return found


if __name__ == "__main__":
    try:
        health.write_mark("model", str(download(Path(sys.argv[1]), *sys.argv[2:])))
    except StartError as error:
        say(f"error: {error}")
        sys.exit(error.code)
    except Exception as error:
        say(f"error: the download failed: {type(error).__name__}: {options.shown(error)}")
        sys.exit(EX_NOHOST)
