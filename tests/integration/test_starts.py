"""What Docker would repeat for ever: the entrypoint tries a few times, then waits and says why.

The test is Docker here: it starts the entrypoint anew when it ends. With a container:
tests/e2e/test_compose.py.
"""

import signal
import socket
from pathlib import Path

import pytest

from sparkforge.serving.options import EX_CONFIG, EX_TEMPFAIL, EX_UNAVAILABLE
from tests.haproxy import needs_haproxy
from tests.integration.test_warmup import Start, Started, start
from tests.support import PATIENCE_S, wait_for

pytestmark = needs_haproxy

__all__ = ["start"]  # the fixture

WAITS = "entrypoint: waiting without a server: "
TRIES = {"SPARKFORGE_RESTART": "unless-stopped", "FAKE_ENGINE_DIES": "SIGILL"}


def waiting(one: Started) -> str:
    """Wait until it waits; returns what it said."""
    one.wait_until(WAITS)
    return one.text()


def stopped(one: Started) -> int:
    """End it as Docker does; returns its exit code."""
    one.process.send_signal(signal.SIGTERM)
    return one.process.wait(PATIENCE_S)


def counts(folder: Path) -> list[Path]:
    return list(folder.glob("jit/starts-*"))


def test_an_engine_that_always_dies_of_its_first_token_is_tried_three_times(
    start: Start, tmp_path: Path
) -> None:
    for number in (1, 2):
        one = start(**TRIES)
        assert one.process.wait(PATIENCE_S) == EX_TEMPFAIL
        assert (f"start {number} of 3: the last one never became ready" in one.text()) == (
            number == 2
        )
    third = start(**TRIES)
    said = waiting(third)
    assert "start 3 of 3: the last one never became ready" in said
    assert f"{WAITS}3 starts in a row never became ready (the last exit code: 75)" in said
    assert third.health().startswith("unhealthy: waiting without a server: 3 starts in a row")
    assert third.health().count("\n") == 1
    assert stopped(third) == EX_TEMPFAIL
    # whoever starts it again wants it tried again; what is well is counted no more
    well = start(SPARKFORGE_RESTART="unless-stopped")
    well.ready()
    assert "the last one never became ready" not in well.text()
    assert not counts(tmp_path)
    well.stop()


def test_a_start_that_somebody_ends_is_no_failure(start: Start, tmp_path: Path) -> None:
    one = start(SPARKFORGE_RESTART="unless-stopped", FAKE_HANGS="prompt")
    wait_for(lambda: "engine " in one.text())
    assert len(counts(tmp_path)) == 1
    assert stopped(one) == 0
    assert not counts(tmp_path)


def test_a_port_that_is_taken_ends_the_start_before_the_server(
    start: Start, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        one = start(SPARKFORGE_LISTEN=f"127.0.0.1:{port}", SPARKFORGE_RESTART="unless-stopped")
        assert one.process.wait(PATIENCE_S) == EX_UNAVAILABLE
    assert f"is the port of 127.0.0.1:{port} taken?" in one.text()
    assert "Address already in use" in one.text()
    assert "vllm" not in one.text()
    assert not counts(tmp_path)


@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        ("unless-stopped", True),
        ("on-failure:5", False),
    ],
)
def test_what_no_restart_changes_is_tried_once(start: Start, policy: str, waits: bool) -> None:
    one = start(SPARKFORGE_RESTART=policy, SPARKFORGE_LISTEN="x")
    if waits:
        assert f"{WAITS}a restart changes nothing (exit code 78)" in waiting(one)
        assert "SPARKFORGE_LISTEN" in one.health()
        assert stopped(one) == EX_CONFIG
    else:
        assert one.process.wait(PATIENCE_S) == EX_CONFIG
        assert WAITS not in one.text()
