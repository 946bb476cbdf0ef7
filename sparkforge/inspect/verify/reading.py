"""An image as it is read: out of the engine, an archive or a receipt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build import image
from sparkforge.build.receipt import image_of
from sparkforge.core import plain
from sparkforge.core.errors import CommandError, ImageError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.inspect.verify import ociarchive
from sparkforge.inspect.verify.ociarchive import Entry
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.store.store import Store


@dataclass(frozen=True)
class Reading:
    """An image as it was read: its labels and its files."""

    digest: str
    platform: str
    labels: Mapping[str, str]
    files: Mapping[str, Entry]

    def share(self, name: str) -> bytes | None:
        entry = self.files.get(f"{image.SHARE}/{name}")
        return None if entry is None else entry.data


@contextmanager
def archive(named: str, store: Store) -> Iterator[tuple[Path, str | None]]:
    """Give the archive of an image, and the digest that a receipt promises for it.

    Args:
        named: an archive, a receipt.json, or a reference of an image that the engine holds.

    Raises:
        ImageError: the engine has no such image. UsageError: the receipt names none.
    """
    path = Path(named)
    promised = None
    if path.is_file() and path.suffix == ".json":
        try:
            items = plain.json_of(path.read_text())["items"]
            built = image_of(items)
            named, promised = str(built["image_id"]), built["digest"]
        except (ValueError, KeyError, TypeError, AttributeError):
            msg = f"{path}: no receipt of a build that baked an image"
            raise UsageError(msg, "name the receipt.json of one, or the image itself") from None
    elif path.is_file():
        yield path, None
        return
    with store.temporary("image") as work:
        log.info(f"reading {named} out of the engine")
        try:
            call("docker", "save", "--output", work / "image.tar", "--", named)
        except CommandError as error:
            msg = f"{named}: neither a file nor an image of the engine:\n{error}"
            remedy = "give an archive, a receipt.json or an image that docker images lists"
            raise ImageError(msg, remedy) from None
        yield work / "image.tar", promised


def read(path: Path) -> Reading:
    """Read an image made by sparkforge.

    Raises:
        ImageError: it was not, or can't be read.
    """
    with ociarchive.opened(path) as found:
        if image.TARGET_LABEL not in found.labels:
            msg = f"{path.name}: not made by sparkforge: no label {image.TARGET_LABEL}"
            raise ImageError(msg, "name an image that build.py baked")
        site = site_of(found.labels)
        files = ociarchive.files(
            found,
            lambda name: name.startswith(f"{image.SHARE}/") or (
                name.startswith(site) and name.endswith(".dist-info/RECORD")
            ),
        )  # fmt: skip
        return Reading(found.digest, found.platform, found.labels, files)


def site_of(labels: Mapping[str, str]) -> str:
    """Return the image's folder of packages, without the first slash and with a last one."""
    return labels.get(SITE_PACKAGES_LABEL, "").strip("/") + "/"
