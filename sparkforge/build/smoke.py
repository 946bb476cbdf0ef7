"""The smoke test: the build serves, and the unpatched release refuses the same checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sparkforge.build.cached import Cached
from sparkforge.build.context import Context, Tools
from sparkforge.build.results import ImageResult, Product, SmokeResult, WheelResult
from sparkforge.build.stages.wheels import release_files
from sparkforge.checkpoints.tiny import make_tiny_gpt_oss
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.runtime import environment, isa, servers
from sparkforge.runtime.client import COMPLETIONS, Place, Reply, events, post
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.servers import MODEL_NAME, Launch, Server, kept_log, tail, wait_ready
from sparkforge.serving.options import CONFIG, KEY, SettingError, for_plugin
from sparkforge.store.store import Artefact

if TYPE_CHECKING:
    from sparkforge.build.graph import Graph

# The tiny model needs little: one GiB of cache is the smallest that vLLM takes. torch.compile is
# off, as in the image, which has no compiler: the same code runs everywhere, and the start is
# 20 s shorter (measured: 39 s instead of 59 s on 2 cores).
SMOKE_ARGUMENTS = ("--max-num-seqs", "4")
SMOKE_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
UNPATCHED_VARIABLES = {"VLLM_PLUGINS": ""}
"""An image has our plugin also where its vLLM is made the release's: vLLM must not load it."""
_PROMPT = "The forge is hot, the spark is small, and every byte is counted once."
_TOKENS = 24
STOCK_ERROR = "NotImplementedError: No MXFP4 MoE backend supports the deployment configuration"


def run(context: Context, tools: Tools, graph: Graph, work: Path) -> SmokeResult:
    """Test a build; without arguments of the user's also with its wheels' original files."""
    make_tiny_gpt_oss(work / "model")
    cache, product = context.store.cache_path("serve"), graph.product.artefact
    arguments = (*SMOKE_ARGUMENTS, *tools.arguments)
    launch = Launch(work / "model", context.serve, arguments, SMOKE_VARIABLES, tools.port)
    with ExitStack() as running:
        server = running.enter_context(start_server(tools.engine, product, launch, work, cache))
        if not tools.arguments:  # beside it, since most of a start is one thread
            beside = Path(running.enter_context(TemporaryDirectory(dir=work)))
            files = originals(context, graph.wheels, beside)
            if isinstance(product.result, ImageResult):
                files |= isa.IN_IMAGE
            # with AMX the release has a backend of its own; bound, it would have the other's core
            hidden = {**SMOKE_VARIABLES, **UNPATCHED_VARIABLES, **isa.NO_AMX}
            # and without the 0 its worker would have a process of its own: 10 s of CPU
            hidden |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            launch = Launch(launch.model, of_release(context.serve), arguments, hidden)
            started = start_server(tools.engine, product, launch, beside, cache, files)
            release = running.enter_context(started)
        with kept_log(server, context.dist / "server.log"):
            report = exercise(server, tools.ready_timeout_s)
        if tools.arguments:
            return report
        with kept_log(release, context.dist / "release.log"):
            return replace(report, release=refusal(release, tools.ready_timeout_s))


def exercise(server: Server, timeout_s: float) -> SmokeResult:
    """Check that the patched server keeps to the OpenAI API, and stop it."""
    ready = wait_ready(server, timeout_s)
    log.info(f"ready after {ready:.1f} s")
    try:
        tokens, seconds = _check(server)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _wrong(server, f"no answer as OpenAI's: {error!r}") from error
    code, took, stragglers = server.stop()
    if stragglers:
        raise _wrong(server, "the server left processes running")
    if code != 0:
        raise _wrong(server, f"exit code {code} after SIGTERM")
    log.info(f"stopped cleanly in {took:.1f} s")
    return SmokeResult(round(ready, 2), round(seconds, 3), tokens, round(took, 2))


