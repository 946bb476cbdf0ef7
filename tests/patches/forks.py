"""Processes for probes, forked from one of the same interpreter that has imported the most.

An import of vLLM takes 13 s of CPU, 9 of them for packages of others (measured on 2 cores). Those
are in the process that forks; vLLM itself is not, since probes prepare for its import, each
in its way. probes/forkserver.py has the other half.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sparkforge.runtime import isa
from sparkforge.runtime.environment import VLLM_CACHE, server_env
from tests.patches import stock
from tests.patches.checkout import ROOT, store

SERVER = Path(__file__).with_name("probes") / "forkserver.py"
# Packages beside vLLM's own take most of the time that its import takes.
HEAVY = (
    "torch._inductor.lowering",
    "transformers.models.auto.image_processing_auto",
    "openai.types",
    "cv2",
    "aiohttp",
    "fastapi",
)


@dataclass(frozen=True)
class Forks:
    """A process that forks others; they have its environment."""

    _server: subprocess.Popen[bytes]
    _log: IO[bytes]

    def run(self, words: Sequence[str | Path], folder: Path, timeout: float) -> tuple[int, str]:
        """Run a module by its name, the first word, in a folder.

        Returns:
            The exit code (of a signal: its number, negative), and all that was printed.
        """
        with tempfile.NamedTemporaryFile(mode="r", errors="replace") as log:
            request = {
                "words": [str(word) for word in words],
                "folder": str(folder),
                "log": log.name,
            }
            assert self._server.stdin is not None
            try:
                self._server.stdin.write(f"{json.dumps(request)}\n".encode())
                self._server.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended: reading its answer fails, with its own words
            child = self._answer()
            if not self._ready(timeout):
                os.killpg(child, signal.SIGKILL)
                self._answer()
                msg = f"no end within {timeout} s\n{log.read()[-4000:]}"
                raise AssertionError(msg)
            return self._answer(), log.read()

    def _ready(self, timeout: float) -> bool:
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], timeout)
        return bool(ready)

    def _answer(self) -> int:
        """Return the next number of the server's; fail with its own words if it has ended."""
        # byte by byte: what Python buffers, select does not see
        assert self._server.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            more = os.read(self._server.stdout.fileno(), 1)
            if not more:
                self._log.seek(0)
                raise AssertionError(self._log.read().decode(errors="replace")[-4000:])
            line += more
        return int(line)


def known(python: Path) -> dict[str, str]:
    """Return the cache of vLLM that all servers of an environment share, for what compiles nothing.

    vLLM looks at a model's class in a process of its own (10 s of CPU), and keeps what it learnt:
    ``VLLM_CACHE``. What a build's smoke test learns need not be learnt here again.
    """
    if stock.VARIABLE in os.environ:
        return {}  # its environments are gone after the tests
    environment = python.parents[2]  # FOLDER/venv/bin/python
    return {VLLM_CACHE: server_env(store().cache_path("serve"), environment.name)[VLLM_CACHE]}


def of(python: Path) -> Forks:
    """Return what forks the probes of an interpreter: one thread, no hub, and no AMX.

    With AMX vLLM keeps a packed copy of each small layer that is not quantised, as a tensor that
    the test of stray copies could not tell from one of ours.
    """
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{isa.NO_AMX['PYTHONPATH']}"}
    fixed = {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", **known(python)}
    env = {**os.environ, **fixed, **isa.NO_AMX, **paths}
    env.pop("PYTEST_CURRENT_TEST", None)  # another one for each test
    return _of(python, tuple(sorted(env.items())))


@contextmanager
def forking(python: Path, env: Mapping[str, str], preload: Sequence[str]) -> Iterator[Forks]:
    """Run a process that has imported the modules ``preload``, to fork it."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [python, SERVER, *preload],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as server,
    ):
        yield Forks(server, log)


@functools.cache
def _until_exit() -> ExitStack:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack


@functools.cache
def _of(python: Path, env: tuple[tuple[str, str], ...]) -> Forks:
    return _until_exit().enter_context(forking(python, dict(env), HEAVY))
