"""Locks, the choice of files, and a wheelhouse filled from a loopback index."""

import shutil
import threading
import time
from pathlib import Path

import pytest
from packaging.markers import Marker

from sparkforge.core import index
from sparkforge.core.errors import FetchError, PinsError
from sparkforge.core.index import Index
from sparkforge.sources import download
from sparkforge.sources.wheelhouse import Locked, Wanted, fill, missing, read_lock
from sparkforge.store.store import Store
from tests.support import PATIENCE_S, Page, Server, add_project, make_wheel, sha256, wait_for

HASH = "a" * 64
HASH2 = "b" * 64


def lock(folder: Path, text: str) -> Path:
    path = folder / "lock.txt"
    path.write_text(text)
    return path


def test_lock_is_read(tmp_path: Path) -> None:
    path = lock(
        tmp_path,
        f"""\
# made by a tool
Some_Thing.x==1.0 \\
    --hash=sha256:{HASH} \\
    --hash=sha256:{HASH2}
    # via other
other[extra,more]==2.0+cpu.1 --hash=sha256:{HASH}   # via me
marked==3 ; python_full_version < '3.12' and sys_platform == "linux" \\
    --hash=sha256:{HASH}
""",
    )
    read = read_lock(path)
    assert read[:2] == [
        Locked("some-thing-x", "1.0", frozenset({HASH, HASH2})),
        Locked("other", "2.0+cpu.1", frozenset({HASH})),
    ]
    marker = "python_full_version < '3.12' and sys_platform == 'linux'"
    assert read[2:] == [Locked("marked", "3", frozenset({HASH}), Marker(marker))]
    assert read[1].requirement == "other==2.0+cpu.1"


@pytest.mark.parametrize(
    "text",
    [
        "a==1\n",
        f"a==1.* --hash=sha256:{HASH}\n",
        f"a==1 ; python_version ~= 'abc' --hash=sha256:{HASH}\n",
        f"a==1 ; 'a' in dependency_groups --hash=sha256:{HASH}\n",
        f"a==1 \\\n  --hash=sha256:{HASH}\nb==2 \\\n  --hash=md5:{HASH}\n",
        "--index-url http://127.0.0.1/\n",
        "a @ http://127.0.0.1/a.whl\n",
        f"x==1 ; python_version ~ '3' --hash=sha256:{HASH}\n",
    ],
)
def test_unhashed_line_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PinsError, match=r"lock\.txt: "):
        read_lock(lock(tmp_path, text))


# -- filling ------------------------------------------------------------------------------


@pytest.fixture
def web(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A loopback index that pip is configured for."""
    monkeypatch.setattr(download, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("PIP_INDEX_URL", server.url("/simple/"))
    index.pip_settings.cache_clear()
    return server


def wanted(
    folder: Path, text: str, *, python: str = "3.11", platform: str = "linux/amd64"
) -> Wanted:
    return Wanted(lock(folder, text), (), python, platform, None)


def filled(store: Store, want: Wanted, *, offline: bool = False) -> list[str]:
    with store.temporary("house") as house:
        files = fill(store, want, Index(), Path("uv"), offline=offline, into=house)
        names = sorted(path.name for path in house.iterdir())
        assert files == {name: sha256((house / name).read_bytes()) for name in names}
        return names


def wheel(folder: Path, name: str, tag: str) -> tuple[str, bytes]:
    path = make_wheel(folder, name, "1.0", {f"{name}/tag.py": tag.encode()}, tag=tag)
    return path.name, path.read_bytes()


def test_best_locked_file_is_taken(store: Store, web: Server, tmp_path: Path) -> None:
    tags = [
        "py3-none-any",
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp38-abi3-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_17_aarch64",
        "cp312-cp312-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_39_x86_64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "cp311-cp311-win_amd64",
    ]
    files = dict(wheel(tmp_path, "demo", tag) for tag in tags)
    add_project(web, "demo", {**files, "demo-1.0.tar.gz": b"an sdist"})
    hashes = [sha256(data) for data in files.values()]
    text = "demo==1.0 " + " ".join(f"--hash=sha256:{h}" for h in hashes)
    for best, python, platform in (
        (1, "3.11", "linux/amd64"),
        (3, "3.11", "linux/arm64"),
        (2, "3.10", "linux/amd64"),
    ):
        want = wanted(tmp_path, text, python=python, platform=platform)
        assert filled(store, want) == [f"demo-1.0-{tags[best]}.whl"]
    markers = (
        f"demo==1.0 ; python_full_version >= '3.11' --hash=sha256:{hashes[0]}\n"
        f"demo==0.9 ; python_full_version < '3.11' --hash=sha256:{HASH}\n"
        f"arm==1 ; platform_machine == 'aarch64' --hash=sha256:{HASH}\n"
    )
    assert filled(store, wanted(tmp_path, markers)) == [f"demo-1.0-{tags[0]}.whl"]
    foreign = f"demo==1.0 --hash=sha256:{hashes[4]}"
    with pytest.raises(FetchError, match=r"fits Python 3\.11 on linux/amd64"):
        filled(store, wanted(tmp_path, foreign))


def test_stored_wheels_need_no_index(
    store: Store, web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))  # its files have no hash
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    index.pip_settings.cache_clear()
    name, data = wheel(tmp_path / "links", "demo", "py3-none-any")
    want = wanted(tmp_path, f"demo==1.0 --hash=sha256:{sha256(data)}")
    with pytest.raises(FetchError, match=r"demo==1\.0: no locked file .*--offline is set"):
        filled(store, want, offline=True)
    assert missing(store, want) == 1
    assert filled(store, want) == [name]
    assert missing(store, want) == 0
    shutil.rmtree(tmp_path / "links")
    assert filled(store, want, offline=True) == [name]
    assert web.requests == []


def test_a_file_that_is_not_locked_is_not_taken(store: Store, web: Server, tmp_path: Path) -> None:
    name, data = wheel(tmp_path, "demo", "py3-none-any")
    add_project(web, "demo", {name: data})
    with pytest.raises(FetchError, match=r"has no file that is locked in lock\.txt") as caught:
        filled(store, wanted(tmp_path, f"demo==1.0 --hash=sha256:{HASH}"))
    assert caught.value.exit_code == 4
    assert not any(path.startswith("/files") for path, _ in web.requests)


def test_failure_cancels_other_downloads(
    store: Store, web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_CHUNK", 1000)
    big = Page(bytes(400_000), piece=1000, pause_s=2.0)
    links = f'<a href="/slow/slow-1.0-py3-none-any.whl#sha256={sha256(big.body)}">'
    web.add("/slow/slow-1.0-py3-none-any.whl", big)
    web.add("/simple/slow/", Page(f"{links}slow-1.0-py3-none-any.whl</a>".encode()))
    text = f"bad==1.0 --hash=sha256:{HASH}\nslow==1.0 --hash=sha256:{sha256(big.body)}\n"
    start, threads = time.monotonic(), threading.active_count()
    with pytest.raises(FetchError, match=r"bad==1\.0"):
        filled(store, wanted(tmp_path, text))
    assert time.monotonic() - start < PATIENCE_S  # the slow file takes 800 s
    big.pause_s = 0  # else its thread would print its progress among the next tests' output
    wait_for(lambda: threading.active_count() <= threads)
