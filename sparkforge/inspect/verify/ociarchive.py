"""Read an image in a file: an OCI layout in a tar, as buildx and ``docker save`` write it.

Nothing of the image is run. Manifest, configuration and every layer are checked by their digests
when they are read. Anything unreadable or different is an ImageError.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import zstandard

from sparkforge.build.receipt import differences
from sparkforge.core import plain
from sparkforge.core.errors import ImageError, VerifyError
from sparkforge.inspect.verify.bytediff import Difference

_PIECE = 1 << 20


@dataclass(frozen=True)
class Layer:
    """One layer: the digest of its bytes in the file, and their compression."""

    digest: str
    media_type: str


@dataclass(frozen=True)
class Image:
    """An opened archive."""

    archive: tarfile.TarFile
    path: Path
    digest: str
    """Of the platform's manifest, as in a registry."""
    config: Mapping[str, Any]
    """The image's configuration, with labels and the digests of unpacked layers."""
    layers: tuple[Layer, ...]

    @property
    def labels(self) -> Mapping[str, str]:
        return (self.config.get("config") or {}).get("Labels") or {}

    @property
    def platform(self) -> str:
        return f"{self.config['os']}/{self.config['architecture']}"

    @contextmanager
    def opened(self, layer: Layer) -> Iterator[tarfile.TarFile]:
        """Yield a layer as a stream of members; checked when the block ends without an error."""
        source: Any = _Hashed(_blob(self.archive, self.path, layer.digest))
        if "zstd" in layer.media_type:
            plain: Any = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
        else:
            plain = gzip.GzipFile(fileobj=source) if "gzip" in layer.media_type else source
        try:
            with tarfile.open(fileobj=plain, mode="r|") as members:
                yield members
        except (tarfile.TarError, zstandard.ZstdError, gzip.BadGzipFile, EOFError) as error:
            msg = f"{self.path.name}: layer {layer.digest[:19]} cannot be read: {error}"
            raise ImageError(msg, "the file is damaged: save or build it again") from None
        while source.read(_PIECE):
            pass  # bytes after the last member are part of the digest
        if source.hexdigest() != layer.digest.removeprefix("sha256:"):
            msg = f"{self.path.name}: layer {layer.digest[:19]} does not match its digest"
            raise ImageError(msg, "the file is damaged: save or build it again")


class _Hashed(io.RawIOBase):
    """A stream that computes the sha256 of its bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self._sha256.update(data)
        return data

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _blob(archive: tarfile.TarFile, path: Path, digest: str) -> IO[bytes]:
    try:
        found = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
    except KeyError:
        found = None
    if found is None:
        raise ImageError(f"{path.name}: has no {digest}", "save or build it again")
    return found


def _document(archive: tarfile.TarFile, path: Path, digest: str) -> dict[str, Any]:
    data = _blob(archive, path, digest).read()
    if hashlib.sha256(data).hexdigest() != digest.removeprefix("sha256:"):
        raise ImageError(f"{path.name}: {digest} has unexpected content", "save or build it again")
    found: dict[str, Any] = plain.json_of(data)
    return found


@contextmanager
def opened(path: Path) -> Iterator[Image]:
    """Open an archive with one image; attestations beside it are ignored."""
    try:
        archive = tarfile.open(path, "r:")  # noqa: SIM115 - closed below
    except (tarfile.TarError, OSError) as error:
        msg = f"{path}: not an image archive: {error}"
        raise ImageError(msg, "give a file from docker save or buildx (type=oci)") from None
    with archive:
        try:
            image = _described(archive, path)
        except (tarfile.TarError, OSError) as error:
            msg = f"{path}: cannot be read: {error}"
            raise ImageError(msg, "the file is damaged: save or build it again") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            msg = f"{path}: invalid image documents: {type(error).__name__}: {error}"
            raise ImageError(msg, "save or build it again") from None
        yield image


def _described(archive: tarfile.TarFile, path: Path) -> Image:
    """Read index, manifest and configuration, none of which is trusted."""
    try:
        index = archive.extractfile("index.json")
    except KeyError:
        index = None
    if index is None:
        msg = f"{path}: has no index.json"
        remedy = "give an OCI archive: docker save of Docker 25 or newer, or buildx type=oci"
        raise ImageError(msg, remedy)
    found = list(_manifests(archive, path, plain.json_of(index.read())))
    if len(found) != 1:
        raise ImageError(f"{path}: has {len(found)} images", "save one image for one platform")
    digest, manifest = found[0]
    image = Image(
        archive,
        path,
        digest,
        _document(archive, path, manifest["config"]["digest"]),
        tuple(Layer(str(layer["digest"]), str(layer["mediaType"])) for layer in manifest["layers"]),
    )
    texts = [image.platform, *(text for label in image.labels.items() for text in label)]
    if strange := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"a label is not text: {strange[0]!r}")
    return image


def _manifests(
    archive: tarfile.TarFile, path: Path, index: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in index["manifests"]:
        if entry.get("platform", {}).get("os") == "unknown":
            continue  # buildx: an attestation
        document = _document(archive, path, entry["digest"])
        if "manifests" in document:
            yield from _manifests(archive, path, document)
        else:
            yield entry["digest"], document


# -- the files of an image ---------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A file of an image: its hashes, and its bytes if requested."""

    sha256: str
    """Of a symbolic link: ``link to`` and its target."""
    git_blob: str
    """git's id of its content, as in patches."""
    size: int
    data: bytes | None = field(default=None, repr=False)
    machine: int | None = None
    """Of a program or library in ELF: the number of its processor."""


