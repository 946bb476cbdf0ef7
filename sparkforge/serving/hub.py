"""Download a model of the hub before the server starts.

    python -I hub.py CACHE MODEL REVISION

vLLM's own download runs while it loads, so up to 65 GB of page cache compete with the weights, and
it reports nothing to the health check. Here a child process runs huggingface_hub's download, and
vLLM gets a folder. A snapshot whose hashes were checked is used without a request to the hub.

The child prints one JSON document on each line: ``{"say": TEXT}``; ``{"have": BYTES, "total":
BYTES}`` every second; at the end ``{"done": FOLDER}`` or ``{"error": TEXT, "code": EXIT CODE}``.
After a kill, files in flight start again; complete ones are kept.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# run by its path, with -I: the folder that holds the package is not searched
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sparkforge.serving import access, checkpoint, processes, state
from sparkforge.serving.errors import (
    EX_CANTCREAT,
    EX_DATAERR,
    EX_NOHOST,
    StartError,
)
from sparkforge.serving.errors import say as log

# those that vLLM reads. Only at the top: gpt-oss has two more copies of its weights in folders
_READ = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_ELSEWHERE = "*/*"
_COMMIT = re.compile("[0-9a-f]{40}")
_ATTEMPTS = 6
_PAUSE_S = 8.0  # between two attempts, where the hub names no other time
_SAY_EVERY_S = 15.0
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
}


class StoppedError(Exception):
    """A signal came during the download; complete files are kept. ``number`` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@dataclass
class Progress:
    """Follows the output of the child, and reports the progress.

    Args:
        tell: passes progress to the health check, every second.
    """

    say: Callable[[str], None]
    tell: Callable[[str], None]
    folder: str = ""
    error: str = ""
    code: int = EX_NOHOST
    last: str = "no output"
    _said: float = -_SAY_EVERY_S
    _first: tuple[float, int] | None = None

    def follow(self, lines: Iterable[bytes]) -> None:
        """Read until the child ends."""
        for line in lines:
            self.feed(line)

    def feed(self, line: bytes) -> None:
        """Read one line."""
        try:
            found = json.loads(line)
            if "say" in found:
                self.say(found["say"])
            elif "have" in found:
                self._show(found["have"], found["total"])
            else:
                self.folder, self.error = found.get("done", ""), found.get("error", "")
                self.code = found.get("code", 0)
        except (ValueError, LookupError, TypeError, AttributeError):  # of a library, or of a crash
            self.last = access.shown(line.decode(errors="replace")) or self.last

    def _show(self, have: int, total: int) -> None:
        now = time.monotonic()
        self._first = self._first or (now, have)
        words = f"downloading {have / 1e9:.1f} of {total / 1e9:.1f} GB"
        rate = (have - self._first[1]) / max(now - self._first[0], 1)
        if rate > 0:
            words += f", {rate / 1e6:.1f} MB/s, {(total - have) / rate / 60:.0f} min left"
        self.tell(words)
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            self.say(words)


def fetch(
    model: str, revision: str, variables: Mapping[str, str], tell: Callable[[str], None]
) -> Path:
    """Return the folder of a model's snapshot, downloading what is missing.

    Args:
        model: its name on the hub.
        revision: commit, branch or tag; empty: the newest.
        tell: passes progress to the health check.

    Raises:
        StartError: the model is not complete and cannot be downloaded. Code 68: the hub cannot be
            reached; 73: the files cannot be stored; 65: the hub sends other bytes than it lists;
            78: else.
        StoppedError: a signal came.
    """
    cache = checkpoint.cache(variables)
    program = [sys.executable, "-I", str(Path(__file__)), str(cache), model, revision]
    progress = Progress(log, tell)
    with _signals(), processes.start(program, {**variables, **_QUIET}) as child:
        try:
            assert child.stdout is not None
            progress.follow(child.stdout)
            ended = child.wait()
        finally:
            processes.kill(child.pid)
    if progress.folder:
        return Path(progress.folder)
    ending = f"the download ended without a result (exit code {ended}): {progress.last}"
    raise StartError(progress.error or ending, progress.code)


@contextmanager
def _signals() -> Iterator[None]:
    """Raise StoppedError at a signal."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError(number)

    before = {number: signal.signal(number, stop) for number in state.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the child -------------------------------------------------------------------------------------


def tell(**words: object) -> None:
    """Print one document for the entrypoint."""
    print(json.dumps(words), flush=True)


def download(cache: Path, model: str, revision: str) -> Path:
    """Return the folder of a model's snapshot, downloading what is missing.

    Raises:
        StartError: it cannot be downloaded or stored.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    folder, revision = _folder(cache, model), revision or "main"
    here = checkpoint.snapshot(cache, model, revision)
    complete = here is not None and _complete(cache, model, here)
    if here is not None and complete:
        if constants.HF_HUB_OFFLINE or (revision == here.name and _mark(here).exists()):
            return here
    elif constants.HF_HUB_OFFLINE:
        msg = (
            f"HF_HUB_OFFLINE is set, and {model} at {revision} is not complete in {folder}: set"
            " HF_HUB_OFFLINE=0 in .env for one start, or run build.py model fetch"
        )
        raise StartError(msg)
    tell(say=f"{model} at {revision}: checking which files are missing in {folder}")
    try:
        return _patiently(lambda: _download(cache, model, revision))
    except HFValidationError as error:
        raise StartError(f"SPARKFORGE_MODEL is not a name on the hub: {error}") from None
    except OSError as error:  # also those of the hub
        failure = _failure(error, model, revision, folder)
        if complete and here is not None and failure.code in (EX_NOHOST, EX_CANTCREAT):
            tell(say=f"warning: {failure}")
            tell(say=f"serving the downloaded files: {here}")
            return here
        raise failure from None


