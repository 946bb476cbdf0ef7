"""The servers to measure: a running one, the last build, the unpatched release."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.build import cached, image, serve
from sparkforge.build.graph import Build, unpatched_environment
from sparkforge.build.launcher import (
    CHAT_OPTIONS,
    SMOKE_VARIABLES,
    UNPATCHED_VARIABLES,
    Launcher,
    of_release,
    start_server,
)
from sparkforge.build.publish import made
from sparkforge.build.results import ImageResult, Product
from sparkforge.build.stages.product import sources_of
from sparkforge.check.bench.result import Identity
from sparkforge.checkpoints.expanded import expand
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import ServerError
from sparkforge.core.log import log
from sparkforge.pins.pins import ModelPin
from sparkforge.runtime.client import Place
from sparkforge.runtime.environment import python_path
from sparkforge.runtime.servers import Launch, instead, kept_log, wait_ready
from sparkforge.serving.profile import Profile
from sparkforge.store.store import Artefact

_LOAD_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes


@dataclass(frozen=True)
class Side:
    """A server to measure.

    Attributes:
        name: of its folder; "" for that of the run.
        start: starts it, and yields when it is ready.
    """

    name: str
    start: Callable[[], AbstractContextManager[Place]]
    identity: Identity


def running(place: Place, target: str, profile: str) -> Side:
    """Return the side of a running server; ``profile``: by the user, or ""."""

    @contextmanager
    def start() -> Iterator[Place]:
        yield place

    return Side("", start, Identity("url", target, profile=profile))


def of_build(
    build: Build,
    model: Path | None,
    profile: Profile,
    work: Path,
    *,
    versus: bool,
) -> list[Side]:
    """Return the sides of a build: with ``versus`` its release first, then the build.

    The release gets the same options, except for those that only the patches have. Of the tiny
    model both get a copy in BF16 without these options, since the release refuses MXFP4 on most
    CPUs.

    Args:
        model: folder of the checkpoint; None: the tiny one for chats.
        profile: with the choice of layers.
    """
    context, serving, product = build.context, build.serving, build.graph.product.artefact
    built = product.result if isinstance(product.result, ImageResult) else None
    wheels = [item.result for item in build.graph.own]
    ours = Identity(
        "build",
        context.target_name,
        context.release,
        sha256_file(context.pins_path),
        {wheel.file: wheel.sha256 for wheel in wheels},
        (built.digest or built.image_id) if built is not None else "",
        profile.choice or "",
    )
    tiny, plain = model is None, versus and model is None
    options = tuple(context.serve_with(profile))
    usual = (*(CHAT_OPTIONS if tiny else ()), *serving.arguments)
    bare = tuple(of_release(options)), tuple(of_release(usual))
    variables = dict(SMOKE_VARIABLES) if tiny else {}
    more = {}
    if built is not None and plain:
        more = instead(bare[0])  # the image's own do not fit the BF16 model
    elif built is not None and profile.choice:
        more = {"SPARKFORGE_PROFILE": profile.choice}
    launch = Launch(
        model or standing_in(build, wide=versus),
        *(bare if plain else (options, usual)),
        {**variables, **more},
        0 if versus else serving.port,
        gpus=context.target.cuda_arch is not None,
    )
    patched = _Server("patched" if versus else "", build, product, launch, work)
    if not versus:
        return [patched.side(ours)]
    variables |= UNPATCHED_VARIABLES
    launch = replace(launch, options=bare[0], arguments=bare[1], variables=variables)
    unpatched = replace(patched, name="unpatched", launch=launch)
    if built is not None:
        unpatched = replace(unpatched, restored=_originals(build, work))
    else:
        item = unpatched_environment(context)
        cached.run(context, cached.ordered([item]))
        unpatched = replace(unpatched, product=item.artefact)
    version = context.pins.upstream(next(iter(context.target.wheels))).version
    release = Identity("release", context.target_name, version, ours.pins)
    return [unpatched.side(release), patched.side(ours)]


@dataclass(frozen=True)
class _Server:
    """The start of a server of a build.

    Attributes:
        name: of its side.
        work: folder of all sides.
        restored: original files that turn an image into the release.
    """

    name: str
    build: Build
    product: Artefact[Product]
    launch: Launch
    work: Path
    restored: Mapping[str, Path] | None = None

    def side(self, identity: Identity) -> Side:
        options = (*self.launch.options, *self.launch.arguments)
        known = replace(identity, options=options, checkpoint=self.launch.model.name)
        return Side(self.name, self._start, known)

    @contextmanager
    def _start(self) -> Iterator[Place]:
        folder = self.work / f"server-{len(list(self.work.iterdir()))}"
        folder.mkdir()
        context, serving = self.build.context, self.build.serving
        cache = context.store.cache_path("serve")
        with start_server(
            self.build.tools.engine, self.product, self.launch, folder, cache, self.restored
        ) as server:
            with kept_log(server, context.server_log):
                took = wait_ready(server, max(serving.ready_timeout_s, _LOAD_S))
                log.info(f"{self.name or 'the server'} is ready after {took:.0f} s")
            yield Place(f"{server.url}/v1")


def _originals(build: Build, work: Path) -> Mapping[str, Path]:
    """Return the original files that turn our image into the release."""
    context, wheels = build.context, build.graph.wheels
    launcher = Launcher(
        context,
        build.tools.engine,
        build.serving,
        build.graph.product.artefact,
        None,
        {name: item.result for name, item in wheels.items()},
        sources_of(context, build.graph.trees),
        work,
    )
    folder = work / "originals"
    folder.mkdir()
    return launcher.originals(folder)


def standing_in(build: Build, *, wide: bool = False) -> Path:
    """Return the tiny checkpoint for chats, in MXFP4, or with ``wide`` in BF16."""
    folder, product = build.context.dist, build.graph.product
    if isinstance(product.result, ImageResult):
        engine, image_id = build.tools.engine, product.result.image_id
        assert engine is not None  # it built the image
        ours = f"/{image.PROGRAMS}"
        model = serve.chat_model(folder, lambda code: engine.run_python(image_id, code, ours))
    else:
        model = serve.chat_model(folder, serve.in_environment(python_path(product.path)))
    if not wide:
        return model
    return made(folder / "tiny-chat-model-bf16", lambda new: expand(model, new))


def tokenizer(model: ModelPin) -> Path:
    """Return the folder with a model's tokenizer in this machine's cache of the hub.

    Raises:
        ServerError: there is none.
    """
    homes = [os.environ.get(name) for name in ("SPARKFORGE_HF_CACHE", "HF_HOME")]
    known = [Path(home).expanduser() for home in homes if home and "/" in home]  # else a volume
    for home in (*known, Path.home() / ".cache" / "huggingface"):
        name = f"models--{model.repository.replace('/', '--')}"
        folder = home / "hub" / name / "snapshots" / model.revision
        if (folder / "tokenizer.json").is_file():
            return folder
    get = f"hf download {model.repository} tokenizer.json --revision {model.revision}"
    hint = f"name the model's folder with --model DIR; to get one: {get} --local-dir DIR"
    raise ServerError(f"no tokenizer.json of {model.repository} on this machine", hint)
