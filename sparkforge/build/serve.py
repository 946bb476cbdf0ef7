"""`build.py serve`: serve the last build until Ctrl-C, with a checkpoint of the user's choice.

It reports when the server answers, and its address. The server's output goes to a file, and to the
terminal once the server is ready.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests

from sparkforge.build import image
from sparkforge.build.context import Context
from sparkforge.build.graph import Build
from sparkforge.build.publish import for_compose, made, tiny_model
from sparkforge.build.results import ImageResult
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import background, call
from sparkforge.runtime import envfile, servers
from sparkforge.runtime.environment import python_path
from sparkforge.runtime.serverlog import ending
from sparkforge.runtime.servers import LOOPBACK, Launch, ProcessServer
from sparkforge.serving import profile as profiles
from sparkforge.serving.profile import Profile

_COMPOSE_GRACE_S = 60.0  # more than the container's own (docker-compose.yml: 30 s)
_ANSWER_S = 600.0  # for the first token: it may compile kernels
CHAT_NAME = "tiny-chat-gpt-oss"
"""Of the tiny checkpoint that takes chats, for its users."""
_READ_VOCABULARY = (
    "import sys; from sparkforge.serving import checkpoint;"
    " sys.stdout.buffer.write(checkpoint.vocabulary())"
)


def checkpoint(model: Path) -> Path:
    """Return the absolute folder of a checkpoint; UsageError if it is none."""
    if not (model / "config.json").is_file():
        what = "has no config.json" if model.is_dir() else "no such folder"
        raise UsageError(f"--model {model}: {what}", "give the folder of a checkpoint")
    return model.resolve()


def chosen(context: Context, name: str) -> Profile:
    """Return the target's profile with the choice of ``--profile``.

    Raises:
        UsageError: there is no such choice.
    """
    try:
        return profiles.pick(context.serving, name, "--profile")
    except profiles.ChoiceError as error:
        raise UsageError(error.what, error.hint) from None


def chat_model(folder: Path, run: Callable[[str], bytes]) -> Path:
    """Return the tiny checkpoint that speaks Harmony below a folder, as ``made`` does.

    Args:
        run: runs Python code with the target's packages, which have the vocabulary; returns stdout.

    Raises:
        SparkforgeError: they have no vocabulary.
    """
    from sparkforge.checkpoints.chat import make_chat_gpt_oss

    def make(model: Path) -> None:
        lines = run(_READ_VOCABULARY).splitlines()
        make_chat_gpt_oss(model, [base64.b64decode(line.partition(b" ")[0]) for line in lines])

    return made(folder / "tiny-chat-model", make, "sparkforge.checkpoints.chat")


def in_environment(python: Path) -> Callable[[str], bytes]:
    """Return a function that runs code in an environment, with this checkout's package."""
    ours = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return lambda code: call(python, "-P", "-c", code, env=ours).stdout


def curl(url: str, model: str, *, chat: bool, key: bool = False) -> str:
    """Return a request to paste.

    Args:
        url: with ``/v1`` at its end.
        chat: the model takes chats.
        key: requests must carry an API key.
    """
    body: dict[str, object] = {"model": model, "prompt": "Hello", "max_tokens": 16}
    if chat:
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": model, "messages": messages, "max_tokens": 200}
    path = "chat/completions" if chat else "completions"
    words = ["curl", f"{url}/{path}", "-H", "Content-Type: application/json"]
    if key:
        words += ["-H", "Authorization: Bearer YOUR-API-KEY"]
    return shlex.join([*words, "-d", json.dumps(body)])


