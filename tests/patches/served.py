"""The image's entrypoint as a process, with vLLM itself behind it, for tests to ask."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from sparkforge.runtime.environment import server_env
from sparkforge.runtime.servers import free_port
from sparkforge.serving import devices
from tests.haproxy import needs_haproxy
from tests.patches.checkout import PINS
from tests.reference import make_tiny
from tests.support import ROOT

READY_S = 900  # some 40 on a quiet machine
HANG_S = 20
# nothing listens on the discard port: whoever asks another machine fails
DEAD = "http://127.0.0.1:9"
NO_NETWORK = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), DEAD),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), DEAD),
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "HF_HUB_OFFLINE": "0",
}


class Served:
    """The entrypoint with the cpu target's profile, as the image runs it."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        sockets: Path,
        profile: dict[str, Any],
        variables: dict[str, str],
        model: Path | None,
    ) -> None:
        self.folder = folder
        self.compiled: set[Path] = set()
        self.port = free_port(0)
        (folder / "profile.json").write_text(json.dumps(profile))
        (folder / "key").write_text("the-key\n")  # for clients
        if model is None:
            model = make_tiny(folder / "model").path
        self.env = {
            **os.environ,
            **server_env(folder / "cache"),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(sockets),
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "SPARKFORGE_JIT_DIR": str(folder / "jit"),
            "SPARKFORGE_RELEASE": "of-a-test",
            "SPARKFORGE_LISTEN": f"127.0.0.1:{self.port}",
            "SPARKFORGE_MODEL": str(model),
            "SPARKFORGE_MODEL_NAME": "tiny",
            "SPARKFORGE_SHARE": str(folder),
            "VLLM_API_KEY": "the-key",
            "SPARKFORGE_CHECKS": f"hang={HANG_S}",
        }
        self.env.pop("SPARKFORGE_PROFILE", None)  # the default choice
        for name in devices.CACHES:  # a user's own value would come before the keyed folder
            self.env.pop(name, None)
        self.env |= variables
        self.python = python
        command: list[str | Path] = [
            python,
            *(ROOT / "scripts/entrypoint.py", "--max-num-seqs", "4"),
        ]
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

    def set_state(self, state: str) -> None:
        """Set the state of vLLM in the front door."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{self.env['TMPDIR']}/sparkforge/inner.admin")
            connection.sendall(f"set server vllm/engine state {state}\n".encode())
            connection.recv(1 << 12)

    def health(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, ROOT / "scripts/healthcheck.py"],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )

    def complete(self, tokens: int, key: str = "the-key", **options: Any) -> requests.Response:
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, **options}
        return self.post("/v1/completions", body, key)

    def post(
        self, path: str, body: dict[str, Any], key: str = "the-key", *, stream: bool = False
    ) -> requests.Response:
        """Send a request for the model; with ``stream`` the answer is not read yet."""
        return requests.post(
            f"http://127.0.0.1:{self.port}{path}",
            json={"model": "tiny", **body},
            stream=stream,
            headers={"Authorization": f"Bearer {key}"},
            timeout=120,
        )


@contextmanager
def serving(
    python: Path,
    folder: Path,
    variables: dict[str, str] | None = None,
    *,
    model: Path | None = None,
    **changes: Any,
) -> Iterator[Served]:
    """Run the entrypoint with the cpu target's profile, changed, and a checkpoint; the tiny one."""
    if needs_haproxy.args[0]:
        pytest.skip(needs_haproxy.kwargs["reason"])
    profile = {**PINS.profile_of(PINS.target("cpu")).document(), "warm_up": "off", **changes}
    # sockets have short paths only, shorter than a test's folder may be
    with tempfile.TemporaryDirectory(prefix="vllm-") as name:
        sockets = Path(name)
        given = {"VLLM_RPC_BASE_PATH": name, **(variables or {})}
        one = Served(python, folder, sockets, profile, given, model)
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
