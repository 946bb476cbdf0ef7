"""The servers to measure: the last build, and the unpatched release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkforge.build import cached
from sparkforge.build.graph import Build, unpatched_environment
from sparkforge.build.launcher import (
    CHAT_OPTIONS,
    SMOKE_VARIABLES,
    UNPATCHED_VARIABLES,
    chat_model,
    of_release,
    originals,
    runs_python,
    start_server,
)
from sparkforge.build.publish import made
from sparkforge.build.results import ImageResult, Product
from sparkforge.checkpoints.tiny import expand
from sparkforge.core.disk import sha256_file
from sparkforge.core.log import log
from sparkforge.runtime.client import Place
from sparkforge.runtime.servers import Launch, Server, instead, kept_log, wait_ready
from sparkforge.serving.profile import Profile
from sparkforge.store.store import Artefact

_LOAD_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes


@dataclass(frozen=True)
class Side:
    """A server to measure, with the name of its folder; ``start`` yields when it is ready."""

    name: str
    start: Callable[[], AbstractContextManager[Place]]
    identity: Mapping[str, Any]


@contextmanager
def started(
    build: Build,
    product: Artefact[Product],
    launch: Launch,
    work: Path,
    restored: Mapping[str, Path] | None = None,
) -> Iterator[Server]:
    """Start a build's server, and yield it when it is ready."""
    folder = work / f"server-{len(list(work.iterdir()))}"
    folder.mkdir()
    cache, engine = build.context.store.cache_path("serve"), build.tools.engine
    with (
        start_server(engine, product, launch, folder, cache, restored) as server,
        kept_log(server, build.context.server_log),
    ):
        took = wait_ready(server, max(build.serving.ready_timeout_s, _LOAD_S))
        log.info(f"the server is ready after {took:.0f} s")
        yield server


def of_build(
    build: Build, model: Path | None, profile: Profile, work: Path, *, versus: bool
) -> list[Side]:
    """Return the sides of a build: with ``versus`` its release first, then the build.

    The release gets the same options, except for those that only the patches have. Of the tiny
    model (None) both get a copy in BF16, since the release refuses MXFP4 on most CPUs.
    """
    context, serving, product = build.context, build.serving, build.graph.product.artefact
    built = product.result if isinstance(product.result, ImageResult) else None
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

    def side(
        name: str,
        product: Artefact[Product],
        launch: Launch,
        restored: Any = None,
        **known: Any,
    ) -> Side:
        @contextmanager
        def start() -> Iterator[Place]:
            with started(build, product, launch, work, restored) as server:
                yield Place(f"{server.url}/v1")

        known |= {"options": [*launch.options, *launch.arguments], "checkpoint": launch.model.name}
        return Side(name, start, {**known, "pins": sha256_file(context.pins_path)})

    wheels = [item.result for item in build.graph.own]
    ours = {
        "origin": "build",
        "release": context.release,
        "wheels": {wheel.file: wheel.sha256 for wheel in wheels},
        "image": (built.digest or built.image_id) if built is not None else "",
        "profile": profile.choice or "",
    }
    patched = side("patched" if versus else "", product, launch, **ours)
    if not versus:
        return [patched]
    variables |= UNPATCHED_VARIABLES
    launch = replace(launch, options=bare[0], arguments=bare[1], variables=variables)
    version = context.pins.upstream(next(iter(context.target.wheels))).version
    theirs = {"origin": "release", "release": version}
    if built is not None:
        graph, folder = build.graph, work / "originals"
        folder.mkdir()
        restored = originals(context, graph.wheels, graph.trees, folder)
        return [side("unpatched", product, launch, restored, **theirs), patched]
    item = unpatched_environment(context)
    cached.run(context, cached.ordered([item]))
    return [side("unpatched", item.artefact, launch, **theirs), patched]


def standing_in(build: Build, *, wide: bool = False) -> Path:
    """Return the tiny checkpoint for chats, in MXFP4, or with ``wide`` in BF16."""
    folder = build.context.dist
    model = chat_model(folder, runs_python(build.tools.engine, build.graph.product.artefact))
    if not wide:
        return model
    return made(folder / "tiny-chat-model-bf16", lambda new: expand(model, new))