@dataclass
class _Follower:
    """Prints the output of a server. State: the position in its file."""

    path: Path
    _read: int = field(default=0)

    def skip(self) -> None:
        """Skip the present output."""
        self._read = self.path.stat().st_size

    def show(self) -> None:
        """Print the complete lines that are new."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            log.raw(line)


def serve(
    build: Build,
    model: Path | None = None,
    *,
    chat: bool = False,
    profile: Profile | None = None,
    limit_s: float = float("inf"),
) -> int:
    """Serve until Ctrl-C: by Compose for an image, by vllm itself for a virtual environment.

    Args:
        model: as ``checkpoint`` returns it; None: the tiny one.
        chat: the tiny one that speaks Harmony, with the parsers that it takes.
        profile: with the choice of ``--profile``; None: Compose's, else the target's.
        limit_s: time that it may take to load.

    Returns:
        The exit code.

    Raises:
        ServerError: the server ended by itself, or was not ready in time.
        MachineError: its port is taken.
    """
    context, product = build.context, build.graph.product
    built = product.result
    is_image = isinstance(built, ImageResult)
    if isinstance(built, ImageResult):
        started = _image_server(build, built, model, profile, chat=chat)
    else:
        served = profile or context.serving
        started = _environment_server(build, product.path, model, served, chat=chat)
    with started as (server, name), servers.kept_log(server, server.output_path):
        follower = _Follower(server.output_path)
        # a container reports its progress; a virtual environment only has vLLM's own log
        aloud = is_image or log.verbose
        log.info(f"loading {name or 'the model'}; the server's log: {server.output_path}")
        tell: Callable[[float], None] | None = (lambda _: follower.show()) if aloud else None
        took = servers.wait_ready(server, limit_s, tell)
        url = f"{server.url}/v1"
        found, key = _first_answer(server, name)
        line = curl(url, found, chat=chat or (is_image and context.target.smoke is None), key=key)
        log.info(f"ready after {took:.0f} s; stop it with Ctrl-C")
        log.info(f"URL    {url}")
        log.info(f"model  {found}")
        log.info(f"try    {line}")
        log.document({"url": url, "model": found, "curl": line})
        if not aloud:
            follower.skip()
        return _until_it_ends(server, follower)


def _first_answer(server: ProcessServer, name: str | None) -> tuple[str, bool]:
    """Request one token; returns the model's name, and whether requests need an API key.

    Args:
        name: of the model; None: ask the server.
    """
    url = f"{server.url}/v1"
    try:
        reply = requests.get(f"{url}/models", timeout=_ANSWER_S)
        if reply.status_code == requests.codes.unauthorized:
            return name or "MODEL", True  # it is up; only a client with the key may ask further
        reply.raise_for_status()
        model = name or str(reply.json()["data"][0]["id"])
        log.info("requesting the first token")
        body = {"model": model, "prompt": "Hello", "max_tokens": 1}
        first = requests.post(f"{url}/completions", json=body, timeout=_ANSWER_S)
        if first.status_code >= requests.codes.internal_server_error:  # not where it is refused
            first.raise_for_status()
    except (requests.RequestException, LookupError, TypeError) as error:
        msg = f"the server did not answer its first request: {error}\n{servers.tail(server)}"
        raise ServerError(msg) from error
    return model, False


def _until_it_ends(server: ProcessServer, follower: _Follower) -> int:
    """Print the server's output until Ctrl-C or its end."""
    try:
        while (code := server.exited()) is None:
            follower.show()
            time.sleep(0.2)
    except KeyboardInterrupt:
        log.info("stopping")
        stopped = server.stop()
        log.info(f"stopped in {stopped.seconds:.1f} s")
        return 0
    follower.show()
    raise ServerError(f"the server {ending(code)}:\n{servers.tail(server)}")


@contextmanager
def _image_server(
    build: Build, built: ImageResult, model: Path | None, profile: Profile | None, *, chat: bool
) -> Iterator[tuple[ProcessServer, str | None]]:
    from sparkforge.build.launcher import CHAT_OPTIONS

    context, engine, serving = build.context, build.tools.engine, build.serving
    folder = context.dist
    for_compose(context, engine, built)
    environment: dict[str, str | None] = {}
    if serving.port:
        environment["SPARKFORGE_PORT"] = str(serving.port)
    if chat:
        assert engine is not None  # an image came of one
        ours = f"/{image.PROGRAMS}"
        model = chat_model(folder, lambda code: engine.run_python(built.image_id, code, ours))
        environment["SPARKFORGE_MODEL_NAME"] = os.environ.get("SPARKFORGE_MODEL_NAME", CHAT_NAME)
    if model is not None:
        environment["SPARKFORGE_MODEL_DIR"] = str(model)
    if options := (*(CHAT_OPTIONS if chat else ()), *serving.arguments):
        environment["SPARKFORGE_EXTRA_ARGS"] = shlex.join(options)
    if profile is not None:
        environment[profiles.VARIABLE] = profile.choice
    seen = {**envfile.seen(context.root / ".env"), **environment}
    if not seen.get("SPARKFORGE_RESTART"):
        environment["SPARKFORGE_RESTART"] = "no"  # the user is watching: show the first failure
    port = seen.get("SPARKFORGE_PORT") or "8000"
    address = f"http://{LOOPBACK}:{port}"
    command = ("docker", "compose", "--project-directory", str(context.root))
    runs = call(*command, "ps", "--quiet", "--status", "running", env=environment, check=False)
    if port.isdecimal() and not runs.stdout:  # else it has the port itself, and `up` replaces it
        servers.free_port(int(port))  # what listens there could answer in the server's place
    log.info("docker compose up")
    with background(
        *command, "up", output=context.server_log, env=environment, grace_s=_COMPOSE_GRACE_S
    ) as child:
        yield ProcessServer(address, child, context.server_log, _COMPOSE_GRACE_S), None


@contextmanager
def _environment_server(
    build: Build, environment: Path, model: Path | None, profile: Profile, *, chat: bool
) -> Iterator[tuple[ProcessServer, str | None]]:
    from sparkforge.build.launcher import CHAT_OPTIONS, SMOKE_VARIABLES, from_environment

    context, serving = build.context, build.serving
    folder = context.dist
    folder.mkdir(parents=True, exist_ok=True)
    if chat:
        weights = chat_model(folder, in_environment(python_path(environment)))
    else:
        weights = model or tiny_model(folder)
    name = weights.name if model is not None else CHAT_NAME if chat else servers.MODEL_NAME
    launch = Launch(
        weights,
        context.serve_with(profile),
        (*(CHAT_OPTIONS if chat else ()), *serving.arguments),
        SMOKE_VARIABLES if model is None else {},
        serving.port or 8000,
        name=name,
    )
    cache = context.store.cache_path("serve")
    with from_environment(environment, launch, folder, cache, Path.cwd()) as server:
        yield server, name
