"""The image's entrypoint with a model of the hub: downloads, restarts, stops, second starts.

The hub is a stand-in on loopback (tests/hub.py), and so is vLLM; the rest is real.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkforge.serving.options import EX_CONFIG
from tests.haproxy import needs_haproxy
from tests.hub import COMMIT, Hub
from tests.integration.test_warmup import Started
from tests.support import PATIENCE_S, wait_for

pytestmark = needs_haproxy

FILES = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(8 << 20),
    "original/model.safetensors": b"x",
}
Start = Callable[..., Started]


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(dict(FILES)).start()
    yield found
    found.close()


@pytest.fixture
def home() -> Iterator[Path]:
    # on a real disk: files of a tmpfs are never dropped from the page cache
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, sockets: Path, hub: Hub, home: Path) -> Iterator[Start]:
    started: list[Started] = []

    def begin(**variables: str) -> Started:
        folder = tmp_path / f"container-{len(started)}"
        own = sockets / str(len(started))
        for new in (folder, own):
            new.mkdir()
        (folder / "evict.json").write_text('{"evict_page_cache": true}')
        given = {
            "NO_PROXY": "*",
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "SPARKFORGE_MODEL": f"some/model@{COMMIT}",
            "SPARKFORGE_PROFILE": str(folder / "evict.json"),
        }
        started.append(Started(folder, own, {**given, **variables}))
        return started[-1]

    yield begin
    hub.held.set()
    for one in started:
        one.kill()


def resident(file: Path) -> int:
    """Return the bytes of a file in the page cache."""
    words = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(file.resolve())]
    return int(subprocess.run(words, capture_output=True, check=True).stdout)


def downloads(home: Path) -> bytes:
    """Return the processes that download, whoever is their parent."""
    words = ["pgrep", "-f", f"checkpoint.py {home}"]
    return subprocess.run(words, capture_output=True, check=False).stdout


def half(hub: Hub, start: Start) -> Started:
    """Return a container in the middle of its download, which goes on when the hub does."""
    hub.held.clear()
    one = start()
    path = f"/some/model/resolve/{COMMIT}/model.safetensors"
    wait_for(lambda: any(asked.method == "GET" for asked in hub.asked_for(path)))
    assert one.process.poll() is None, one.text()
    return one


def test_the_first_start_downloads_then_evicts_then_starts_and_the_next_asks_nobody(
    hub: Hub, start: Start, home: Path
) -> None:
    one = half(hub, start)
    wait_for(lambda: one.health().startswith("starting: downloading"))
    hub.held.set()
    one.wait_until("first token")
    snapshot = home / f"hub/models--some--model/snapshots/{COMMIT}"
    said = one.text()
    assert f"vllm serve {snapshot} --uds" in said
    assert "--served-model-name=some/model" in said
    assert said.index("GB dropped") < said.index("vllm serve /")
    wait_for(lambda: one.text().count("GB dropped") == 2)  # again at the first token
    assert resident(snapshot / "model.safetensors") == 0
    assert not (snapshot / "original").exists()
    wait_for(lambda: one.health() == "well")
    one.stop()
    asked = len(hub.requests)
    start().wait_until("first token")
    assert len(hub.requests) == asked
    three = start(SPARKFORGE_MODEL="some/model", HF_HUB_OFFLINE="1")
    assert three.process.wait(PATIENCE_S) == EX_CONFIG  # nobody has looked up the newest yet
    assert "HF_HUB_OFFLINE is set" in three.text()


def test_a_stopped_download_leaves_no_process_and_the_next_continues_it(
    hub: Hub, start: Start, home: Path
) -> None:
    one = half(hub, start)
    assert len(downloads(home).split()) == 1
    one.process.terminate()
    assert one.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    wait_for(lambda: not downloads(home))
    hub.held.set()
    start().wait_until("first token")


def test_a_snapshot_of_another_program_serves_without_a_network(
    hub: Hub, start: Start, home: Path
) -> None:
    start().wait_until("first token")
    model = home / "hub/models--some--model"
    for ours in ("sparkforge", "trees"):
        shutil.rmtree(model / ours)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(COMMIT)
    hub.close()
    for name in (f"some/model@{COMMIT}", "some/model"):
        start(SPARKFORGE_MODEL=name, HF_HUB_OFFLINE="1").wait_until("first token")