def files(image: Image, keep: Callable[[str], bool]) -> dict[str, Entry]:
    """Return the image's final files, by path without leading slash, where engines unpack them.

    Links and devices have hashes that no file has.

    Args:
        keep: whether to keep a file's bytes.

    Raises:
        VerifyError: engines would unpack a member at different places.
    """
    result: dict[str, Entry] = {}
    folders: set[str] = set()
    for layer in image.layers:
        here: set[str] = set()
        with image.opened(layer) as members:
            for member in members:
                name = _resolved(member.name, result, here)
                folder, _, last = name.rpartition("/")
                if last.startswith(".wh."):
                    gone = folder if last == ".wh..wh..opq" else _place(f"{folder}/{last[4:]}")
                    _remove(result, gone, but=here)
                    continue
                if member.isdir():
                    result.pop(name, None)
                    continue
                if name in folders:
                    _remove(result, name)
                if member.isreg():
                    result[name] = _entry(members, member, keep(name))
                elif not member.islnk():
                    result[name] = Entry(f"link to {member.linkname}", "", 0)
                elif (target := _resolved(member.linkname, result, here)) in result:
                    result[name] = result[target]
                here.add(name)
                folders.update(itertools.accumulate(folder.split("/"), "{}/{}".format))
    return result


def _place(name: str) -> str:
    """Return a member's path without leading slash and ``a/../``, as engines read it."""
    return posixpath.normpath(f"/{name}").lstrip("/")


def _resolved(name: str, there: Mapping[str, Entry], here: Set[str]) -> str:
    """Return an engine's place for a member: links of its own layer (``here``) are followed.

    Raises:
        VerifyError: another file is on the way. Some engines follow an earlier layer's link, and
            others replace it.
    """
    done: list[str] = []
    todo, followed = _place(name).split("/"), 0
    while len(todo) > 1:
        part, *todo = todo
        done = done[:-1] if part == ".." else [*done, part] if part not in ("", ".") else done
        path = "/".join(done)
        if (entry := there.get(path)) is None:
            continue
        link, followed = entry.sha256.partition("link to ")[2], followed + 1
        if not link or path not in here or followed > 40:  # Linux's limit
            msg = f"the image's {name} is below {path}, which is no folder of its layer"
            raise VerifyError(msg, "engines place it differently: build the image again")
        done = [] if link.startswith("/") else done[:-1]
        todo = [*link.split("/"), *todo]
    return "/".join([*done, *todo])


