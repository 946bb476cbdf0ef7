"""Start a build as an OpenAI server on loopback, and stop it cleanly.

A virtual environment and an image give the same ``Server``, so the same checks work for both.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import requests

from sparkforge.core.errors import MachineError, ServerError
from sparkforge.core.log import log
from sparkforge.core.run import background, group_alive, stop
from sparkforge.runtime import containers, serverlog
from sparkforge.runtime.engine import Engine, container_state

LOOPBACK = "127.0.0.1"
MODEL_NAME = "tiny-gpt-oss"
SITE_PACKAGES_LABEL = "org.sparkforge.site-packages"
_STOP_GRACE_S = 30.0
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000  # of the ports that are tried


@dataclass(frozen=True)
class Stopped:
    """The end of a server: exit code, duration, and whether processes are left."""

    exit_code: int
    seconds: float
    stragglers: bool


@dataclass(frozen=True)
class Launch:
    """The model to serve, and its options."""

    model: Path
    """Folder of the checkpoint on this machine."""
    options: Sequence[str]
    """The target's own arguments of ``vllm serve``; an image has them built in."""
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    """On loopback; 0: a free one."""
    gpus: bool = False
    """A container gets the machine's GPUs."""
    name: str = MODEL_NAME


class Server(Protocol):
    """A started server, which may still be loading."""

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""

    def exited(self) -> int | None:
        """Return the exit code if it has ended, else None."""

    def output(self) -> str:
        """Return its complete output."""

    def stop(self) -> Stopped:
        """Stop it; returns its end."""


def free_port(wanted: int) -> int:
    """Return ``wanted`` if it is free on loopback, or a free port for 0.

    A server needs seconds until it listens. So the free port is none that the kernel may give to
    an outgoing connection meanwhile, if the kernel leaves any.

    Raises:
        MachineError: the port is in use.
    """
    if wanted == 0:
        first = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
        for _ in range(100 if first > _LOWEST else 0):
            port = _LOWEST + secrets.randbelow(first - _LOWEST)
            with suppress(OSError):
                return _bound(port)
    try:
        return _bound(wanted)
    except OSError as error:
        msg = f"port {wanted} on {LOOPBACK} is in use: {error.strerror}"
        remedy = "choose another with --port N, or stop the program that uses it"
        raise MachineError(msg, remedy) from None


def _bound(port: int) -> int:
    """Bind a port on loopback, any for 0, and return it; OSError where it is in use."""
    with socket.socket() as probe:
        # as servers do, so that a port in TIME_WAIT counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, port))
        bound: int = probe.getsockname()[1]
    return bound


@dataclass(frozen=True)
class ProcessServer:
    """A server that is a child of this process; its output goes to a file."""

    url: str
    child: subprocess.Popen[bytes]
    output_path: Path
    grace_s: float = _STOP_GRACE_S

    def exited(self) -> int | None:
        return self.child.poll()

    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def stop(self) -> Stopped:
        start = time.monotonic()
        self.child.terminate()
        try:
            code = self.child.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            stop(self.child, 0)
            return Stopped(self.child.returncode, time.monotonic() - start, stragglers=True)
        took = time.monotonic() - start
        return Stopped(code, took, stragglers=group_alive(self.child.pid))


@contextmanager
def from_command(
    command: Sequence[str], port: int, variables: Mapping[str, str], work: Path, cwd: Path
) -> Iterator[ProcessServer]:
    """Run a server's command for the length of the block."""
    output = work / "server.log"
    with background(*command, output=output, env=variables, cwd=cwd) as child:
        yield ProcessServer(f"http://{LOOPBACK}:{port}", child, output)


@dataclass(frozen=True)
class _ImageServer:
    url: str
    container: Any

    def exited(self) -> int | None:
        state = container_state(self.container)
        return int(state["ExitCode"]) if state["Status"] in ("exited", "dead") else None

    def output(self) -> str:
        text: bytes = self.container.logs()
        return text.decode(errors="replace")

    def stop(self) -> Stopped:
        start = time.monotonic()
        self.container.stop(timeout=int(_STOP_GRACE_S))
        took = time.monotonic() - start
        # all processes of a container end with its first one
        return Stopped(int(container_state(self.container)["ExitCode"]), took, stragglers=False)


