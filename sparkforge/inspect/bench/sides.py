"""The servers to measure: a running one, the last build, the unpatched release."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkforge.build import executor, image, serve
from sparkforge.build.context import Context
from sparkforge.build.executor import Build
from sparkforge.build.graph import ordered, unpatched_environment
from sparkforge.build.item import source_of
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
from sparkforge.checkpoints.expanded import expand
from sparkforge.core.errors import BenchError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.log import log
from sparkforge.inspect.bench.benchy import Asked
from sparkforge.inspect.bench.result import Ceiling, Identity
from sparkforge.inspect.bench.session import Side
from sparkforge.inspect.bench.tables import Test
from sparkforge.inspect.perf import roofline, traffic
from sparkforge.inspect.perf.shapes import SHAPES
from sparkforge.inspect.perf.traffic import KvCache, Moe, Setup
from sparkforge.runtime.environment import python_path
from sparkforge.runtime.servers import MODEL_NAME, Launch, instead, kept_log, wait_ready
from sparkforge.serving import arguments
from sparkforge.serving import profile as profiles
from sparkforge.serving.profile import Profile
from sparkforge.store.artefact import Artefact

_LOAD_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Served:
    """Model and profile of a server of the build.

    Attributes:
        model: folder of the checkpoint; None: the tiny one for chats.
        profile: with the choice of layers.
    """

    model: Path | None
    profile: Profile


def running(asked: Asked, target: str, profile: str) -> Side:
    """Return the side of a running server.

    Args:
        profile: by the user, or "".
    """

    @contextmanager
    def start() -> Iterator[Asked]:
        yield asked

    return Side("", start, Identity("url", target, profile=profile), ours=False)


def of_build(
    context: Context, build: Build, served: Served, work: Path, *, versus: bool
) -> list[Side]:
    """Return the sides of a build: with ``versus`` its release first, then the build.

    The release gets the same options, except for those that only the patches have. Of the tiny
    model both get a copy in BF16 without these options, since the release refuses MXFP4 on most
    CPUs.
    """
    product = build.results.artefact(build.graph.product)
    built = product.result if isinstance(product.result, ImageResult) else None
    pins = sha256_file(context.pins_path)
    wheels = [build.results.of(item) for item in build.graph.own]
    ours = Identity(
        "build",
        context.target_name,
        context.release,
        pins,
        {wheel.file: wheel.sha256 for wheel in wheels},
        (built.digest or built.image_id) if built is not None else "",
        served.profile.choice or "",
    )
    model = served.model or standing_in(context, build, wide=versus)
    options = tuple(context.serve_with(served.profile))
    usual = (*(CHAT_OPTIONS if served.model is None else ()), *context.arguments)
    plain = of_release if versus and served.model is None else list
    variables = {**(SMOKE_VARIABLES if served.model is None else {})}
    given, more = plain(options), dict(variables)
    if built is not None and plain is of_release:
        more |= instead(given)  # the image's own do not fit the BF16 model
    elif built is not None and served.profile.choice:
        more[profiles.VARIABLE] = served.profile.choice
    launch = Launch(
        model,
        given,
        plain(usual),
        more,
        0 if versus else context.port,
        gpus=context.target.cuda_arch is not None,
    )
    patched = _Server("patched" if versus else "", context, product, launch, work)
    if not versus:
        return [patched.side(ours)]
    launch = replace(
        launch,
        options=of_release(options),
        arguments=of_release(usual),
        variables=variables | UNPATCHED_VARIABLES,
    )
    unpatched = replace(patched, name="unpatched", launch=launch)
    if built is not None:
        unpatched = replace(unpatched, restored=_originals(context, build, work))
    else:
        item = unpatched_environment(context)
        released = executor.run(context, ordered([item])).artefact(item)
        unpatched = replace(unpatched, product=replace(product, path=released.path))
    release = Identity("release", context.target_name, _version(context), pins)
    return [unpatched.side(release), patched.side(ours)]


@dataclass(frozen=True)
class _Server:
    """The start of a server of a build."""

    name: str
    """Of its side."""
    context: Context
    product: Artefact[Product]
    launch: Launch
    work: Path
    """Of all sides."""
    restored: Mapping[str, Path] | None = None
    """Original files that turn an image into the release."""

    def side(self, identity: Identity) -> Side:
        options = (*self.launch.options, *self.launch.arguments)
        known = replace(identity, options=options, checkpoint=self.launch.model.name)
        ours = not isinstance(self.product.result, ImageResult)
        return Side(self.name, self._start, known, ours=ours)

    @contextmanager
    def _start(self) -> Iterator[Asked]:
        folder = self.work / f"server-{len(list(self.work.iterdir()))}"
        folder.mkdir()
        cache = self.context.store.cache_path("serve")
        with start_server(
            self.context.engine, self.product, self.launch, folder, cache, self.restored
        ) as server:
            with kept_log(server, self.context.server_log):
                took = wait_ready(server, max(self.context.ready_timeout_s, _LOAD_S))
                log.info(f"{self.name or 'the server'} is ready after {took:.0f} s")
            yield Asked(server.url, MODEL_NAME)


def _version(context: Context) -> str:
    return context.pins.upstream(next(iter(context.target.wheels))).version


def _originals(context: Context, build: Build, work: Path) -> Mapping[str, Path]:
    """Return the original files that turn our image into the release."""
    wheels = build.graph.wheels
    needed = {item for wheel in wheels.values() for item in wheel.needs}  # of those with patches
    launcher = Launcher(
        context,
        build.results.artefact(build.graph.product),
        None,
        {name: build.results.of(item) for name, item in wheels.items()},
        {
            name: source_of(context.store, name, build.results.of(item))
            for name, item in build.graph.sources.items()
            if item in needed
        },
        work,
    )
    folder = work / "originals"
    folder.mkdir()
    return launcher.originals(folder)


def standing_in(context: Context, build: Build, *, wide: bool = False) -> Path:
    """Return the tiny checkpoint for chats, in MXFP4, or with ``wide`` in BF16."""
    folder = context.root / "dist" / context.target_name
    product = build.results.artefact(build.graph.product)
    if isinstance(product.result, ImageResult):
        engine, image_id = context.engine, product.result.image_id
        assert engine is not None  # it built the image
        ours = f"/{image.PROGRAMS}"
        model = serve.chat_model(folder, lambda code: engine.run_python(image_id, code, ours))
    else:
        model = serve.chat_model(folder, serve.in_environment(python_path(product.path)))
    if not wide:
        return model
    return made(folder / "tiny-chat-model-bf16", lambda new: expand(model, new))


def tokenizer(named: Path | None, repository: str, revision: str, model: Mapping[str, Any]) -> Path:
    """Return a folder with the model's tokenizer.

    Args:
        named: the user's; None: the server's folder, if it exists here, else the target's model in
            this machine's cache of the hub.
        repository, revision: of the target's model; "" without one.
        model: the server's description of it.

    Raises:
        BenchError: there is none.
    """
    if named is not None:
        return named
    root = model.get("root")
    places = [Path(root)] if isinstance(root, str) and root.startswith("/") else []
    if repository:
        name = f"models--{repository.replace('/', '--')}"
        hubs = [_hub(os.environ.get(name)) for name in ("SPARKFORGE_HF_CACHE", "HF_HOME")]
        hubs.append(Path.home() / ".cache" / "huggingface" / "hub")
        places += [hub / name / "snapshots" / revision for hub in hubs if hub is not None]
    for place in places:
        if (place / _TOKENIZER).is_file():
            return place
    msg = f"no {_TOKENIZER} of the model {model.get('id')} on this machine"
    if repository:
        fetch = f"hf download {repository} {_TOKENIZER} --revision {revision} --local-dir DIR"
        raise BenchError(msg, f"name its folder with --model DIR; to get one: {fetch}")
    raise BenchError(msg, "name the model's folder with --model DIR")


def _hub(home: str | None) -> Path | None:
    """Return the hub's cache of a home; None for the name of a volume."""
    return Path(home).expanduser() / "hub" if home and "/" in home else None


