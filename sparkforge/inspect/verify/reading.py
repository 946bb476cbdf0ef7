"""Read an image from the engine, an archive or a receipt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build import image, receipt
from sparkforge.core.errors import CommandError, ImageError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.inspect.verify import ociarchive
from sparkforge.inspect.verify.ociarchive import Entry
from sparkforge.store.store import Store

DPKG_STATUS, OS_RELEASE = "var/lib/dpkg/status", "usr/lib/os-release"
"""The distribution's list of its packages, and its name."""


@dataclass(frozen=True)
class Reading:
    """An image's labels and files."""

    digest: str
    platform: str
    labels: Mapping[str, str]
    files: Mapping[str, Entry]

    def share(self, name: str) -> bytes | None:
        entry = self.files.get(f"{image.SHARE}/{name}")
        return None if entry is None else entry.data


@contextmanager
def archive(named: str, store: Store) -> Iterator[tuple[Path, str | None]]:
    """Yield the archive of an image, and its digest in a receipt.

    Args:
        named: an archive, a receipt.json, or a reference of an image in the engine.

    Raises:
        ImageError: the engine has no such image. UsageError: the receipt names none.
    """
    path = Path(named)
    promised = None
    if path.is_file() and path.suffix == ".json":
        found = receipt.load(path)
        built = None if found is None else found.image
        if built is None:
            msg = f"{path}: not the receipt of an image build"
            raise UsageError(msg, "give the receipt.json of an image build, or the image")
        named, promised = built.image_id, built.digest
    elif path.is_file():
        yield path, None
        return
    with store.temporary("image") as work:
        log.info(f"reading {named} from the engine")
        try:
            call("docker", "save", "--output", work / "image.tar", "--", named)
        except CommandError as error:
            msg = f"{named}: not a file, and not an image in the engine:\n{error}"
            remedy = "give an archive, a receipt.json or an image from docker images"
            raise ImageError(msg, remedy) from None
        yield work / "image.tar", promised


def read(path: Path) -> Reading:
    """Read an image of sparkforge; ImageError if it is another, or cannot be read."""
    with ociarchive.opened(path) as found:
        if image.TARGET_LABEL not in found.labels:
            msg = f"{path.name}: not built by sparkforge: no label {image.TARGET_LABEL}"
            raise ImageError(msg, "give an image that build.py built")
        files = ociarchive.files(
            found,
            lambda name: (
                name in (DPKG_STATUS, OS_RELEASE)
                or name.startswith(f"{image.SHARE}/")
                or (name.startswith(f"{image.VENV}/") and name.endswith(".dist-info/RECORD"))
            ),
        )
        return Reading(found.digest, found.platform, found.labels, files)
