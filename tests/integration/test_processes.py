"""Store and downloads under several processes, some of them killed."""

import random
from pathlib import Path

from sparkforge.build.results import FilesResult
from sparkforge.sources.download import fetch
from sparkforge.store.store import Store
from tests.support import PATIENCE_S, Page, Server, finished, python, sha256, wait_for

DATA = random.Random(3).randbytes(3_000_000)
SHA = sha256(DATA)
INPUTS = {"a": 1}

FETCH = """
import sys
from pathlib import Path
from sparkforge.sources.download import fetch
from sparkforge.store.store import Store
fetch(Store(Path(sys.argv[1])), name="x.whl", sha256=sys.argv[2], locate=lambda: sys.argv[3])
"""

BUILD = """
import sys, time
from pathlib import Path
from sparkforge.build.results import FilesResult
from sparkforge.store.store import Store
note = Path(sys.argv[2])
def make(folder):
    for i in range(50):
        (folder / str(i)).write_bytes(bytes(1000))
    with note.open("a") as file:
        file.write("made\\n")
    time.sleep(float(sys.argv[3]))
    return FilesResult({"count": "50"})
made = Store(Path(sys.argv[1])).build("wheels", {"a": 1}, FilesResult, make)
print("found", made.result.files["count"], flush=True)
"""


def test_two_processes_download_once(store: Store, server: Server) -> None:
    url = server.add("/x", Page(DATA))
    with store.lock(f"download-{SHA[:32]}"):  # until all have begun
        children = [python(FETCH, store.root, SHA, url) for _ in range(3)]
        for child in children:
            assert child.stdout is not None
            assert "waiting for another build" in child.stdout.readline()
    for child in children:
        finished(child)
    assert len(server.requests) == 1
    assert store.download_path(SHA, "x.whl").read_bytes() == DATA


def test_killed_download_is_resumed(store: Store, server: Server) -> None:
    page = Page(DATA, piece=1_500_000, pause_s=PATIENCE_S)
    url = server.add("/x", page)
    child = python(FETCH, store.root, SHA, url)
    partial = store.partial_path(SHA)
    wait_for(lambda: partial.exists() and partial.stat().st_size >= 1 << 20)
    child.kill()
    child.communicate()
    have = partial.stat().st_size
    assert 0 < have < len(DATA)
    assert not store.download_path(SHA, "x.whl").exists()
    page.pause_s = 0
    path = fetch(store, name="x.whl", sha256=SHA, locate=lambda: url)
    assert path.read_bytes() == DATA
    assert server.ranges("/x") == [None, f"bytes={have}-"]
    assert not partial.exists()


def test_killed_process_releases_lock(store: Store, tmp_path: Path) -> None:
    note = tmp_path / "note"
    child = python(BUILD, store.root, note, "60")
    wait_for(note.exists)
    child.kill()
    child.communicate()
    assert not list((store.root / "artefacts").rglob("*"))
    assert list((store.root / "tmp").iterdir())
    store.sweep()
    assert not list((store.root / "tmp").iterdir())
    made = store.build("wheels", INPUTS, FilesResult, lambda folder: FilesResult({}))
    assert made.result == FilesResult({})


def test_two_processes_build_once(store: Store, tmp_path: Path) -> None:
    note = tmp_path / "note"
    children = [python(BUILD, store.root, note, "0.3") for _ in range(3)]
    outputs = [finished(child) for child in children]
    assert note.read_text() == "made\n"
    assert all(out.endswith("found 50\n") for out in outputs)