def ceilings(context: Context, served: Profile, tests: Iterable[Test]) -> tuple[Ceiling, ...]:
    """Return the ceilings of a target if its memory and model are known; else none."""
    shape = SHAPES.get(context.target.model or "")
    bandwidth = context.target.memory_gb_s
    if shape is None or bandwidth is None:
        return ()
    options = (*context.serve_with(served), *context.arguments)
    setup = _setup(options)
    found = {}
    for test in tests:
        size = test.depth + test.prompt + test.generated // 2
        step = traffic.step_bytes(shape, setup, context=size, batch=test.concurrency)
        speed = roofline.ceiling(step, bandwidth, test.concurrency)
        found[size, test.concurrency] = Ceiling(size, test.concurrency, speed)
    return tuple(found[key] for key in sorted(found))


def _setup(options: Sequence[str]) -> Setup:
    """Return the weights that ``vllm serve`` reads with its options."""
    named = arguments.value(options, "--moe-backend")
    moe: Moe = next((backend for backend in traffic.MOE_MULTIPLES if backend == named), "marlin")
    layers = arguments.value(options, profiles.OPTION) or ""
    dtype = arguments.value(options, "--kv-cache-dtype") or ""
    kv_cache: KvCache = "fp8" if dtype.startswith("fp8") else "auto"
    return Setup(moe, roofline.parse_layers(layers) if layers else {}, kv_cache)
