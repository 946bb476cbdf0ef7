"""Start a build as an OpenAI server on loopback, and stop it; an image or an environment."""

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import requests

from sparkforge.core.errors import MachineError, ServerError
from sparkforge.core.log import log
from sparkforge.core.run import background, call, group_alive, stop
from sparkforge.runtime.engine import Engine

LOOPBACK = "127.0.0.1"
MODEL_NAME = "tiny-gpt-oss"
SITE_PACKAGES_LABEL = "org.sparkforge.site-packages"
_LOWEST = 10_000  # of the ports that are tried


@dataclass(frozen=True)
class Launch:
    """The model to serve, and its options."""

    model: Path
    options: Sequence[str]
    """The target's own arguments of ``vllm serve``; an image has them built in."""
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    """On loopback; 0: a free one."""
    gpus: bool = False
    """A container gets the machine's GPUs."""
    name: str = MODEL_NAME


def free_port(wanted: int) -> int:
    """Return ``wanted`` if it is free on loopback, or a free port for 0; MachineError if not.

    It is below those that the kernel gives to outgoing connections (from 32768).
    """
    for port in [wanted] if wanted else (_LOWEST + secrets.randbelow(20_000) for _ in range(100)):
        with suppress(OSError), socket.socket() as probe:
            # as servers do, so that a port in TIME_WAIT counts as free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            return port
    remedy = "choose another with --port N, or stop the program that uses it"
    raise MachineError(f"port {wanted} on {LOOPBACK} is in use", remedy)


def usual_port() -> int:
    """Return vLLM's own port, or a free one where that is taken."""
    try:
        return free_port(8000)
    except MachineError as error:
        log.warning(f"{error.what}: taking another")
        return free_port(0)


@dataclass(frozen=True)
class Server:
    """A started server, which may still be loading: a child of this process.

    Of a container it is ``docker run``, which passes signals on and ends with its exit code.
    """

    url: str
    child: subprocess.Popen[bytes]
    output_path: Path
    grace_s: float = 30.0

    def exited(self) -> int | None:
        """Return the exit code if it has ended, else None."""
        return self.child.poll()

    def output(self) -> str:
        """Return its complete output."""
        return self.output_path.read_text(errors="replace")

    def stop(self) -> tuple[int, float, bool]:
        """Stop it; returns its exit code, the seconds, and whether it left processes."""
        start = time.monotonic()
        self.child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(self.grace_s)
        took, late = time.monotonic() - start, self.child.poll() is None
        if late:
            stop(self.child, 0)
        return self.child.returncode, took, late or group_alive(self.child.pid)


@contextmanager
def from_command(
    command: Sequence[str], port: int, variables: Mapping[str, str], work: Path
) -> Iterator[Server]:
    """Run a server in ``work`` for the length of the block; its output goes to ``server.log``."""
    output = work / "server.log"
    with background(*command, output=output, env=variables, cwd=work) as child:
        yield Server(f"http://{LOOPBACK}:{port}", child, output)


def instead(options: Sequence[str]) -> dict[str, str]:
    """Return the variables with which an image uses options in place of its own and its profile."""
    return {"SPARKFORGE_SERVE_ARGS": shlex.join(options), "SPARKFORGE_PROFILE": ""}


