"""Downloads from a loopback server that breaks in all the usual ways."""

import gzip
import random
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from sparkforge.core.errors import FetchError, IntegrityError
from sparkforge.sources import download
from sparkforge.sources.download import fetch
from sparkforge.store.store import Store
from tests.support import Page, Server, sha256

DATA = random.Random(7).randbytes(300_000)
SHA = sha256(DATA)
NAME = "demo-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(download, "_CHUNK", 16_384)


def get(store: Store, url: str, *, offline: bool = False) -> Path:
    return fetch(store, name=NAME, sha256=SHA, locate=lambda: url, offline=offline)


def nothing_final(store: Store) -> bool:
    return not any((store.root / "downloads").rglob("*.whl"))


def test_download_is_stored_and_offline_uses_no_network(store: Store, server: Server) -> None:
    url = server.add("/f", Page(DATA))
    with pytest.raises(FetchError, match="--offline") as caught:
        get(store, url, offline=True)
    assert caught.value.exit_code == 4
    assert server.requests == []
    assert get(store, url).read_bytes() == DATA
    assert get(store, "http://127.0.0.1:9/must-not-be-asked").read_bytes() == DATA
    assert get(store, url, offline=True).exists()
    assert len(server.requests) == 1


def test_more_bytes_than_pinned_are_refused(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.add("/f", Page(DATA))
    with monkeypatch.context() as one, pytest.raises(IntegrityError, match="5 is the limit"):
        one.setattr(download, "_MOST_BYTES", 5)  # a third-party wheel has no pinned size
        get(store, url)
    server.requests.clear()
    with pytest.raises(IntegrityError, match="are pinned"):
        fetch(store, name=NAME, sha256=SHA, locate=lambda: url, size=len(DATA) - 5)
    assert get(store, url).read_bytes() == DATA
    assert server.ranges("/f") == [None, None]


def test_wrong_hash_is_refused(store: Store, server: Server) -> None:
    url = server.add("/f", Page(b"an error page"))
    with pytest.raises(IntegrityError, match=f"not {SHA}"):
        get(store, url)
    assert nothing_final(store)
    assert list((store.root / "partial").iterdir()) == []
    server.add("/f", Page(DATA))
    assert get(store, url).read_bytes() == DATA


def test_next_run_resumes_a_failed_download(store: Store, server: Server) -> None:
    page = Page(DATA, cut=100, cut_at=100_000)
    url = server.add("/f", page)
    with pytest.raises(FetchError, match="failed after 5 attempt"):
        get(store, url)
    assert nothing_final(store)
    page.cut = 0
    server.requests.clear()
    assert get(store, url).read_bytes() == DATA
    assert server.ranges("/f") == ["bytes=100000-"]


@pytest.mark.parametrize("ranges", [True, False])  # without, it starts over
def test_a_cut_connection_is_continued(store: Store, server: Server, ranges: bool) -> None:
    url = server.add("/f", Page(DATA, ranges=ranges, cut=1, cut_at=100_000))
    assert get(store, url).read_bytes() == DATA
    assert server.ranges("/f") == [None, "bytes=100000-"]


def test_a_wrong_partial_or_damaged_file_is_replaced(store: Store, server: Server) -> None:
    url = server.add("/f", Page(DATA))
    store._prepare()
    store.partial_path(SHA).write_bytes(DATA + b"more")
    with pytest.raises(IntegrityError):
        get(store, url)
    kept = get(store, url)
    assert kept.read_bytes() == DATA
    kept.chmod(0o644)
    kept.write_bytes(DATA[:-1] + b"?")
    assert get(store, url).read_bytes() == DATA


@pytest.mark.parametrize(("status", "requests"), [(401, 1), (404, 1), (429, 3), (503, 3)])
def test_only_errors_that_may_pass_are_retried(
    store: Store, server: Server, status: int, requests: int
) -> None:
    url = server.add("/f", Page(DATA, statuses=[status, status]))
    with nullcontext() if requests > 1 else pytest.raises(FetchError, match=str(status)):
        assert get(store, url).read_bytes() == DATA
    assert len(server.requests) == requests


def test_gzip_encoded_tarball_is_not_unpacked(store: Store, server: Server) -> None:
    data = gzip.compress(b"a tarball", mtime=0)
    url = server.add("/f", Page(data, headers={"Content-Encoding": "gzip"}))
    path = fetch(store, name="a.tar.gz", sha256=sha256(data), locate=lambda: url)
    assert path.read_bytes() == data


def test_file_url_is_copied(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "ünï%41# x" / NAME
    source.parent.mkdir()
    source.write_bytes(DATA)
    assert get(store, source.as_uri() + f"#sha256={SHA}").read_bytes() == DATA
    assert source.read_bytes() == DATA


def test_a_remote_that_says_nothing_is_dropped_soon(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(download, "_REMOTE_S", (1, 0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not download.from_remote(asking := Store(store.root, url), "x", tmp_path / "x", "x")
    assert asking.remote is None
    assert f"warning: --remote {url}: " in capsys.readouterr().out