def _check(server: Server) -> tuple[int, float]:
    """Check a server's answers; returns the tokens of a completion, and its seconds."""
    place = Place(f"{server.url}/v1")
    body = {
        "model": MODEL_NAME,
        "prompt": _PROMPT,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def ask(**more: Any) -> Reply:
        return post(place, COMPLETIONS, {**body, **more})

    ask(prompt=[5], max_tokens=1).json()  # the first forward of a server has one token
    start = time.monotonic()
    first = ask().json()
    seconds = time.monotonic() - start
    ids = first["choices"][0]["token_ids"]
    found = list(events(place, COMPLETIONS, {**body, "stream": True}))
    choices = [choice for event in found if event is not None for choice in event["choices"]]
    streamed = [token for choice in choices for token in choice["token_ids"] or ()]
    for what, seen, wanted in (
        ("a second completion at temperature 0", ask().json()["choices"][0]["token_ids"], ids),
        ("the streamed completion", streamed, ids),
        ("the end of the stream", found[-1], None),
        ("number of tokens", len(ids), _TOKENS),
        # the tiny model's tokens are bytes, so their number is known without its tokenizer
        ("prompt tokens of usage", first["usage"]["prompt_tokens"], len(_PROMPT.encode())),
        ("tokens of usage", first["usage"]["completion_tokens"], _TOKENS),
    ):
        if seen != wanted:
            raise _wrong(server, f"{what}: {seen} instead of {wanted}")
    log.info(f"completions: {_TOKENS} tokens in {seconds:.2f} s, the same streamed and again")
    return len(ids), seconds


def refusal(server: Server, timeout_s: float) -> str:
    """Return the words with which the unpatched release refuses the checkpoint.

    ServerError: it serves (then the patch is needless), or fails in another way.
    """
    what, hint = "serves this checkpoint: the patch is not needed here", "see the patch's Drop-when"
    try:
        wait_ready(server, timeout_s)
    except ServerError as error:
        if server.exited() is not None and STOCK_ERROR in server.output():
            log.info(f"the unpatched release fails as expected: {STOCK_ERROR}")
            return STOCK_ERROR
        what, hint = f"fails, but not with {STOCK_ERROR}:\n{error.what}", error.remedy
    raise ServerError(f"the unpatched release {what}", hint)


def _wrong(server: Server, what: str) -> ServerError:
    msg = f"{what}; end of the server log:\n{tail(server)}"
    return ServerError(msg, "run it again: build.py --target NAME")


def plugged(options: Sequence[str]) -> list[str]:
    """Return options of ``vllm serve`` as the plugin reads its own; UsageError: it could not."""
    try:
        return for_plugin(options)
    except SettingError as error:
        raise UsageError(error.what, error.hint) from None


def of_release(options: Sequence[str]) -> list[str]:
    """Return options of ``vllm serve`` without those that only the plugin has; UsageError."""
    kept = []
    for word in plugged(options):
        name, _, text = word.partition("=")
        ours = name == CONFIG and f'"{KEY}":' in text  # then it is an object
        rest = {key: one for key, one in json.loads(text).items() if key != KEY} if ours else {}
        if rest or not ours:
            kept.append(f"{CONFIG}={json.dumps(rest)}" if ours else word)
    return kept


def from_environment(
    folder: Path,
    launch: Launch,
    work: Path,
    cache: Path,
    restored: Mapping[str, Path] | None = None,
) -> AbstractContextManager[Server]:
    """Start a server of a virtual environment, with its output in ``server.log`` of ``work``.

    ``cache`` is for vLLM and torch, of any environment; ``restored`` are files in place of its own,
    by their path below site-packages.
    """
    port = servers.free_port(launch.port)
    # -P: a module in the current folder must not replace an installed one
    program = (str(environment.python_path(folder)), "-P", "-m", "vllm.entrypoints.cli.main")
    options = ("--served-model-name", launch.name, *launch.options, *launch.arguments)
    address = ("--host", servers.LOOPBACK, "--port", str(port))
    command = [*program, "serve", str(launch.model), *address, *plugged(options)]
    name = f"{folder.name}-restored" if restored else folder.name
    variables = {**environment.server_env(cache, name), **launch.variables}
    if restored:
        packages = environment.restored(folder, restored, work / "packages")
        variables["PYTHONPATH"] = f"{packages}:{variables['PYTHONPATH']}"
    return servers.from_command(command, port, variables, work)


def start_server(
    engine: Engine | None,
    product: Artefact[Product],
    launch: Launch,
    work: Path,
    cache: Path,
    restored: Mapping[str, Path] | None = None,
) -> AbstractContextManager[Server]:
    """Start a server of an image or an environment; ``restored`` as in ``from_environment``."""
    if not isinstance(product.result, ImageResult):
        return from_environment(product.path, launch, work, cache, restored)
    assert engine is not None  # it built the image
    return servers.from_image(engine, product.result.image_id, launch, work, restored or {})


def originals(
    context: Context, wheels: Mapping[str, Cached[WheelResult]], work: Path
) -> dict[str, Path]:
    """Write the release's files that our series replace, by their path in the wheel."""
    restored = {}
    for name, wheel in wheels.items():
        for member, data in release_files(context, name, wheel.result.replaced).items():
            restored[member] = work / member.replace("/", "%")
            restored[member].write_bytes(data)
    return restored
