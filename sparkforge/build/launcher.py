"""Starts a build, and the unpatched release, as servers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from sparkforge.build import image
from sparkforge.build.cached import Cached
from sparkforge.build.context import Context
from sparkforge.build.publish import made
from sparkforge.build.results import ImageResult, Product, WheelResult
from sparkforge.build.stages.trees import Tree
from sparkforge.core import gitread
from sparkforge.core.errors import UsageError
from sparkforge.core.run import call
from sparkforge.pins.types import origin_of
from sparkforge.runtime import environment, isa, servers
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.servers import Server
from sparkforge.serving.errors import SettingError
from sparkforge.serving.options import for_plugin
from sparkforge.serving.profile import Profile
from sparkforge.store.store import Artefact

# The tiny model needs little: one GiB of cache is the smallest that vLLM takes. torch.compile is
# off, as in the image, which has no compiler: the same code runs everywhere, and the start is
# 20 s shorter (measured: 39 s instead of 59 s on 2 cores).
SMOKE_ARGUMENTS = ("--max-num-seqs", "4")
SMOKE_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
# options for chats, as in the profiles of gpt-oss
CHAT_OPTIONS = tuple(
    Profile(
        reasoning_parser="openai_gptoss", tool_call_parser="openai", exclude_tools_when_none=True
    ).options()
)
UNPATCHED_VARIABLES = {"VLLM_PLUGINS": ""}
"""An image has our plugin also where its vLLM is made the release's: vLLM must not load it."""
_OURS = {"--mxfp4-layers": None, "--decode-kernels": None, "--moe-backend": "bf16_dequant"}
"""Options of ``vllm serve`` that only the plugin has; None: with any value."""
_READ_VOCABULARY = (
    "import sys; from sparkforge.serving import checkpoint;"
    " sys.stdout.buffer.write(checkpoint.vocabulary())"
)


def of_release(options: Sequence[str]) -> list[str]:
    """Return options of ``vllm serve`` without those that only the plugin has."""
    kept: list[str] = []
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name not in _OURS:
            kept.append(word)
            continue
        value = value if equals else next(words, "")
        if _OURS[name] not in (None, value):
            kept += [name, value]
    return kept


def from_environment(
    folder: Path, launch: servers.Launch, work: Path, cache: Path, cwd: Path | None = None
) -> AbstractContextManager[Server]:
    """Start a server of a virtual environment, with its output in ``server.log`` of ``work``.

    ``cache`` is for vLLM and torch, of any environment; ``cwd`` None: the server runs in ``work``.
    """
    port = servers.free_port(launch.port)
    # -P: a module in the current folder must not replace an installed one
    program = (str(environment.python_path(folder)), "-P", "-m", "vllm.entrypoints.cli.main")
    options = ("--served-model-name", launch.name, *launch.options, *launch.arguments)
    address = ("--host", servers.LOOPBACK, "--port", str(port))
    try:
        command = [*program, "serve", str(launch.model), *address, *for_plugin(options)]
    except SettingError as error:
        raise UsageError(error.what, error.hint) from None
    variables = {**environment.server_env(cache, folder.name), **launch.variables}
    return servers.from_command(command, port, variables, work, cwd or work)


def start_server(
    engine: Engine | None,
    product: Artefact[Product],
    launch: servers.Launch,
    work: Path,
    cache: Path,
    restored: Mapping[str, Path] | None = None,
) -> AbstractContextManager[Server]:
    """Start a server of an image or an environment; ``restored`` as in ``servers.from_image``."""
    if not isinstance(product.result, ImageResult):
        return from_environment(product.path, launch, work, cache)
    assert engine is not None  # it built the image
    return servers.from_image(engine, product.result.image_id, launch, work, restored or {})


def mask_files(work: Path) -> dict[str, Path]:
    """Return the files that hide instruction sets in an image, by path below site-packages.

    The server there runs with ``python -I``, so a line in a .pth file imports it.
    """
    line = work / "mask.pth"
    line.write_text("import sparkforge_isa_mask\n")
    return {"sparkforge_isa_mask.py": isa.MASK, "sparkforge_isa_mask.pth": line}


def originals(
    context: Context,
    wheels: Mapping[str, Cached[WheelResult]],
    trees: Mapping[str, Tree],
    work: Path,
) -> dict[str, Path]:
    """Write the files that our series replaces as they were, by their path in the wheel.

    Mounted over an image's own, they make the unpatched release of it.
    """
    restored = {}
    for name, wheel in wheels.items():
        rules = {
            rule: layer
            for layer in context.layers(name)
            for rule in context.pins.upstream(layer).paths
        }
        for member in wheel.result.replaced:
            origin = origin_of(rules, member)
            assert origin is not None  # it was replaced by a file that has this place
            layer = rules[origin[0]]
            source = trees[layer].before(context)
            with gitread.reading(source.repo) as reader:
                content = reader.blob(f"{source.commit}:{origin[1]}")
            restored[member] = work / member.replace("/", "%")
            restored[member].write_bytes(content)
    return restored


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