def _remove(files_: dict[str, Entry], path: str, but: Set[str] = frozenset()) -> None:
    """Remove a file, or the files of a folder."""
    below = f"{path}/".lstrip("/")
    for name in [n for n in files_ if (n == path or n.startswith(below)) and n not in but]:
        del files_[name]


def _entry(members: tarfile.TarFile, member: tarfile.TarInfo, keep: bool) -> Entry:
    stream = members.extractfile(member)
    assert stream is not None
    digest = hashlib.sha256()
    # git's own formula; SHA-1 is only a name here, and files are compared by sha256
    blob = hashlib.sha1(b"blob %d\0" % member.size, usedforsecurity=False)
    kept = []
    machine = None
    while piece := stream.read(_PIECE):
        if stream.tell() == len(piece):
            machine = _elf_machine(piece)
        digest.update(piece)
        blob.update(piece)
        if keep:
            kept.append(piece)
    data = b"".join(kept) if keep else None
    return Entry(digest.hexdigest(), blob.hexdigest(), member.size, data, machine)


def _elf_machine(head: bytes) -> int | None:
    """Return e_machine of an ELF header: two bytes at 18, in the byte order of byte 5."""
    if head[:4] != b"\x7fELF" or len(head) < 20:
        return None
    return int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")


# -- differences of two images -------------------------------------------------------------


def compare(first: Path, second: Path) -> list[Difference]:
    """Return the differences of two images; an empty list: the same manifest."""
    with opened(first) as before, opened(second) as after:
        if before.digest == after.digest:
            return []
        result = [Difference("configuration", text) for text in _configuration(before, after)]
        if len(before.layers) != len(after.layers):
            text = f"{len(before.layers)} → {len(after.layers)}"
            return [*result, Difference("number of layers", text)]
        for number, (old, new) in enumerate(zip(before.layers, after.layers, strict=True), 1):
            if old.digest != new.digest:
                found = _layers(_members(before, old), _members(after, new))
                text = f"the same files in another archive: {old.digest} → {new.digest}"
                result += [Difference(f"layer {number}: {a}", b) for a, b in found] or [
                    Difference(f"layer {number}", text)
                ]
        # differences that follow from layers come last, and only without others
        return result or [Difference("manifest", f"{before.digest} → {after.digest}")]


def _configuration(first: Image, second: Image) -> list[str]:
    """Return differing values, without the layers' digests, which the layers show."""
    plain = [{k: v for k, v in image.config.items() if k != "rootfs"} for image in (first, second)]
    return differences(plain[0], plain[1])


_Members = dict[str, tuple[str, str, str]]
"""By name: sha256, other fields of tar, and the number in the layer."""


def _members(image: Image, layer: Layer) -> _Members:
    result = {}
    with image.opened(layer) as members:
        for number, member in enumerate(members):
            content = _entry(members, member, keep=False).sha256 if member.isreg() else ""
            kind = member.type.decode(errors="replace")
            told = (
                f"type {kind} mode {stat.filemode(member.mode)} owner {member.uid}:{member.gid}"
                f" mtime {member.mtime} link {member.linkname!r} pax {member.pax_headers}"
            )
            result[member.name] = (content, told, str(number))
    return result


def _layers(before: _Members, after: _Members) -> list[tuple[str, str]]:
    result = [(name, "only in the first") for name in before.keys() - after]
    result += [(name, "only in the second") for name in after.keys() - before]
    both = sorted(before.keys() & after.keys())
    result += [
        (name, f"sha256 {before[name][0]} → {after[name][0]}")
        for name in both
        if before[name][0] != after[name][0]
    ]
    for name in both:
        if before[name][1] != after[name][1]:
            result.append((name, f"{before[name][1]} → {after[name][1]}"))
    if not result:
        moved = next((name for name in both if before[name][2] != after[name][2]), None)
        if moved is not None:
            result.append((moved, f"member {before[moved][2]} → {after[moved][2]}"))
    return sorted(result)