def instead(options: Sequence[str]) -> dict[str, str]:
    """Return the variables with which an image uses options in place of its own and its profile."""
    return {"SPARKFORGE_SERVE_ARGS": shlex.join(options), "SPARKFORGE_PROFILE": ""}


@contextmanager
def from_image(
    engine: Engine, image: str, launch: Launch, restored: Mapping[str, Path]
) -> Iterator[Server]:
    """Serve from an image for the length of the block, as Compose would: read-only, no rights.

    Args:
        restored: files of this machine mounted over the image's own, by their path below
            site-packages (the unpatched release, made of the patched image).
    """
    from docker.types import DeviceRequest  # not needed without an engine

    containers.sweep(engine)
    port = free_port(launch.port)
    packages = f"{engine.image_label(image, SITE_PACKAGES_LABEL)}/"
    volumes = {str(launch.model.resolve()): {"bind": "/model", "mode": "ro"}}
    for member, file in restored.items():
        volumes[str(file.resolve())] = {"bind": packages + member, "mode": "ro"}
    # callers wait for vLLM's /health, and expect no other requests
    variables = {
        "SPARKFORGE_CHECKS": "warm-up=off",
        "SPARKFORGE_BIND": LOOPBACK,
        **launch.variables,
        "SPARKFORGE_MODEL_NAME": MODEL_NAME,
    }
    if restored:  # the image's own options need the patches
        variables |= instead(launch.options)
    container = engine.client.containers.create(
        image,
        command=["/model", *launch.arguments],
        volumes=volumes,
        environment=variables,
        ports={"8000/tcp": (LOOPBACK, port)},
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        tmpfs={"/tmp": ""},
        shm_size="1g",
        device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if launch.gpus else [],
        labels={containers.LABEL: containers.mark()},
    )
    try:
        container.start()
        yield _ImageServer(f"http://{LOOPBACK}:{port}", container)
    finally:
        container.remove(force=True, v=True)


def wait_ready(
    server: Server, timeout_s: float, tell: Callable[[float], None] | None = None
) -> float:
    """Wait until ``/health`` answers 200; returns the seconds.

    Args:
        timeout_s: may be infinite.
        tell: called repeatedly with the seconds so far; None: shows them.

    Raises:
        ServerError: the server ended, or was not ready in time; its first exception is shown.
    """
    limit = f" (at most {timeout_s:.0f} s)" if timeout_s < float("inf") else ""
    tell = tell or (lambda waited: log.progress(f"loading{limit}", waited, None, "s"))
    start = time.monotonic()
    while (waited := time.monotonic() - start) < timeout_s:
        code = server.exited()
        if code is not None:
            msg = f"the server {serverlog.ending(code)} before it was ready:\n{tail(server)}"
            raise ServerError(msg, "fix the cause in its first exception, or report it")
        try:
            if requests.get(f"{server.url}/health", timeout=2).status_code == requests.codes.ok:
                return waited
        except requests.RequestException:
            pass  # not listening yet
        tell(waited)
        time.sleep(0.25)
    msg = f"the server was not ready within {timeout_s:.0f} s:\n{tail(server)}"
    raise ServerError(msg, "allow more time with --ready-timeout SECONDS")


def complete(
    server: Server, body: Mapping[str, Any], timeout_s: float, *, stream: bool = False
) -> requests.Response:
    """Send a request to ``/v1/completions``; returns the answer, whatever its status.

    Raises:
        ServerError: no answer in time; the server's first exception is shown.
    """
    url = f"{server.url}/v1/completions"
    try:
        return requests.post(url, json=body, timeout=timeout_s, stream=stream)
    except requests.RequestException as error:
        raise ServerError(f"POST /v1/completions: {error}\n{tail(server)}") from error


def tail(server: Server, lines: int = serverlog.LINES) -> str:
    """Return a server's first exception with its place, else its last lines, indented."""
    return serverlog.explain(server.output(), lines)


@contextmanager
def kept_log(server: Server, path: Path) -> Iterator[None]:
    """Store a server's output in a file if the block fails, and name the file in the error.

    Raises:
        ServerError: the block's own.
    """
    try:
        yield
    except ServerError as error:
        if not isinstance(server, ProcessServer) or path != server.output_path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(server.output())
        remedy = f"{error.remedy}; the server's log: {path}".removeprefix("; ")
        raise ServerError(error.what, remedy) from error
