"""`build.py model fetch`: a target's model on this machine before its first start.

The image downloads, as its first start would (``serving/checkpoint.py``): into the same volume or
folder, as the same user, with the same checks. So nothing here knows the hub.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from sparkforge.build import composing
from sparkforge.build.options import OutputOptions
from sparkforge.core.errors import (
    BuildError,
    FetchError,
    IntegrityError,
    MachineError,
    StoreError,
    UsageError,
)
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.runtime import envfile
from sparkforge.runtime.engine import connect
from sparkforge.serving.errors import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, EX_NOHOST
from sparkforge.sources.project import Checkout, PinsFile, checkout

_CACHE = "/var/cache/sparkforge/huggingface"
_PROGRAM = "/opt/sparkforge/bin/sparkforge/serving/checkpoint.py"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_PASSED = (
    *(name for proxy in _PROXIES for name in (proxy, proxy.lower())),
    *("HF_ENDPOINT", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_TOKEN"),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``model fetch``."""

    target: str
    """target whose model to download"""
    dry_run: bool = False
    """print the model and the folder, and exit"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Download, or say what would be downloaded; returns the exit code.

    Raises:
        UsageError: the target has no model of the hub, or the folder is missing.
        BuildError: no image of the target is here.
        FetchError, IntegrityError, StoreError: the download failed.
    """
    here = checkout(options.pins)
    variables = envfile.seen(here.root / ".env")
    target = here.pins.target(options.target)
    if target.model is None:
        msg = f"target {options.target} serves no model from the hub"
        raise UsageError(msg, "give the folder of a checkpoint: build.py serve --model DIR")
    model = here.pins.models[target.model]
    place = _place(here, variables)
    image = _image(options.target, variables)
    name = f"sparkforge-model-fetch-{os.getpid()}"
    kind = "bind" if place.startswith("/") else "volume"
    given = {variable: variables[variable] for variable in _PASSED if variables.get(variable)}
    command = [
        *("docker", "run", "--rm", "--pull=never", f"--name={name}", "--read-only"),
        *("--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        f"--mount=type={kind},source={place},target={_CACHE}",
        *(f"--env={variable}" for variable in given),  # values are secrets
        *("--env=HF_HUB_DISABLE_PROGRESS_BARS=1", "--env=HF_HUB_DISABLE_TELEMETRY=1"),
        *("--env=HF_HUB_VERBOSITY=error", "--env=HF_TOKEN_PATH=/dev/null"),
        *("--entrypoint=/usr/bin/tini", image, "--", "/opt/sparkforge/venv/bin/python", "-I"),
        *(_PROGRAM, f"{_CACHE}/hub", model.repository, model.revision),
    ]
    log.info(f"model    {model.repository} at {model.revision}")
    log.info(f"to       {place}")
    log.info(f"with     {image}")
    if options.dry_run:
        log.info(f"command  {shlex.join(command)}")
    else:
        _download(name, command, given)
    log.document(
        {
            "target": options.target,
            "model": model.repository,
            "revision": model.revision,
            "place": place,
            "image": image,
            "complete": not options.dry_run,
        }
    )
    return 0


def _place(here: Checkout, variables: Mapping[str, str]) -> str:
    """Return the volume, or the folder of this machine, where Compose looks for models."""
    place = variables.get("SPARKFORGE_HF_CACHE") or composing.MODELS_VOLUME
    if not place.startswith(("/", "~", ".")):
        return place
    folder = (here.root / Path(place).expanduser()).resolve()
    if not folder.is_dir():
        msg = f"SPARKFORGE_HF_CACHE is {place}, but {folder} does not exist"
        hint = f"mkdir -p {shlex.quote(str(folder))}; see docs/serving.md for its permissions"
        raise UsageError(msg, hint)
    return str(folder)


def _image(target: str, variables: Mapping[str, str]) -> str:
    """Return the image that Compose uses, else the newest of the target."""
    engine = connect()
    image = composing.in_use(variables, target)
    if image and engine.has_image(image):
        return image
    if images := composing.on_engine(engine, [target], variables):
        return images[0].image
    msg = f"no image of target {target} on this machine; the download runs in the image"
    raise BuildError(msg, f"build it: python3 build.py --target {target}")


def _download(name: str, command: list[str], given: Mapping[str, str]) -> None:
    lines = ["no output"]

    def show(line: str) -> None:
        lines.append(line.removeprefix("entrypoint: ").removeprefix("error: "))
        log.info(lines[-1])

    try:
        code = call(*command, env=given, check=False, stream=show).returncode
    except BaseException:
        call("docker", "rm", "--force", name, check=False)  # docker run may end before it
        raise
    kinds = {EX_DATAERR: IntegrityError, EX_CANTCREAT: StoreError}
    kinds |= {EX_NOHOST: FetchError, EX_CONFIG: FetchError}
    if code in kinds:
        raise kinds[code](lines[-1], "the next run continues from here")
    if code:
        msg = f"the download failed with exit code {code}: {lines[-1]}"
        raise MachineError(msg, "an image of an older checkout cannot download: build it again")
    log.info("complete; the first start of the server downloads nothing")
