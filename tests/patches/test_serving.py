"""The image's entrypoint with vLLM itself: it reads the backend, and restarts a frozen engine.

No patch is tested here; it stands here for the interpreters that are baked for this folder. What a
server of test_chat.py shows is there: its end by SIGTERM, and the words for another kernel. That
these words end the start: tests/integration/test_starts.py.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import requests

from sparkforge.core.run import group_alive
from sparkforge.serving.options import EX_CONFIG, EX_TEMPFAIL
from tests.hub import COMMIT, Hub
from tests.patches.forks import known
from tests.patches.served import HANG_S, READY_S, serving
from tests.reference import make_tiny
from tests.support import PATIENCE_S, wait_for

UNHEALTHY_S = 600  # the image's interval, time-out and retries give 45 on a quiet machine


def ready(port: int) -> tuple[int, str]:
    """Return status and message of the answer to load balancers."""
    reply = requests.get(f"http://127.0.0.1:{port}/health?ready", timeout=PATIENCE_S)
    return reply.status_code, reply.json()["error"]["message"] if reply.text else ""


def test_a_frozen_engine_turns_unhealthy_and_is_ended(patched_python: Path, tmp_path: Path) -> None:
    guarded = {"SPARKFORGE_CHECKS": f"guard=warn,hang={HANG_S}"}
    fast = {"SPARKFORGE_PROFILE": "fast"}  # a choice of users, up to the kernels that vLLM takes
    with serving(patched_python, tmp_path, {**known(patched_python), **guarded, **fast}) as one:
        # loading takes longer than three looks at a server that hangs would
        one.wait_for("ready after", READY_S)
        assert "entrypoint: profile fast" in one.output()
        assert "backends: moe BF16_DEQUANT, linear CPU" in one.output()
        assert one.complete(3).json()["usage"]["completion_tokens"] == 3
        assert one.complete(3, key="another").status_code == 401
        assert one.health().returncode == 0
        assert "the-key" not in one.output()

        # what the guard sets where memory is short: users are refused, and not our own looks
        one.set_state("drain")
        refused = one.complete(3)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "30")
        assert "memory is short" in refused.json()["error"]["message"]
        assert ready(one.port)[0] == 404
        assert one.health().returncode == 0
        one.set_state("ready")
        assert one.complete(3).status_code == 200
        assert ready(one.port) == (200, "")

        engine = int(re.findall(r"EngineCore pid=(\d+)", one.output())[0])
        os.kill(engine, signal.SIGSTOP)
        frozen = time.monotonic()
        # vLLM's own health goes on answering: that is why ours asks for progress
        assert (
            requests.get(f"http://127.0.0.1:{one.port}/health", timeout=PATIENCE_S).status_code
            == 200
        )
        wait_for(lambda: ready(one.port)[0] == 404)  # what load balancers see
        failures = 0
        while failures < 3:  # as the image's HEALTHCHECK: three in a row, 5 s between them
            time.sleep(5)
            said = one.health()
            failures = failures + 1 if said.returncode else 0
            assert time.monotonic() - frozen < UNHEALTHY_S
        assert "unhealthy: " in said.stderr
        assert one.process.wait(UNHEALTHY_S) == EX_TEMPFAIL
        assert f"{engine} VLLM::EngineCor: state T" in one.output()
        assert not group_alive(one.group())


def test_vllm_asks_the_hub_nothing_and_ends_with_its_engine(
    patched_python: Path, tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "model").path
    hub = Hub({path.name: path.read_bytes() for path in model.iterdir()}).start()
    from_hub = {
        "SPARKFORGE_MODEL": f"{hub.model}@{COMMIT}",
        "NO_PROXY": "*",
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
    }
    with serving(
        patched_python, tmp_path, {**known(patched_python), **from_hub}, model=model
    ) as one:
        one.wait_for("some/model is complete in", READY_S)
        asked = len(hub.requests)
        one.wait_for("ready after", READY_S)
        assert one.complete(3).json()["usage"]["completion_tokens"] == 3
        assert asked == len(hub.requests)  # all by the entrypoint
        hub.close()
        os.kill(int(re.findall(r"EngineCore pid=(\d+)", one.output())[0]), signal.SIGKILL)
        assert one.process.wait(UNHEALTHY_S) == EX_TEMPFAIL  # vLLM itself ends with 0 then
        assert not group_alive(one.group())


def test_a_wrong_vocabulary_is_told_before_the_model_loads(
    patched_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "encodings"
    folder.mkdir()
    (folder / "o200k_base.tiktoken").write_text("QQ== 0\n")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
    with serving(patched_python, tmp_path) as one:
        assert one.process.wait(UNHEALTHY_S) == EX_CONFIG
        assert "error: the Harmony vocabulary cannot be loaded" in one.output()
        assert "Traceback" not in one.output()
