"""The image's entrypoint after a power cut: compiled kernels and a model on a disk of their own.

The disk is ext4 and ends as in a power cut (tests/disks.py). The machine's boot is a file that is
mounted over the kernel's. vLLM and the hub are stand-ins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import caches
from sparkforge.serving.hubfiles import Place
from tests.disks import can_mount, cut_power, mounted, new_disk, renew
from tests.haproxy import needs_haproxy
from tests.hub import COMMIT, Hub
from tests.integration import test_download, test_warmup
from tests.support import wait_for

pytestmark = needs_haproxy

WORDS = "prompt_logprobs top_k min_p seed"
OPTIONS = ("-o", "loop,commit=300")  # no journal of its own accord: a test says when
WEIGHTS = test_download.FILES["model.safetensors"]
IN_A_BOOT = f'mount --bind "$0" {caches.BOOT} && exec "$@"'


class Disk:
    """A mounted disk."""

    def __init__(self, file: Path, place: Path) -> None:
        self.file, self.place = file, place
        self._mount = ExitStack()
        self._mount.enter_context(mounted(place, *OPTIONS, str(file)))

    def journal(self) -> None:
        """Write all names to the disk, as ext4 does every few seconds; contents come later."""
        with (self.place / "another").open("w") as file:
            file.write("x")
            file.flush()
            os.fsync(file.fileno())

    def cut(self, user: Any) -> None:
        """Cut its power, and mount it again without the processes of a user."""
        cut_power(self.place)
        user.kill()
        self.close()
        renew(self.file)
        self._mount.enter_context(mounted(self.place, *OPTIONS, str(self.file)))

    def close(self) -> None:
        self._mount.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if not can_mount(tmp_path):
        pytest.skip("mounting needs root and loop devices")
    with new_disk(tmp_path / "disk.ext4", 64) as file:
        one = Disk(file, tmp_path / "disk")
        try:
            yield one
        finally:
            one.close()


Start = Callable[[], test_warmup.Started]


@pytest.fixture
def start(tmp_path: Path, sockets: Path, disk: Disk) -> Iterator[Start]:
    """Start the entrypoint in another boot each time."""
    started: list[test_warmup.Started] = []

    def begin() -> test_warmup.Started:
        boot = tmp_path / "boot"
        boot.write_text(f"{len(started)}\n")
        variables = {"SPARKFORGE_JIT_DIR": str(disk.place / "jit"), "FAKE_COMPILES": WORDS}
        before = ("unshare", "--mount", "sh", "-c", IN_A_BOOT, boot)
        started.append(test_warmup.Started(tmp_path, sockets, variables, before))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def kernels(disk: Disk) -> dict[str, str]:
    paths = disk.place.glob("jit/*/triton/*/*.cubin")
    return {path.stem.removesuffix("_kernel"): path.read_text() for path in paths}


ALL = {word: f"the kernel of {word}\n" for word in WORDS.split()}


@pytest.mark.parametrize("made", ["triton/*/top_k*", "warm-up-*.json"])
def test_a_power_cut_in_a_warm_up_leaves_no_kernel_that_is_cut_short(
    start: Start, disk: Disk, made: str
) -> None:
    one = start()
    wait_for(lambda: any(disk.place.glob(f"jit/*/{made}")), every_s=0.002)
    disk.journal()
    disk.cut(one)
    start().ready()
    assert kernels(disk) == ALL


def test_what_a_record_names_is_on_the_disk(start: Start, disk: Disk) -> None:
    one = start()
    one.ready()
    disk.journal()
    disk.cut(one)
    assert kernels(disk) == ALL
    said = start().ready()
    assert "in full" not in said
    assert "anew" not in said


@pytest.mark.parametrize("moment", ["in a file", "after all"])
def test_a_power_cut_in_a_download_leaves_no_file_that_is_cut_short(
    disk: Disk, tmp_path: Path, sockets: Path, moment: str
) -> None:
    hub = Hub(dict(test_download.FILES), piece=1 << 18, pause_s=0.02).start()
    place = Place.of(disk.place / "hub", "some/model")
    try:
        one = test_download.Started(tmp_path, sockets, disk.place, hub, 1)
        try:
            if moment == "in a file":
                parts = "blobs/*.incomplete"
                wait_for(
                    lambda: any(at.stat().st_size > 1 << 20 for at in place.folder.glob(parts))
                )
            else:
                one.says("some/model is complete")
            disk.journal()
        finally:
            disk.cut(one)
        assert place.complete(COMMIT) == (moment == "after all")
        again = test_download.Started(tmp_path, sockets, disk.place, hub, 2)
        try:
            again.says("vllm serve")
        finally:
            again.kill()
    finally:
        hub.close()
    for path in ("config.json", "model.safetensors"):
        assert (place.snapshot(COMMIT) / path).read_bytes() == test_download.FILES[path]
