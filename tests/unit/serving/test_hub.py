"""What the image downloads from a hub, and from one that lies, refuses or breaks off."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants, get_session

from sparkforge.serving import access, fetching, hub, hubclient, hubfiles
from sparkforge.serving.errors import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, EX_NOHOST, StartError
from tests.hub import COMMIT, Hub
from tests.support import ROOT

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
FILES = {
    "config.json": b"{}",
    "model-00000-of-00001.safetensors": WEIGHTS,
    "model-00001-of-00001.safetensors": WEIGHTS[::-1],
    "model.safetensors.index.json": json.dumps(
        {
            "weight_map": {
                "a": "model-00000-of-00001.safetensors",
                "b": "model-00001-of-00001.safetensors",
            }
        }
    ).encode(),
    "tokenizer.json": b"{} ",
    "chat_template.jinja": b"{{ 1 }}",
    "README.md": b"words",
    "original/model--00001-of-00007.safetensors": WEIGHTS[1:],
    "original/config.json": b"{}  ",
    "metal/model.bin": WEIGHTS[2:],
}
READ = sorted(path for path in FILES if "/" not in path and path != "README.md")


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    """The library's client, which reads proxies once, and takes a while to be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        close_session()
        get_session()
        yield
        close_session()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process asks, without pauses between attempts."""
    found = Hub(dict(FILES)).start()
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(hubclient, "_PAUSE_S", 0.0)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.close()


def fails(cache: Path, capsys: pytest.CaptureFixture[str], revision: str = COMMIT) -> Any:
    """Return the error that a download ends with: one line, and nothing beside the cache."""
    beside = set(cache.parent.iterdir())
    code = fetching.main([str(cache), "some/model", revision])
    assert code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["code"] == code
    assert "\n" not in found["error"]
    assert set(cache.parent.iterdir()) - beside <= {cache}
    return found


@pytest.fixture(autouse=True)
def outlive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process of the tests outlive the thread that starts them."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: type("C", (), {"prctl": max}))


def test_only_what_vllm_reads_is_downloaded_and_lies_as_in_the_hubs_cache(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.page = 3  # the list comes in pages
    assert fetching.main([str(tmp_path), "some/model", COMMIT]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"done": COMMIT}
    place = hubfiles.Place.of(tmp_path, "some/model")
    snapshot = place.snapshot(COMMIT)
    assert sorted(path.name for path in snapshot.iterdir()) == READ
    for path in READ:
        assert (snapshot / path).read_bytes() == FILES[path]
        assert (snapshot / path).is_symlink()
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    link = (snapshot / "model-00000-of-00001.safetensors").readlink()
    assert str(link) == f"../../blobs/{digest}"
    assert not list(place.folder.rglob("*.incomplete"))
    assert place.complete(COMMIT)
    assert {one.method for one in server.requests} == {"GET"}
    # the hub's own library finds them, and asks nothing
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache("some/model", "config.json", tmp_path, COMMIT)
    assert found == str(snapshot / "config.json")


def test_the_newest_revision_is_looked_up_once_and_kept(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetching.main([str(tmp_path), "some/model", ""]) == 0
    assert [one.path for one in server.asked_for("/api/models/some/model/revision")] == [
        "/api/models/some/model/revision/main"
    ]
    assert hubfiles.Place.of(tmp_path, "some/model").commit("main") == COMMIT


def test_a_cut_connection_is_continued_and_a_hub_without_ranges_starts_anew(
    server: Hub, tmp_path: Path
) -> None:
    server.cuts, server.cut_at = 3, 300_000
    assert fetching.main([str(tmp_path), "some/model", COMMIT]) == 0
    spans = [one.range for one in server.asked_for("/some/model/resolve") if one.range]
    assert "bytes=300000-" in spans
    server.cuts, server.ranges = 1, False
    server.files["model-00000-of-00001.safetensors"] = WEIGHTS[5:]
    server.refs["other"] = "1" * 40
    assert fetching.main([str(tmp_path), "some/model", "1" * 40]) == 0


@pytest.mark.parametrize(
    ("ahead", "asked"),
    [
        (lambda: b"", [None]),
        (lambda: b"\0" * 1000, ["bytes=1000-", None]),
        (lambda: WEIGHTS[:1000], ["bytes=1000-"]),
        (lambda: WEIGHTS, []),
        (lambda: WEIGHTS + b"x", [None]),
    ],
    ids=["nothing", "damaged", "a part", "all", "too much"],
)
def test_what_an_earlier_process_left_is_used_unless_it_is_damaged(
    server: Hub, tmp_path: Path, ahead: Callable[[], bytes], asked: list[str | None]
) -> None:
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    part = hubfiles.Place.of(tmp_path, "some/model").blob(f"{digest}.incomplete")
    part.parent.mkdir(parents=True)
    part.write_bytes(ahead())
    assert fetching.main([str(tmp_path), "some/model", COMMIT]) == 0
    snapshot = hubfiles.Place.of(tmp_path, "some/model").snapshot(COMMIT)
    assert (snapshot / "model-00000-of-00001.safetensors").read_bytes() == WEIGHTS
    path = f"/some/model/resolve/{COMMIT}/model-00000-of-00001.safetensors"
    assert [one.range for one in server.asked_for(path)] == asked


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/x", "a/../../x", "a//x", "..", "", ".", "a\\..\\x", "a\nb", "x" * 300, "\0"],
)
def test_a_name_that_would_leave_the_folder_is_refused(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    server.tree = lambda found: [*found, {**found[0], "type": "file", "path": path}]
    error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_DATAERR
    assert "not a plain name" in error["error"]
    assert not server.asked_for("/some/model/resolve")


def lie(**words: Any) -> Any:
    """Return a change of the list: these words in each file's entry."""
    return lambda found: [{**one, **words} for one in found]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (lie(oid="../../x", lfs=None), "hash '../../x'"),
        (lie(lfs={"oid": "sha256:x", "size": 1}), "hash 'sha256:x'"),
        (lie(size=-1, lfs=None), "size -1"),
        (lie(size="1", lfs=None), "not an integer"),
        (lie(size=True, lfs=None), "not an integer"),
        (lie(path=["a"]), "not a string"),
        (lie(path="config.json"), "listed twice"),
        (lambda found: [one for one in found if "safetensors" not in one["path"]], "no weights"),
        (lambda found: [one for one in found if one["path"] != "config.json"], "no config.json"),
        (lambda found: {"error": "x"}, "not a list"),
        (lambda found: b"<html>", "not JSON"),
        (lambda found: b"[" * 100_000, "nested too deeply"),
        (lambda found: b"[]" + b" " * (17 << 20), "more than 16 MiB"),
        (
            lambda found: [*found, {**found[-1], "path": "config.json/x"}],
            "config.json is a file and a folder",
        ),
    ],
)
def test_a_list_that_cannot_be_stored_is_one_error(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: Any, said: str
) -> None:
    server.files = {path: FILES[path] for path in READ}
    server.tree = tree
    error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_DATAERR
    assert said in error["error"]
    assert "SPARKFORGE_DOWNLOAD=vllm" in error["error"]