@contextmanager
def from_image(
    engine: Engine, image: str, launch: Launch, work: Path, restored: Mapping[str, Path]
) -> Iterator[Server]:
    """Serve from an image for the length of the block, as Compose would: read-only, no rights.

    ``restored`` are files to mount over the image's own, by their path below site-packages.
    """
    port = free_port(launch.port)
    name = f"sparkforge-server-{os.getpid()}-{port}"
    packages = f"{engine.client.images.get(image).labels[SITE_PACKAGES_LABEL]}/"
    mounts = {launch.model: "/model", **{file: packages + at for at, file in restored.items()}}
    # callers wait for vLLM's /health, and expect no other requests
    variables = {
        "SPARKFORGE_CHECKS": "warm-up=off",
        "SPARKFORGE_BIND": LOOPBACK,
        **launch.variables,
        "SPARKFORGE_MODEL_NAME": launch.name,
        **(instead(launch.options) if restored else {}),  # the image's own need the patches
    }
    command = [
        *("docker", "run", "--rm", "--pull=never", f"--name={name}", "--read-only"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp", "--shm-size=1g"),
        f"--publish={LOOPBACK}:{port}:8000",
        *(["--gpus=all"] if launch.gpus else []),
        *(f"--env={one}={value}" for one, value in variables.items()),
        *(f"--mount=type=bind,src={f.resolve()},dst={at},readonly" for f, at in mounts.items()),
        *(image, "/model", *launch.arguments),
    ]
    try:
        with from_command(command, port, {}, work) as server:
            yield server
    finally:
        call("docker", "rm", "--force", "--volumes", name, check=False)


def wait_ready(
    server: Server, timeout_s: float, tell: Callable[[float], None] | None = None
) -> float:
    """Wait until ``/health`` answers 200; returns the seconds, or raises ServerError.

    ``tell`` is called repeatedly with the seconds so far; None shows them.
    """
    tell = tell or (lambda waited: log.progress(f"loading: {waited:.0f} s"))
    start = time.monotonic()
    while (waited := time.monotonic() - start) < timeout_s:
        if (code := server.exited()) is not None:
            msg = f"the server {ending(code)} before it was ready:\n{tail(server)}"
            raise ServerError(msg, "fix the cause in its first exception, or report it")
        with suppress(requests.RequestException):  # not listening yet
            if requests.get(f"{server.url}/health", timeout=2).status_code == requests.codes.ok:
                return waited
        tell(waited)
        time.sleep(0.25)
    msg = f"the server was not ready within {timeout_s:.0f} s:\n{tail(server)}"
    raise ServerError(msg, "allow more time with --ready-timeout SECONDS")


@contextmanager
def kept_log(server: Server, path: Path) -> Iterator[None]:
    """Store a server's output in a file if the block fails, and name it in its ServerError."""
    try:
        yield
    except ServerError as error:
        if path != server.output_path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(server.output())
        remedy = f"{error.remedy}; the server's log: {path}".removeprefix("; ")
        raise ServerError(error.what, remedy) from error


_LINES = 10
# vLLM prefixes each line with its process, and most with level, time and source
_LINE = re.compile(
    r"^(?:[\w.-]+ +\| )?"  # Compose's, before a container's lines
    r"(?:\(([^()\n]*?) pid=\d+\) ?)?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]\n]*\] ?)?(.*)$",
    re.MULTILINE,
)
_EXCEPTION = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception)(?::|$)"
    r"|.*died unexpectedly"  # vLLM's words for a worker that a signal ended
)


def tail(server: Server) -> str:
    """Return a server's first exception with its place, else its last lines, indented."""
    return explain(server.output())


def explain(text: str) -> str:
    """Return the first exception in vLLM's output, of an engine if there is one, else its end.

    When the engine fails, the API server fails after it, with a traceback that says nothing.
    """
    rows = [(process, line) for process, line in _LINE.findall(text) if line.strip(" ^")]
    shown = [line for _, line in rows[-_LINES:]]
    found = [(process, line) for process, line in rows if _EXCEPTION.match(line)]
    inner = [row for row in found if row[0] and not row[0].startswith("APIServer")]
    for process, line in (inner or found)[:1]:
        said = [text for name, text in rows if name == process]
        at = said.index(line)
        # pydantic's exceptions have their details on the next lines, indented
        more = [text for text in said[at + 1 : at + 3] if text.startswith("  ")]
        shown = [f"{process}: {line.strip()}".removeprefix(": "), *more, *said[max(0, at - 6) : at]]
    return "\n".join(f"    {line[:300].rstrip()}" for line in shown[:_LINES])


def ending(code: int) -> str:
    """Describe the end of a process; a container's code has 128 for the minus of a signal."""
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code if code < 0 else code - 128).name}"
    return f"exited with code {code}"