def _folder(cache: Path, model: str) -> Path:
    return cache / f"models--{model.replace('/', '--')}"


def _mark(snapshot: Path) -> Path:
    """Return the file that exists once the hashes of a snapshot have been checked."""
    return snapshot.parents[1] / "sparkforge" / snapshot.name


def _complete(cache: Path, model: str, snapshot: Path) -> bool:
    """Return whether all files of a snapshot are there, by the hub's list and the model's index."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            model,
            revision=snapshot.name,
            cache_dir=cache,
            allow_patterns=_READ,
            ignore_patterns=_ELSEWHERE,
            local_files_only=True,
        )
        names = checkpoint.named(snapshot)
    except (OSError, ValueError):
        return False
    return bool(names) and all((snapshot / name).is_file() for name in ("config.json", *names))


def _patiently(work: Callable[[], Path]) -> Path:
    """Call again where the hub or the network fails; raises the last failure.

    huggingface_hub waits itself where it asks for a file, but not where it asks for a list.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return work()
        except (HfHubHTTPError, httpx.TransportError) as error:
            response = error.response if isinstance(error, HfHubHTTPError) else None
            status = 0 if response is None else response.status_code
            if attempt == _ATTEMPTS or (400 <= status < 500 and status not in (408, 429)):
                raise OSError(str(error)) from error
            headers = {} if response is None else response.headers
            limit = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
            named = limit[1] if limit else headers.get("Retry-After", "")
            pause_s = float(named) + 1 if named.isdecimal() else min(2.0**attempt / 4, _PAUSE_S)
            tell(say=f"{access.shown(error)}; trying again in {pause_s:.0f} s")
            time.sleep(pause_s)
    raise AssertionError


def _download(cache: Path, model: str, revision: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    api, commit = HfApi(), revision
    if not _COMMIT.fullmatch(revision):
        commit = str(api.model_info(model, revision=revision).sha)
    files = snapshot_download(
        model,
        revision=commit,
        cache_dir=cache,
        allow_patterns=_READ,
        ignore_patterns=_ELSEWHERE,
        dry_run=True,
    )
    names = {file.filename for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        msg = f"{model} at {commit} has no config.json or no weights in safetensors"
        raise StartError(msg, EX_DATAERR)
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    folder = _folder(cache, model)
    folder.mkdir(parents=True, exist_ok=True)
    room = os.statvfs(folder)
    if missing > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, f"{missing / 1e9:.1f} GB of the model are missing")
    with _telling(folder / "blobs", missing):
        found = Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=cache,
                allow_patterns=_READ,
                ignore_patterns=_ELSEWHERE,
                max_workers=4,
            )
        )
    if not _mark(found).exists():
        tell(say=f"{model}: checking the hashes of {found}")
        wrong = api.verify_repo_checksums(model, revision=commit, cache_dir=cache).mismatches
        for file in wrong:
            (found / file["path"]).resolve().unlink(missing_ok=True)  # to be downloaded again
            (found / file["path"]).unlink(missing_ok=True)
        if wrong:
            msg = (
                f"{wrong[0]['path']} has another hash than the hub lists, and has been removed;"
                " check HTTPS_PROXY and HF_ENDPOINT: a proxy or a mirror may change files"
            )
            raise StartError(msg, EX_DATAERR)
        os.sync()  # a power cut would leave files that are cut short
        _mark(found).parent.mkdir(exist_ok=True)
        _mark(found).touch()
    tell(say=f"{model} is complete in {found}")
    return found


@contextmanager
def _telling(blobs: Path, missing: int) -> Iterator[None]:
    """Report the progress every second, by the size of the folder."""

    def size() -> int:
        return sum(path.lstat().st_blocks * 512 for path in blobs.glob("*"))

    def report() -> None:
        while not over.wait(1):
            try:
                tell(have=min(size() - before, missing), total=missing)
            except FileNotFoundError:  # a file got its name meanwhile
                continue

    before, over = size(), threading.Event()
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _failure(error: OSError, model: str, revision: str, folder: Path) -> StartError:
    """Return the error for a failed download."""
    from huggingface_hub import constants, errors

    cause = error.__cause__ or error
    if isinstance(cause, errors.RevisionNotFoundError):
        msg = f"{model} has no revision {revision}: correct SPARKFORGE_MODEL_REVISION"
        return StartError(msg)
    if isinstance(cause, errors.GatedRepoError):
        msg = f"{model} has restricted access: accept its terms on its page, and set HF_TOKEN"
        return StartError(msg)
    if isinstance(cause, errors.RepositoryNotFoundError):
        msg = f"there is no model {model}, or HF_TOKEN may not read it: check its name and HF_TOKEN"
        return StartError(msg)
    if error.errno is not None:
        msg = (
            f"the model cannot be stored in {folder}: {error.strerror}; it needs room, and user"
            f" {os.getuid()} must be allowed to write there (docs/serving.md)"
        )
        return StartError(msg, EX_CANTCREAT)
    hub = urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]  # without a password
    msg = (
        f"{model} cannot be downloaded from {hub}: {access.shown(cause)}; check the network,"
        " HTTPS_PROXY and HF_ENDPOINT; the next start continues"
    )
    return StartError(msg, EX_NOHOST)


def main(arguments: list[str]) -> int:
    """Run as a program; returns the exit code."""
    cache, model, revision = arguments
    try:
        tell(done=str(download(Path(cache), model, revision)))
    except StartError as error:
        tell(error=str(error), code=error.code)
        return error.code
    except Exception as error:
        text = f"the download failed: {type(error).__name__}: {access.shown(error)}"
        tell(error=text, code=EX_NOHOST)
        return EX_NOHOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