@pytest.mark.parametrize(
    ("following", "said"),
    [
        (lambda start: f"/x?cursor={start}", "begins again"),
        (lambda start: f"http://192.0.2.1/x?cursor={start + 1}", "more than 5 pages"),
    ],
)
def test_a_list_without_an_end_is_one_error_and_no_other_host_is_asked(
    server: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    following: Any,
    said: str,
) -> None:
    monkeypatch.setattr(hubclient, "_PAGES", 5)
    server.following = following
    error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_DATAERR
    assert said in error["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda path, data: data[:-1] + b"!", "does not have the hash"),
        (lambda path, data: data + b"!", "more than its"),
    ],
)
def test_other_bytes_than_listed_are_refused_and_removed(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: Any, said: str
) -> None:
    server.body = body
    error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_DATAERR
    assert said in error["error"]
    assert not hubfiles.Place.of(tmp_path / "hf", "some/model").complete(COMMIT)
    server.body = lambda path, data: data
    assert fetching.main([str(tmp_path / "hf"), "some/model", COMMIT]) == 0


def test_a_file_that_is_too_short_is_no_endless_download(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.body = lambda path, data: data[:-1]
    assert fails(tmp_path / "hf", capsys)["code"] == EX_NOHOST


LIST = f"/api/models/some/model/tree/{COMMIT}"


@pytest.mark.parametrize(
    ("statuses", "code", "said"),
    [
        ([429] * 9, EX_NOHOST, "it answers with status 429"),
        ([503] * 9, EX_NOHOST, "it answers with status 503"),
        ([0] * 9, EX_NOHOST, "RemoteProtocolError"),
        ([404], EX_CONFIG, "has no model some/model"),
        ([401], EX_CONFIG, "or set HF_TOKEN"),
        ([403], EX_CONFIG, "refuses some/model (status 403)"),
        ([407], EX_CONFIG, "requires a password"),
        ([418], EX_DATAERR, "status 418"),
        ([204], EX_DATAERR, "status 204"),
    ],
)
def test_a_status_is_one_error_with_its_remedy(
    server: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    statuses: list[int],
    code: int,
    said: str,
) -> None:
    server.statuses[LIST] = statuses
    error = fails(tmp_path / "hf", capsys)
    assert error["code"] == code
    assert said in error["error"]


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubclient, "_RETRY_AFTER_S", 0.01)
    server.statuses[LIST] = [429, 503, 0]
    server.headers["Retry-After"] = "999999"  # a lying hub holds up nobody for days
    assert fetching.main([str(tmp_path), "some/model", COMMIT]) == 0


