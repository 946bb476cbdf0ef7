"""The image's entrypoint with vLLM itself: it checks the backend, and restarts a frozen engine.

No patch is tested here; it stands here for the interpreters that are baked for this folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from sparkforge import pins
from sparkforge.environment import server_env
from sparkforge.run import group_alive
from sparkforge.servers import free_port
from sparkforge.serving import caches
from sparkforge.serving.supervise import EX_CONFIG, EX_TEMPFAIL
from sparkforge.tiny import make_tiny_gpt_oss
from tests.patches.checkout import CHECKOUT
from tests.support import ROOT

READY_S = 240
HANG_S = 20
UNHEALTHY_S = 60  # what the issue allows; the image's interval, time-out and retries give 45


class Served:
    """The entrypoint with the cpu target's profile, as the image runs it."""

    def __init__(
        self, python: Path, folder: Path, profile: dict[str, Any], variables: dict[str, str]
    ) -> None:
        self.folder = folder
        self.port = free_port(0)
        (folder / "profile.json").write_text(json.dumps(profile))
        (folder / "key").write_text("the-key\n")
        make_tiny_gpt_oss(folder / "model")
        self.env = {
            **os.environ, **server_env(folder / "cache"),
            "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder), "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "SPARKFORGE_JIT_DIR": str(folder / "jit"), "SPARKFORGE_RELEASE": "of-a-test",
            "SPARKFORGE_LISTEN_PORT": str(self.port), "SPARKFORGE_MODEL": str(folder / "model"),
            "SPARKFORGE_MODEL_NAME": "tiny", "SPARKFORGE_PROFILE": str(folder / "profile.json"),
            "SPARKFORGE_API_KEY_PATH": str(folder / "key"),
            "SPARKFORGE_HANG_SECONDS": str(HANG_S), **variables,
        }  # fmt: skip
        for name in caches.VARIABLES:  # a user's own value would come before the keyed folder
            self.env.pop(name, None)
        self.python = python
        command: list[str | Path] = [
            python, ROOT / "scripts/entrypoint.py", "--host", "127.0.0.1",
                   "--max-num-seqs", "4"]  # fmt: skip
        with (folder / "output").open("wb") as sink:
            self.process = subprocess.Popen(
                command, env=self.env, stdout=sink, stderr=subprocess.STDOUT, cwd=folder
            )

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while text not in self.output():
            assert time.monotonic() < end, self.output()[-3000:]
            assert self.process.poll() is None, self.output()[-3000:]
            time.sleep(0.2)

    def group(self) -> int:
        """Return the process group of the server."""
        return int(re.findall(r"APIServer pid=(\d+)", self.output())[0])

    def health(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, ROOT / "scripts/healthcheck.py"], env=self.env, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    def complete(self, tokens: int, key: str = "the-key", **options: Any) -> requests.Response:
        body = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
        return requests.post(
            f"http://127.0.0.1:{self.port}/v1/completions", json={**body, **options},
            headers={"Authorization": f"Bearer {key}"}, timeout=120,
        )  # fmt: skip


@contextmanager
def serving(
    python: Path, folder: Path, variables: dict[str, str] | None = None, **changes: Any
) -> Iterator[Served]:
    loaded = pins.load(CHECKOUT / "pins.yaml")
    profile = {**loaded.profile_of(loaded.target("cpu")), "warm_up": "off", **changes}
    one = Served(python, folder, profile, variables or {})
    try:
        yield one
    finally:
        if "APIServer pid=" in one.output():
            try:
                os.killpg(one.group(), signal.SIGKILL)
            except ProcessLookupError:
                pass
        one.process.kill()
        one.process.wait()


def test_a_frozen_engine_turns_unhealthy_and_is_ended(patched_python: Path, tmp_path: Path) -> None:
    with serving(patched_python, tmp_path) as one:
        # loading takes longer than three looks at a server that hangs would
        one.wait_for("first token", READY_S)
        assert "backends: moe BF16_DEQUANT" in one.output()
        assert one.complete(3).json()["usage"]["completion_tokens"] == 3
        assert one.complete(3, key="another").status_code == 401
        assert one.health().returncode == 0
        assert "the-key" not in one.output()

        engine = int(re.findall(r"EngineCore pid=(\d+)", one.output())[0])
        os.kill(engine, signal.SIGSTOP)
        frozen = time.monotonic()
        # vLLM's own health goes on answering: that is why ours asks for progress
        assert requests.get(f"http://127.0.0.1:{one.port}/health", timeout=5).status_code == 200
        failures = 0
        while failures < 3:  # as the image's HEALTHCHECK: three in a row, 5 s between them
            time.sleep(5)
            said = one.health()
            failures = failures + 1 if said.returncode else 0
            assert time.monotonic() - frozen < UNHEALTHY_S
        assert "unhealthy: " in said.stderr
        assert one.process.wait(60) == EX_TEMPFAIL
        assert time.monotonic() - frozen < HANG_S + 30
        assert f"{engine} VLLM::EngineCor: state T" in one.output()
        assert not group_alive(one.group())


