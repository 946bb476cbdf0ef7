"""Results of another machine's store, which a web server or a folder gives as it is: read only.

A result is found by its key, the hash of its inputs. Its record there names the sha256 of each of
its files, so damage is found; who can write there is trusted as whoever can write into this store.
"""

from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

from sparkforge.build import results as r
from sparkforge.core import plain
from sparkforge.core.errors import FetchError, IntegrityError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.sources.download import fetch, from_remote
from sparkforge.store.store import TAG, Store, place

_KINDS = (r.OwnWheel, r.FilesResult, r.SourceResult, r.SeriesResult, r.WheelhouseResult)


def check(store: Store) -> None:
    """Refuse a remote that is no store; one that does not answer is a warning alone."""
    log.info(f"remote: {store.remote}")
    with store.temporary("remote") as work:
        if not from_remote(store, TAG, work / TAG, TAG, 1 << 24) and store.remote:
            raise UsageError(f"--remote {store.remote}: no {TAG}, so no store", "see docs/build.md")


def take(store: Store, item: Any) -> bool:
    """Copy a ``Cached`` from the remote store; False: it has none, or not the right bytes."""
    if not issubclass(item.kind, _KINDS):
        return False  # an environment is of its machine, and a smoke test has to be one's own
    where, remote = place(item.stage, item.inputs), store.remote
    try:
        with store.temporary("remote") as work:
            record = work / "artefact.json"
            if not from_remote(store, f"{where}/{record.name}", record, item.label, 1 << 24):
                return False
            there = store.read(work, item.kind)
        if there is None or there.key != item.key:
            raise IntegrityError("its record is damaged, or of another version")
        result = there.result
        files = {result.file: result.sha256} if isinstance(result, r.OwnWheel) else {}
        files |= getattr(result, "files", {})

        def fetched(name: str, _: Event) -> Path:
            if wrong := plain.path_problem(f"{files[name].replace('/', '//')}/{name}"):
                raise IntegrityError(f"its record names a file that {wrong}")
            url = f"{remote}/{where}/{quote(name)}"
            return fetch(store, name=name, sha256=files[name], locate=lambda: url)

        paths = dict(zip(files, in_parallel(fetched, [*files], 8), strict=True))
        if isinstance(result, r.WheelhouseResult):
            return False  # it is made of these downloads, by the hashes in the lock

        def make(folder: Path) -> Any:
            for name, path in paths.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                path.rename(folder / name)
            return result

        again = item.find(store) is not None
        store.build(item.stage, item.inputs, item.kind, make, again=again)
    except (FetchError, IntegrityError) as error:
        log.warning(f"{item.label}: not taken from {remote}: {error.what}")
        return False
    log.info(f"{item.label}: from {remote}")
    return True