def test_gated_models_unknown_revisions_and_tokens(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no revision" in fails(tmp_path / "hf", capsys, "f" * 40)["error"]
    assert "is not a revision" not in fails(tmp_path / "hf", capsys, "nowhere")["error"]
    assert "which is not a revision" in fails(tmp_path / "hf", capsys, "../x")["error"]
    server.refs["odd"] = "../../x"
    assert "which is not a commit" in fails(tmp_path / "hf", capsys, "odd")["error"]
    server.token, server.gated = "hf_very_secret", True
    error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_CONFIG
    assert "accept its terms" in error["error"]
    server.gated = False
    monkeypatch.setenv("HF_TOKEN", "hf_other_secret")
    error = fails(tmp_path / "hf", capsys)
    assert "HF_TOKEN" in error["error"]
    assert "hf_other_secret" not in error["error"]
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert fetching.main([str(tmp_path / "hf"), "some/model", COMMIT]) == 0


def test_a_hub_out_of_reach_is_named_without_passwords(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:hub-secret@127.0.0.1:9")
    error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_NOHOST
    assert "from 127.0.0.1:9: ConnectError" in error["error"]
    for proxy in ("http://me:proxy-secret@127.0.0.1:9", "ftp://me:proxy-secret@127.0.0.1:9"):
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("ALL_PROXY", proxy)
        close_session()
        error = fails(tmp_path / "hf", capsys)
        assert "secret" not in error["error"]
    close_session()
    assert access.shown("see http://me:secret@host/x\n") == "see http://***@host/x"


def test_a_full_disk_is_told_before_the_download_and_during_it(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_free", lambda folder: 1_000_000)
        error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_CANTCREAT
    assert "2.1 MB of the model are missing in" in error["error"]
    assert "1.0 MB are free" in error["error"]
    assert not server.asked_for("/some/model/resolve")

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset >= 1 << 18:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data[: 1 << 18])

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        error = fails(tmp_path / "hf", capsys)
    assert error["code"] == EX_CANTCREAT
    assert "the disk is full" in error["error"]
    monkeypatch.setattr(Path, "mkdir", denied)
    error = fails(tmp_path / "other", capsys)
    assert error["code"] == EX_CANTCREAT
    assert f"user {os.getuid()} must be allowed to write there" in error["error"]


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_progress_says_how_much_how_fast_and_how_long() -> None:
    said: list[str] = []
    told: list[str] = []
    now = [0.0]
    progress = hub.Progress(said.append, told.append, clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        have = 30_000_000_000 + second * 100_000_000
        progress.feed(json.dumps({"have": have, "total": 65_000_000_000}).encode())
    assert told[0] == "downloading 30 of 65 GB"
    assert told[-1] == "downloading 33 of 65 GB, 100.0 MB/s, 5 min left"
    assert len(told) == 31
    assert len(said) == 3  # one every 15 seconds
    progress.feed(b'{"waiting": true}')
    assert told[-1].startswith("waiting for another process")
    progress.feed(b"Traceback of http://me:secret@proxy")
    assert progress.last == "Traceback of http://***@proxy"


def test_where_the_hub_cannot_be_reached_a_complete_snapshot_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``seems_complete``: another program has downloaded it, and left no mark of ours."""
    code = EX_NOHOST

    def run(words: list[str], variables: object, progress: hub.Progress) -> int:
        progress.feed(json.dumps({"error": "the hub is away", "code": code}).encode())
        return code

    monkeypatch.setattr(hub, "_run", run)
    said: list[str] = []

    def fetch() -> hub.Snapshot:
        return hub.fetch("some/model", "", {"HF_HOME": str(tmp_path)}, said.append, said.append)

    place = hubfiles.Place.of(tmp_path / "hub", "some/model")
    snapshot = place.snapshot(COMMIT)
    snapshot.mkdir(parents=True)
    place.ref("main").parent.mkdir()
    place.ref("main").write_text(COMMIT)
    for path in READ:
        with pytest.raises(StartError, match="the hub is away") as failed:
            fetch()
        assert failed.value.code == code
        (snapshot / path).write_bytes(FILES[path])
        if path == "model.safetensors.index.json":
            break
    assert fetch() == hub.Snapshot(snapshot, COMMIT)
    assert said[-1] == f"serving the downloaded files: {snapshot}"
    code = EX_DATAERR  # a hub that lies is no reason to go on
    with pytest.raises(StartError):
        fetch()


def test_the_tests_use_the_library_of_the_images() -> None:
    locks = [ROOT / "requirements/dev.txt", *(ROOT / "requirements").glob("*-linux-*.txt")]
    versions = {
        line.split()[0]
        for lock in locks
        for line in lock.read_text().splitlines()
        if line.startswith("huggingface-hub==")
    }
    assert len(versions) == 1
