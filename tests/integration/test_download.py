"""The image's entrypoint with a model of the hub: downloads, restarts, stops, second starts.

The hub is a stand-in on loopback (tests/hub.py), and so is vLLM; the rest is real.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkforge.serving.errors import EX_CONFIG
from tests.haproxy import needs_haproxy
from tests.hub import COMMIT, Hub
from tests.integration import test_warmup
from tests.support import PATIENCE_S, wait_for

pytestmark = needs_haproxy

SIZE = 8 << 20
FILES = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(SIZE),
    "original/model.safetensors": b"x",
}


class Started(test_warmup.Started):
    """The entrypoint of one container."""

    def __init__(
        self, folder: Path, sockets: Path, home: Path, hub: Hub, number: int, **variables: str
    ) -> None:
        self.home = home
        for own in (folder := folder / f"container-{number}", sockets := sockets / str(number)):
            own.mkdir()
        (folder / "evict.json").write_text('{"evict_page_cache": true}')
        given = {
            "NO_PROXY": "*",
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "SPARKFORGE_MODEL": f"some/model@{COMMIT}",
            "SPARKFORGE_PROFILE": str(folder / "evict.json"),
        }
        super().__init__(folder, sockets, {**given, **variables})

    def says(self, words: str) -> str:
        """Wait until it has said something; returns all that it said."""
        wait_for(lambda: words in self.text() or self.process.poll() is not None)
        assert words in self.text(), self.text()
        return self.text()

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def downloads(self) -> list[int]:
        """Return the processes that download, whoever is their parent."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:
                continue
            if str(self.home).encode() in words and b"checkpoint.py" in words:
                found.append(int(path.parent.name))
        return found


Start = Callable[..., Started]


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(dict(FILES), piece=1 << 18).start()
    yield found
    found.close()


@pytest.fixture
def start(tmp_path: Path, sockets: Path, hub: Hub) -> Iterator[Start]:
    started: list[Started] = []
    # on a real disk: files of a tmpfs are never dropped from the page cache
    home = tempfile.TemporaryDirectory(dir=Path(__file__).parent)

    def begin(**variables: str) -> Started:
        started.append(Started(tmp_path, sockets, Path(home.name), hub, len(started), **variables))
        return started[-1]

    yield begin
    hub.held.set()
    for one in started:
        one.kill()
    home.cleanup()


def resident(file: Path) -> int:
    """Return the bytes of a file in the page cache."""
    words = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(file.resolve())]
    return int(subprocess.run(words, capture_output=True, check=True).stdout)


def half(hub: Hub, start: Start, **variables: str) -> Started:
    """Return a container in the middle of its download, which goes on when the hub does."""
    hub.held.clear()
    one = start(**variables)
    path = f"/some/model/resolve/{COMMIT}/model.safetensors"
    wait_for(
        lambda: (
            any(asked.method == "GET" for asked in hub.asked_for(path))
            or one.process.poll() is not None
        )
    )
    assert one.process.poll() is None, one.text()
    return one


def test_the_first_start_downloads_then_evicts_then_starts_and_the_next_asks_nobody(
    hub: Hub, start: Start
) -> None:
    one = half(hub, start)
    wait_for(lambda: "downloading" in one.health())
    assert one.health().startswith("starting: ")
    hub.held.set()
    said = one.says("first token")
    snapshot = one.home / f"hub/models--some--model/snapshots/{COMMIT}"
    assert f"vllm serve {snapshot} --uds" in said
    assert "--served-model-name=some/model" in said
    assert "--revision" not in said
    assert said.index("GB dropped") < said.index("vllm serve /")
    wait_for(lambda: one.text().count("GB dropped") == 2)  # a list of its own at ready
    # S1: a first start left the whole download in the page cache
    assert resident(snapshot / "model.safetensors") == 0
    assert not (snapshot / "original").exists()
    wait_for(lambda: one.health() == "well")
    one.process.terminate()
    one.ends()
    asked = len(hub.requests)
    two = start()
    two.says("first token")
    assert len(hub.requests) == asked
    three = start(SPARKFORGE_MODEL="some/model", HF_HUB_OFFLINE="1")
    assert three.ends() == EX_CONFIG  # nobody has looked up the newest yet
    assert "HF_HUB_OFFLINE is set" in three.text()


def test_a_stopped_download_leaves_no_process_and_the_next_continues_it(
    hub: Hub, start: Start
) -> None:
    one = half(hub, start)
    assert len(one.downloads()) == 1
    one.process.terminate()
    assert one.ends() == 128 + signal.SIGTERM
    wait_for(lambda: not one.downloads())
    hub.held.set()
    start().says("first token")


def test_a_snapshot_of_another_program_serves_without_a_network(hub: Hub, start: Start) -> None:
    first = start()
    first.says("first token")
    model = first.home / "hub/models--some--model"
    for ours in ("sparkforge", "trees"):
        shutil.rmtree(model / ours)
    start(HF_HUB_OFFLINE="1").says("first token")
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(COMMIT)
    hub.close()
    start(SPARKFORGE_MODEL="some/model", HF_HUB_OFFLINE="1").says("first token")