def test_a_killed_engine_ends_the_server(patched_python: Path, tmp_path: Path) -> None:
    with serving(patched_python, tmp_path) as one:
        one.wait_for("first token", READY_S)
        os.kill(int(re.findall(r"EngineCore pid=(\d+)", one.output())[0]), signal.SIGKILL)
        assert one.process.wait(HANG_S + 60) == EX_TEMPFAIL  # vLLM itself ends with 0 then
        assert not group_alive(one.group())


def test_another_backend_ends_the_start(patched_python: Path, tmp_path: Path) -> None:
    with serving(patched_python, tmp_path, expect={"moe": "MARLIN"}) as one:
        assert one.process.wait(READY_S) == EX_CONFIG
        text = "error: vLLM chose the moe backend BF16_DEQUANT; the profile says MARLIN"
        assert text in one.output()
        assert "first token" not in one.output()
        assert not group_alive(one.group())


def test_users_do_not_wait_for_a_compiler(patched_python: Path, tmp_path: Path) -> None:
    # vLLM's CPU sampler is compiled by torch, also where the model is not
    variables = {"TORCH_COMPILE_DISABLE": "0", "SPARKFORGE_MXFP4_LAYERS": "qkv,lm_head=mxfp8"}
    with serving(patched_python, tmp_path, variables, warm_up="full") as one:
        one.wait_for("warm-up: all of it: no complete warm-up is on record", READY_S)
        assert "backends: moe BF16_DEQUANT, linear TORCH" in one.output()
        said = one.health()
        assert said.returncode == 1
        assert said.stderr.startswith("starting: ")
        one.wait_for("ready after", READY_S)
        assert one.health().returncode == 0
        (record,) = tmp_path.glob("jit/of_a_test-*/warm-up-*.json")
        run = json.loads(record.read_text())["runs"][0]
        assert run["outcome"] == "well"
        compiled = {made["name"]: made["kernels"] for made in run["steps"] if "kernels" in made}
        assert compiled["logprobs"][0].startswith("torch.compile cpp_fused")

        folder = record.parent
        before = {path for path in folder.rglob("*") if path.suffix in (".so", ".cpp", ".py")}
        assert before
        cases: list[dict[str, Any]] = [
            {"logprobs": 5}, {"temperature": 1, "top_k": 3}, {"prompt_logprobs": 1},
        ]  # fmt: skip
        for options in cases:
            assert one.complete(3, **options).json()["usage"]["completion_tokens"] == 3
        after = {path for path in folder.rglob("*") if path.suffix in (".so", ".cpp", ".py")}
        assert after == before
        one.process.terminate()
        assert one.process.wait(30) == 0
        assert "waited for a compiler" not in one.output()


def test_another_kernel_for_quantised_layers_ends_the_start(
    patched_python: Path, tmp_path: Path
) -> None:
    variables = {"SPARKFORGE_MXFP4_LAYERS": "o"}
    with serving(patched_python, tmp_path, variables, expect={"linear": "MARLIN"}) as one:
        assert one.process.wait(READY_S) == EX_CONFIG
        text = "error: vLLM chose the linear backend TORCH; the profile says MARLIN"
        assert text in one.output()
        assert "first token" not in one.output()


def test_sigterm_stops_it_cleanly(patched_python: Path, tmp_path: Path) -> None:
    with serving(patched_python, tmp_path) as one:
        one.wait_for("first token", READY_S)
        one.process.terminate()
        assert one.process.wait(30) == 0
        assert not group_alive(one.group())


@pytest.mark.parametrize("encodings", ["missing", "wrong"])
def test_a_wrong_vocabulary_is_told_before_the_model_loads(
    patched_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encodings: str
) -> None:
    folder = tmp_path / "encodings"
    folder.mkdir()
    if encodings == "wrong":
        (folder / "o200k_base.tiktoken").write_text("QQ== 0\n")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
    with serving(patched_python, tmp_path) as one:
        assert one.process.wait(60) == EX_CONFIG
        assert "error: the Harmony vocabulary cannot be loaded" in one.output()
        assert "Traceback" not in one.output()
