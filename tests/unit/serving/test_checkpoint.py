"""What the image downloads from a hub, and from one that changes, refuses or breaks off."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import close_session, constants, get_session

from sparkforge.serving import checkpoint
from sparkforge.serving.options import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, EX_NOHOST, StartError
from tests.hub import COMMIT, Hub

Patch = pytest.MonkeyPatch

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
SHARDS = ["model-00000-of-00001.safetensors", "model-00001-of-00001.safetensors"]
FILES = {
    "config.json": b"{}",
    SHARDS[0]: WEIGHTS,
    SHARDS[1]: WEIGHTS[::-1],
    "model.safetensors.index.json": json.dumps(
        {"weight_map": dict(zip("ab", SHARDS, strict=True))}
    ).encode(),
    "tokenizer.json": b"{} ",
    "chat_template.jinja": b"{{ 1 }}",
    "README.md": b"words",
    "original/model--00001-of-00007.safetensors": WEIGHTS[1:],
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
def server(monkeypatch: Patch) -> Iterator[Hub]:
    """A hub that this process asks, without pauses between attempts."""
    found = Hub(dict(FILES)).start()
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + TEMPLATE)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.close()


TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def pauses(monkeypatch: Patch) -> list[float]:
    """The pauses between attempts, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def fails(cache: Path, revision: str = COMMIT) -> StartError:
    with pytest.raises(StartError) as error:
        checkpoint.download(cache, "some/model", revision)
    assert "\n" not in str(error.value)
    return error.value


def test_only_files_that_vllm_reads_are_downloaded(server: Hub, tmp_path: Path) -> None:
    snapshot = checkpoint.download(tmp_path, "some/model", "")
    assert snapshot.name == COMMIT
    assert sorted(path.name for path in snapshot.iterdir()) == READ
    for path in READ:
        assert (snapshot / path).read_bytes() == FILES[path]
        assert (snapshot / path).is_symlink()
    server.requests.clear()
    assert checkpoint.download(tmp_path, "some/model", COMMIT) == snapshot
    assert server.requests == []


def test_a_file_with_a_wrong_hash_is_removed(server: Hub, tmp_path: Path) -> None:
    server.body = lambda path, data: data[::-1] if path == SHARDS[0] else data
    error = fails(tmp_path)
    assert error.code == EX_DATAERR
    assert SHARDS[0] in str(error)
    server.body = lambda path, data: data
    snapshot = checkpoint.download(tmp_path, "some/model", COMMIT)
    assert (snapshot / SHARDS[0]).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("change", "revision", "code", "hint"),
    [
        (lambda one: None, "v9", EX_CONFIG, "SPARKFORGE_MODEL"),
        (lambda one: setattr(one, "model", "another/model"), COMMIT, EX_CONFIG, "check its name"),
        (lambda one: setattr(one, "token", "hf_right"), COMMIT, EX_CONFIG, "HF_TOKEN"),
        (lambda one: one.files.pop("config.json"), COMMIT, EX_DATAERR, "config.json"),
        (lambda one: one.close(), COMMIT, EX_NOHOST, "HF_ENDPOINT"),
        (
            lambda one: one.statuses.update({f"/api/models/some/model/tree/{COMMIT}": [503] * 9}),
            COMMIT,
            EX_NOHOST,
            "the next start continues",
        ),
    ],
)
def test_a_failure_names_its_remedy(
    server: Hub,
    tmp_path: Path,
    pauses: list[float],
    change: Callable[[Hub], object],
    revision: str,
    code: int,
    hint: str,
) -> None:
    change(server)
    with pytest.raises(StartError, match="SPARKFORGE_MODEL"):
        checkpoint.download(tmp_path, "some//model", COMMIT)
    error = fails(tmp_path, revision)
    assert error.code == code
    assert hint in str(error)
    server.close = lambda: None  # type: ignore[method-assign]


def test_a_full_disk_is_an_error_before_the_download(
    server: Hub, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert fails(tmp_path).code == EX_CANTCREAT
    assert not [one for one in server.requests if one.method == "GET" and "resolve" in one.path]


def test_a_complete_snapshot_serves_without_the_hub(
    server: Hub, tmp_path: Path, monkeypatch: Patch, pauses: list[float]
) -> None:
    snapshot = checkpoint.download(tmp_path, "some/model", "main")
    server.close()
    assert checkpoint.download(tmp_path, "some/model", "main") == snapshot
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint.download(tmp_path, "some/model", "main") == snapshot
    (snapshot / "config.json").unlink()
    assert fails(tmp_path).code == EX_CONFIG
    server.close = lambda: None  # type: ignore[method-assign]
