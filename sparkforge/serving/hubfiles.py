"""A model's files: on the hub, those that vLLM reads, and on the disk.

The folder is the hub's own cache (``blobs/HASH``, ``snapshots/COMMIT/NAME``, ``refs/NAME``), shared
with other programs. One file in it is ours: the list of a commit's files. With it, a complete
snapshot is used without a request to the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparkforge.serving import durable, pagecache, shards
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.pagecache import expanded

COMMIT = re.compile("[0-9a-f]{40}")
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_READ = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


class ListingError(ValueError):
    """The hub's list has an entry that cannot be stored; the message names it."""


@dataclass(frozen=True)
class Listed:
    """One file of a commit."""

    path: str
    """Relative, with ``/``."""
    size: int
    """Bytes."""
    digest: str
    """sha256 of the file (64 digits), or git's name for its content (40 digits)."""


@dataclass(frozen=True)
class Place:
    """The folder of a model in the cache."""

    folder: Path
    """``models--OWNER--NAME`` in the cache."""

    @classmethod
    def of(cls, cache: Path, model: str) -> Place:
        return cls(cache / f"models--{model.replace('/', '--')}")

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest

    @property
    def lock(self) -> Path:
        """Held by the process that downloads into this folder."""
        return self.folder / "sparkforge" / "lock"

    def listing(self, commit: str) -> Path:
        return self.folder / "sparkforge" / f"{commit}.json"

    def ref(self, revision: str) -> Path:
        return self.folder / "refs" / revision

    def commit(self, revision: str) -> str:
        """Return the commit of a branch or tag at the last download, or ""."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            found = self.ref(revision).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError, ValueError):
            return ""
        return found if COMMIT.fullmatch(found) else ""

    def recorded(self, commit: str) -> list[Listed] | None:
        """Return the recorded list of a commit's files, or None."""
        try:
            found = Document.load(self.listing(commit))
            return [
                Listed(
                    found.get(str, number, "path"),
                    found.get(int, number, "size"),
                    found.get(str, number, "digest"),
                )
                for number in range(len(found.get(list)))
            ]
        except (OSError, DocumentError):
            return None

    def record(self, commit: str, files: Sequence[Listed]) -> None:
        """Record the list of a commit's files: the mark of a complete download.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self.listing(commit)
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(path, json.dumps([vars(file) for file in files]))

    def lacking(self, commit: str, files: Iterable[Listed]) -> list[Listed]:
        """Return the files that are missing or have another size."""
        return [file for file in files if size(self.snapshot(commit) / file.path) != file.size]

    def complete(self, commit: str) -> bool:
        """Return whether all files that vLLM reads of a commit are there."""
        files = self.recorded(commit) if commit else None
        return bool(files) and not self.lacking(commit, files or [])

    def seems_complete(self, commit: str) -> bool:
        """The same for another program's download, judged by the model's own index."""
        folder = self.snapshot(commit)
        if not commit or not (folder / "config.json").is_file():
            return False
        names = ["model.safetensors"]
        try:
            if (folder / shards.INDEX).exists():  # else a part of the shards could be all there is
                names = shards.named(folder)
        except (OSError, DocumentError):
            return False
        return all(size(folder / name) > 0 for name in names)


def cache(variables: Mapping[str, str]) -> Path:
    """Return the folder of the hub's cache, as the hub's own library finds it."""
    home = expanded(variables.get("HF_HOME") or "~/.cache/huggingface")
    return expanded(variables.get("HF_HUB_CACHE") or str(home / "hub"))


def weight_files(model: str, revision: str, variables: Mapping[str, str]) -> list[Path]:
    """Return the weight files of a model that are on this machine.

    Args:
        model: a folder, or a name on the hub.
        revision: on the hub; "": the newest.
    """
    folder: Path | None = Path(model)
    if not model.startswith(("/", ".")):
        folder = pagecache.snapshot(cache(variables), model, revision or None)
    return pagecache.weight_files(folder) if folder else []


def is_plain(path: str) -> bool:
    """Return whether a file's name stays in its folder, and can be printed."""
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and len(path) <= 1000
        and all(part not in ("", ".", "..") and len(part.encode()) <= 200 for part in parts)
    )


def listed(pages: Iterable[Document]) -> list[Listed]:
    """Return the files in the pages of the hub's list.

    Raises:
        ListingError: a name would leave its folder, a hash is invalid, or two entries disagree.
        DocumentError: a page has another shape.
    """
    found: dict[str, Listed] = {}
    sizes: dict[str, int] = {}
    for page in pages:
        for number in range(len(page.get(list))):
            path = page.get(str, number, "path")
            if not is_plain(path):
                raise ListingError(f"a file is called {path[:100]!r}, which is not a plain name")
            if page.get(str, number, "type") != "file":
                continue
            large = isinstance(page.get(dict, number).get("lfs"), dict)
            inside: tuple[str | int, ...] = (number, "lfs") if large else (number,)
            file = Listed(path, page.get(int, *inside, "size"), page.get(str, *inside, "oid"))
            if file.size < 0 or not _DIGEST.fullmatch(file.digest):
                raise ListingError(f"{path} has size {file.size} and hash {file.digest[:100]!r}")
            if found.setdefault(path, file) != file or sizes.setdefault(file.digest, file.size) != (
                file.size
            ):
                raise ListingError(f"{path} is listed twice, with another size or hash")
    folders = {str(parent) for path in found for parent in PurePosixPath(path).parents}
    if both := sorted(folders & found.keys()):
        raise ListingError(f"{both[0]} is a file and a folder")
    return list(found.values())


def read_by_vllm(files: Iterable[Listed]) -> list[Listed]:
    """Return the files that vLLM reads of a model: weights, tokenizer, template, settings.

    Only those at the top: gpt-oss has two more copies of its weights, in ``original/`` and
    ``metal/``.

    Raises:
        ListingError: there are no weights in safetensors, or no config.json.
    """
    found = [file for file in files if "/" not in file.path and file.path.endswith(_READ)]
    if not any(file.path.endswith(".safetensors") for file in found):
        raise ListingError("there are no weights in safetensors")
    if all(file.path != "config.json" for file in found):
        raise ListingError("there is no config.json")
    return sorted(found, key=lambda file: file.path)


def size(path: Path) -> int:
    """Return the size of a file in bytes, or -1 where it does not exist."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return -1
