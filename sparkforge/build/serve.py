"""`build.py serve`: serve the last build until Ctrl-C, with a checkpoint of the user's choice."""

import base64
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from sparkforge.build import image
from sparkforge.build.context import Context
from sparkforge.build.graph import Build, last_build
from sparkforge.build.options import ServingOptions, command_options
from sparkforge.build.publish import made, tiny_model
from sparkforge.build.results import ImageResult, Product
from sparkforge.build.smoke import SMOKE_VARIABLES, start_server
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.runtime import environment, servers
from sparkforge.runtime.client import CHAT, COMPLETIONS
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.servers import MODEL_NAME, Launch, ending
from sparkforge.serving import profile as profiles
from sparkforge.serving.options import SettingError
from sparkforge.serving.profile import Profile
from sparkforge.sources.project import Project
from sparkforge.store.store import Artefact

CHAT_NAME = "tiny-chat-gpt-oss"
"""Of the tiny checkpoint that takes chats, for its users."""
# options for chats, as in the profiles of gpt-oss
CHAT_OPTIONS = tuple(
    Profile(
        reasoning_parser="openai_gptoss", tool_call_parser="openai", exclude_tools_when_none=True
    ).options()
)
_READ_VOCABULARY = (
    "import sys; from sparkforge.serving import checkpoint;"
    " sys.stdout.buffer.write(checkpoint.vocabulary())"
)


@command_options
class Options(ServingOptions):
    target: str
    """target to serve"""
    model: Path | None = None
    """checkpoint to serve (default: a tiny test model)"""
    chat: bool = False
    """serve a tiny model with canned chat and tool-call replies"""
    profile: str | None = None
    """exact, balanced, fast or fastest: format of the dense layers (default: the target's)"""


def run(options: Options) -> int:
    """Serve the last build until Ctrl-C."""
    if options.chat and options.model is not None:
        raise UsageError("--chat and --model conflict", "give only one")
    if options.model is not None:
        checkpoint(options.model)
    project = Project.open(options.project)
    build = last_build(project, options.target, options.variant, options.server, options.arguments)
    if options.model is None and build.context.target.smoke is None:
        msg = f"target {options.target} serves a real model; it has no tiny one"
        raise UsageError(msg, "give --model DIR, or: build.py up")
    chosen(build.context, options.profile)
    build.run("image")
    return serve(build, options)


def checkpoint(model: Path) -> Path:
    """Return the absolute folder of a checkpoint; UsageError if it is none."""
    if not (model / "config.json").is_file():
        msg = f"--model {model}: not a folder with a config.json"
        raise UsageError(msg, "give the folder of a checkpoint")
    return model.resolve()


def chosen(context: Context, name: str | None) -> Profile:
    """Return the target's profile with the choice of ``--profile``; UsageError: there is none."""
    profile = context.serving
    try:
        return profile if name is None else profiles.pick(profile, name, "--profile")
    except SettingError as error:
        raise UsageError(error.what, error.hint) from None


def curl(url: str, model: str, *, chat: bool) -> str:
    """Return a request to paste, for a chat or not."""
    messages = [{"role": "user", "content": "Hello"}]
    asked: dict[str, object] = {"prompt": "Hello", "max_tokens": 16}
    asked = {"messages": messages, "max_tokens": 200} if chat else asked
    words = ["curl", url + (CHAT if chat else COMPLETIONS), "-H", "Content-Type: application/json"]
    return shlex.join([*words, "-d", json.dumps({"model": model, **asked})])


def invite(url: str, model: str, line: str) -> dict[str, str]:
    """Print how to ask a server; return it as a document."""
    for what, said in (("URL", url), ("model", model), ("try", line)):
        log.info(f"{what:7}{said}")
    return {"url": url, "model": model, "curl": line}


def serve(build: Build, options: Options) -> int:
    """Serve until Ctrl-C, on loopback and without a key.

    ServerError: the server ended by itself, or was not ready in time.
    """
    context, product, chat = build.context, build.graph.product.artefact, options.chat
    context.dist.mkdir(parents=True, exist_ok=True)
    model = None if options.model is None else checkpoint(options.model)
    name = CHAT_NAME if chat else MODEL_NAME if model is None else model.name
    profile = chosen(context, options.profile)
    variables = dict(SMOKE_VARIABLES) if model is None else {}
    if isinstance(product.result, ImageResult) and options.profile is not None:
        variables[profiles.VARIABLE] = options.profile
    if chat:
        model = chat_model(context.dist, runs_python(build.tools.engine, product))
    launch = Launch(
        model or tiny_model(context.dist),
        context.serve_with(profile),
        (*(CHAT_OPTIONS if chat else ()), *build.tools.arguments),
        variables,
        build.tools.port or servers.usual_port(),
        gpus=context.target.cuda_arch is not None,
        name=name,
    )
    cache = context.store.cache_path("serve")
    with (
        start_server(build.tools.engine, product, launch, context.dist, cache) as server,
        servers.kept_log(server, server.output_path),
        server.output_path.open(errors="replace") as output,
    ):

        def show(_: float = 0) -> None:
            for line in iter(output.readline, ""):
                log.raw(line.rstrip("\n"))

        log.info(f"loading {name}; the server's log: {server.output_path}")
        took = servers.wait_ready(server, options.server.ready_timeout or float("inf"), show)
        show()  # what came with the last answer
        line = curl(f"{server.url}/v1", name, chat=chat or context.target.smoke is None)
        try:
            log.info(f"ready after {took:.0f} s; stop it with Ctrl-C")
            log.document(invite(f"{server.url}/v1", name, line))
            while (code := server.exited()) is None:
                show()
                time.sleep(0.2)
            show()
            raise ServerError(f"the server {ending(code)}:\n{servers.tail(server)}")
        except KeyboardInterrupt:
            log.info("stopping")
            server.stop()
            return 0


def chat_model(folder: Path, run: Callable[[str], bytes]) -> Path:
    """Return the tiny checkpoint that speaks Harmony; ``run`` gives a target's vocabulary."""
    from sparkforge.checkpoints.chat import make_chat_gpt_oss

    def make(model: Path) -> None:
        lines = run(_READ_VOCABULARY).splitlines()
        make_chat_gpt_oss(model, [base64.b64decode(line.partition(b" ")[0]) for line in lines])

    return made(folder / "tiny-chat-model", make)


def runs_python(engine: Engine | None, product: Artefact[Product]) -> Callable[[str], bytes]:
    """Return a function that runs code with a build's packages and ours; it returns stdout."""
    built = product.result
    if not isinstance(built, ImageResult):
        return in_environment(environment.python_path(product.path))
    assert engine is not None  # it built the image
    ours = f"/{image.PROGRAMS}"
    return lambda code: engine.run(built.image_id, "python", "-P", "-c", code, path=ours)


def in_environment(python: Path) -> Callable[[str], bytes]:
    """Return a function that runs code in an environment, with this checkout's package."""
    ours = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return lambda code: call(python, "-P", "-c", code, env=ours).stdout
