"""Starts a build, and the unpatched release, as servers of the tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.context import Context, Serving
from sparkforge.build.results import EnvironmentResult, ImageResult, Product, WheelResult
from sparkforge.checkpoints.tiny import make_tiny_gpt_oss
from sparkforge.core import gitread
from sparkforge.core.errors import UsageError
from sparkforge.pins.types import origin_of
from sparkforge.runtime import environment, isa, servers
from sparkforge.runtime.engine import Engine
from sparkforge.runtime.servers import Server
from sparkforge.serving.errors import SettingError
from sparkforge.serving.options import for_plugin
from sparkforge.serving.profile import Profile
from sparkforge.sources.sources import Source
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


def mask_files(work: Path) -> dict[str, Path]:
    """Return the files that hide instruction sets in an image, by path below site-packages.

    The server there ignores PYTHONPATH (``python -I``), so a line in a .pth file imports it.
    """
    line = work / "mask.pth"
    line.write_text("import sparkforge_isa_mask\n")
    return {"sparkforge_isa_mask.py": isa.MASK, "sparkforge_isa_mask.pth": line}


def from_environment(
    folder: Path, launch: servers.Launch, work: Path, cache: Path, cwd: Path | None = None
) -> AbstractContextManager[servers.ProcessServer]:
    """Start a server of a virtual environment.

    Args:
        folder: an environment of ``environment.install``.
        work: folder for the server's output, ``server.log``.
        cache: folder for the caches of vLLM and torch, of any environment.
        cwd: the server's current folder; None: ``work``.

    Raises:
        UsageError: the options of our plugin cannot be passed.
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
    """Start a server of an image or an environment.

    Args:
        cache: folder for the caches of vLLM and torch, outside of an image.
        restored: files to mount over the image's own, by their path below site-packages.
    """
    image = product.result
    if not isinstance(image, ImageResult):
        return from_environment(product.path, launch, work, cache)
    assert engine is not None  # it built the image
    return servers.from_image(engine, image.image_id, launch, restored or {})


@dataclass(frozen=True)
class Launcher:
    """Starts servers of a build, with the tiny checkpoint, in a work folder."""

    context: Context
    engine: Engine | None
    serving: Serving
    product: Artefact[Product]
    """The image or the environment."""
    release: Artefact[EnvironmentResult] | None
    """The unpatched release's environment; None where the product is an image."""
    wheels: Mapping[str, WheelResult]
    sources: Mapping[str, Source]
    """Before the patches, of the upstreams that have any."""
    work: Path

    @contextmanager
    def patched(self) -> Iterator[Server]:
        """Serve the build with the target's own arguments; keeps its log on a failure."""
        options = self.context.serve
        with (
            self._server(self.product, options, "patched", {}) as server,
            servers.kept_log(server, self.context.server_log),
        ):
            yield server

    def unpatched(self) -> AbstractContextManager[Server]:
        """Serve the release without our patches; our option is not among its arguments."""
        options = of_release(self.context.serve)
        return self._server(self.release, options, "unpatched", UNPATCHED_VARIABLES)

    def unpatched_without_amx(self) -> AbstractContextManager[Server]:
        """The same, with AMX hidden from the server's processes."""
        options = of_release(self.context.serve)
        hidden = {**UNPATCHED_VARIABLES, **isa.without_amx()}
        return self._server(self.release, options, "unpatched-without-amx", hidden)

    def _server(
        self,
        product: Artefact[Product] | None,
        options: Sequence[str],
        name: str,
        variables: Mapping[str, str],
    ) -> AbstractContextManager[Server]:
        """Start a server.

        Args:
            product: None: the image with the release's files put back.
        """
        model = self.work / "model"
        if not model.exists():
            make_tiny_gpt_oss(model)
        work = self.work / name
        work.mkdir()
        further = (*SMOKE_ARGUMENTS, *self.serving.arguments)
        restored = self.originals(work) if product is None else {}
        if isa.VARIABLE in variables and isinstance(self.product.result, ImageResult):
            restored |= mask_files(work)
        product = product or self.product
        variables = {**SMOKE_VARIABLES, **variables}
        if not isinstance(product.result, ImageResult):  # all that it keeps of an earlier server
            known = self.context.store.cache_path("serve")
            variables[environment.VLLM_CACHE] = str(
                environment.vllm_cache(known, product.path.name)
            )
        launch = servers.Launch(model, options, further, variables, self.serving.port)
        cache = self.work / "cache"
        return start_server(self.engine, product, launch, work, cache, restored)

    def originals(self, work: Path) -> dict[str, Path]:
        """Write the files that our series replaces as they were, by their path in the wheel.

        Mounted over an image's own, they make the unpatched release of it.
        """
        restored = {}
        for name, wheel in self.wheels.items():
            rules = {
                rule: layer
                for layer in self.context.layers(name)
                for rule in self.context.pins.upstream(layer).paths
            }
            with ExitStack() as stack:
                readers = {
                    layer: stack.enter_context(gitread.reading(self.sources[layer].repo))
                    for layer in set(rules.values()) & set(self.sources)
                }
                for member in wheel.replaced:
                    origin = origin_of(rules, member)
                    # it was replaced by a file that has this place
                    assert origin is not None
                    layer = rules[origin[0]]
                    content = readers[layer].content(self.sources[layer].commit, origin[1])
                    assert content is not None
                    file = work / member.replace("/", "%")
                    file.write_bytes(content)
                    restored[member] = file
        return restored
