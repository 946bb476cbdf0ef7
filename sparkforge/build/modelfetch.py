"""`build.py model fetch`: a target's model on this machine before its first start.

The image downloads, as its first start would (``serving/hub.py``): into the same volume or
folder, as the same user, with the same checks. So nothing here knows the hub.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge.build import composing
from sparkforge.build.options import OutputOptions
from sparkforge.core.command import Entry, needed, switch
from sparkforge.core.errors import (
    EngineError,
    FetchError,
    ImageError,
    IntegrityError,
    SparkforgeError,
    StoreError,
    UsageError,
)
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.runtime import envfile
from sparkforge.runtime.engine import Engine, connect
from sparkforge.serving.errors import EX_CANTCREAT, EX_DATAERR
from sparkforge.serving.hub import Progress
from sparkforge.sources.project import Checkout, checkout, pins_option

_CACHE = "/var/cache/sparkforge/huggingface"
_PROGRAM = "/opt/sparkforge/bin/sparkforge/serving/hub.py"
_PASSED = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "all_proxy",
    "HF_ENDPOINT",
    "HF_HUB_DOWNLOAD_TIMEOUT",
    "HF_TOKEN",
)
_KINDS: Mapping[int, type[SparkforgeError]] = {EX_DATAERR: IntegrityError, EX_CANTCREAT: StoreError}
_AGAIN = "the next run continues from here"


@dataclass(frozen=True)
class Wanted:
    """A model to download, its place and the image that downloads it."""

    target: str
    model: str
    revision: str
    place: str
    """A volume of the engine, or a folder of this machine, where Compose looks."""
    image: str

    @property
    def mount(self) -> str:
        """Value of `docker run --mount`."""
        kind = "bind" if self.place.startswith("/") else "volume"
        return f"type={kind},source={self.place},target={_CACHE}"

    def command(self, name: str, variables: Mapping[str, str]) -> list[str]:
        """Return the command that downloads, without the values of variables."""
        passed = [f"--env={variable}" for variable in _PASSED if variables.get(variable)]
        return [
            *("docker", "run", "--rm", "--pull=never", f"--name={name}", "--read-only"),
            *("--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(f"--mount={self.mount}", *passed),
            *("--env=HF_HUB_DISABLE_PROGRESS_BARS=1", "--env=HF_HUB_DISABLE_TELEMETRY=1"),
            *("--env=HF_HUB_VERBOSITY=error", "--env=HF_TOKEN_PATH=/dev/null"),
            *("--entrypoint=/usr/bin/tini", self.image, "--"),
            *("/opt/sparkforge/venv/bin/python", "-I", _PROGRAM),
            *(f"{_CACHE}/hub", self.model, self.revision),
        ]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``model fetch``."""

    target: str = needed("target whose model to download", metavar="NAME")
    dry_run: bool = switch("print the model and the folder, and exit")
    pins: Path | None = pins_option()
    output: OutputOptions


def run(options: Options) -> int:
    """Download, or say what would be downloaded; returns the exit code.

    Raises:
        UsageError: the target has no model of the hub, or the folder is missing.
        ImageError: no image of the target is here.
        FetchError, IntegrityError, StoreError: the download failed.
    """
    here = checkout(options.pins)
    variables = envfile.seen(here.root / ".env")
    engine = connect()
    wanted = _wanted(here, options.target, variables, engine)
    name = f"sparkforge-model-fetch-{os.getpid()}"
    command = wanted.command(name, variables)
    log.info(f"model    {wanted.model} at {wanted.revision}")
    log.info(f"to       {wanted.place}")
    log.info(f"with     {wanted.image}")
    if options.dry_run:
        log.info(f"command  {shlex.join(command)}")
    else:
        _download(engine, name, command, variables)
    log.document({**asdict(wanted), "complete": not options.dry_run})
    return 0


def _wanted(here: Checkout, name: str, variables: Mapping[str, str], engine: Engine) -> Wanted:
    target = here.pins.target(name)
    if target.model is None:
        msg = f"target {name} serves no model from the hub"
        raise UsageError(msg, "give the folder of a checkpoint: build.py serve --model DIR")
    model = here.pins.models[target.model]
    place = variables.get("SPARKFORGE_HF_CACHE") or composing.MODELS_VOLUME
    if place.startswith(("/", "~", ".")):
        folder = (here.root / Path(place).expanduser()).resolve()
        if not folder.is_dir():
            msg = f"SPARKFORGE_HF_CACHE is {place}, but {folder} does not exist"
            raise UsageError(
                msg, f"mkdir -p {shlex.quote(str(folder))}; see docs/serving.md for its permissions"
            )
        place = str(folder)
    image = composing.in_use(variables, name)
    if not image or not engine.has_image(image):
        images = composing.on_engine(engine, [name], variables)
        if not images:
            msg = f"no image of target {name} on this machine; the download runs in the image"
            raise ImageError(msg, f"build it: python3 build.py --target {name}")
        image = images[0].image
    return Wanted(name, model.repository, model.revision, place, image)


def _download(engine: Engine, name: str, command: list[str], variables: Mapping[str, str]) -> None:
    progress = Progress(log.info, lambda words: None)
    given = {variable: variables[variable] for variable in _PASSED if variables.get(variable)}
    try:
        ended = call(
            *command, env=given, check=False, stream=lambda line: progress.feed(line.encode())
        ).returncode
    except BaseException:
        _remove(engine, name)  # docker's own program may end before its container
        raise
    if progress.folder:
        log.info("complete; the first start of the server downloads nothing")
        return
    if progress.error:
        raise _KINDS.get(progress.code, FetchError)(progress.error, _AGAIN)
    msg = f"the download failed with exit code {ended}: {progress.last}"
    raise EngineError(msg, "an image of an older checkout cannot download: build it again")


def _remove(engine: Engine, name: str) -> None:
    from docker.errors import NotFound

    try:
        engine.client.containers.get(name).remove(force=True)
    except NotFound:
        log.detail(f"container {name} has ended")


COMMANDS = (Entry("model fetch", Options, run, "download the model to where Compose looks for it"),)
