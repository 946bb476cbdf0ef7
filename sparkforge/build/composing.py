"""The images, the variables and the volume that docker-compose.yml uses.

Every image keeps its own tag, and nothing removes one, so ``rollback`` can choose an older one.
"""

import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sparkforge.build import image
from sparkforge.build.options import CheckoutOptions, OutputOptions, command_options, usual_target
from sparkforge.core.disk import write_file
from sparkforge.core.errors import BuildError, FetchError, UsageError
from sparkforge.core.log import human_bytes, log
from sparkforge.core.run import call
from sparkforge.pins.pins import Pins
from sparkforge.runtime.engine import Engine, connect, is_published
from sparkforge.sources.project import PinsFile, checkout

MODELS_VOLUME = "sparkforge-models"
"""Of the models; docker-compose.yml names it. It is none of the Compose project's own, so that
``docker compose down --volumes`` keeps it."""


# -- .env --------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, str]:
    """Return the variables of a .env as Compose reads them; {} if it is missing."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values  # not needed by a build in which nothing changed

    text = path.read_text(encoding="utf-8", errors="replace")
    return {name: value or "" for name, value in dotenv_values(stream=io.StringIO(text)).items()}


def seen(path: Path) -> dict[str, str]:
    """Return Compose's variables: the environment, and others of .env."""
    return {**read(path), **os.environ}


def put(path: Path, ours: Mapping[str, str]) -> None:
    """Set variables in a .env, atomically; an empty value removes the line of its variable."""
    path = path.resolve()  # the target of a link
    before = path.read_text(errors="surrogateescape") if path.exists() else ""
    names = re.compile(rf"\s*(?:export\s+)?(?:{'|'.join(ours)})\s*=")
    lines = [line for line in before.splitlines() if not names.match(line)]
    for name, value in ours.items():
        # `$`, `#` and quotes are special in Compose
        plain = re.fullmatch(r"[\w@%+=:,./-]*", value)
        written = value if plain else "'" + value.replace("'", "\\'") + "'"
        lines += [f"{name}={written}"] if value else []
    after = "\n".join(lines) + "\n"
    if after != before:
        write_file(path, after.encode(errors="surrogateescape"))


def variable(target: str) -> str:
    """Return the name of Compose's variable for a target's image."""
    return "_".join(("SPARKFORGE_IMAGE", target.upper()))


def in_use(variables: Mapping[str, str], target: str) -> str:
    """Return the image that Compose uses for a target, or ""."""
    return variables.get(variable(target)) or variables.get("SPARKFORGE_IMAGE") or ""


def variables(compose: str) -> list[tuple[str, str]]:
    """Return the variables that users set and their descriptions; ``compose``: the file's text."""
    from sparkforge.serving.settings import Variables

    fields = {name: one for name, one in Variables.model_fields.items() if not one.exclude}
    rows = [
        (f"SPARKFORGE_{name.upper()}", " ".join((one.description or "").split()).replace("``", "`"))
        for name, one in fields.items()
    ]
    return sorted(rows + re.findall(r"^#   ([A-Z_, ]+): (.*)$", compose, re.MULTILINE))


def served_target(variables: Mapping[str, str], pins: Pins) -> str:
    """Return the target that Compose serves, also as one of two machines; else this machine's."""
    named = re.split(r"[ ,]+", variables.get("COMPOSE_PROFILES") or "")
    targets = (re.sub("-(head|worker)$", "", one) for one in named)
    return next((one for one in targets if one in pins.targets), usual_target())


# -- images ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltImage:
    """A name of an image of a target in the engine; a published image has several.

    ``size`` counts layers that other images share; ``used``: by Compose.
    """

    target: str
    image: str
    image_id: str
    made: str
    size: int
    used: bool


def on_engine(
    engine: Engine, targets: Sequence[str], variables: Mapping[str, str]
) -> list[BuiltImage]:
    """Return the images of targets, by target, the newest first."""
    found = []
    for held in engine.client.images.list(filters={"label": image.TARGET_LABEL}):
        attrs, target = held.attrs, held.labels[image.TARGET_LABEL]
        # those that a build gave it, and by digest those of registries; an image that is based on
        # ours has our labels, and other names
        digests: list[str] = attrs.get("RepoDigests") or []
        names = [name for name in held.tags if name.startswith(f"{image.repository(target)}:")]
        names += [name for name in digests if is_published(name) or not held.tags]
        made, size = attrs.get("Metadata", {}).get("LastTagTime", ""), attrs.get("Size", 0)
        for name in names if target in targets else ():
            used = in_use(variables, target) in (name, held.id)
            found.append(BuiltImage(target, name, str(held.id), str(made), int(size), used))
    found.sort(key=lambda built: built.made, reverse=True)
    return sorted(found, key=lambda built: built.target)


@command_options
class ImagesOptions(CheckoutOptions):
    target: str | None = None
    """list only this target's images"""


def images(options: ImagesOptions = ImagesOptions()) -> int:
    """List the built images and the one that Compose uses."""
    here = checkout(options.pins)
    targets = [options.target] if options.target else sorted(here.pins.targets)
    for target in targets:
        here.pins.target(target)
    built = on_engine(connect(), targets, seen(here.root / ".env"))
    log.document({"images": [asdict(one) for one in built]})
    rows: list[tuple[str, ...]] = [
        ("*" if one.used else "", one.image, one.made[:16].replace("T", " "), human_bytes(one.size))
        for one in built
    ]
    log.table(rows or [("", f"no image of {', '.join(targets)}", "", "")])
    log.info("*: used by Compose; to switch: build.py rollback --target NAME [IMAGE]")
    return 0


@command_options
class RollbackOptions:
    image: str | None = field(default=None, kw_only=False)
    """image from `build.py images` (default: the previous image)"""
    target: str
    """target whose image to switch"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def rollback(options: RollbackOptions) -> int:
    """Switch Compose to the previous image, or to the named one; BuildError if there is none."""
    here, target, wanted = checkout(options.pins), options.target, options.image
    pinned = here.pins.target(target)
    env_file = here.root / ".env"
    variables, engine = seen(env_file), connect()
    built = on_engine(engine, [target], variables)
    if wanted is not None:
        fitting = [one for one in built if one.image == wanted]
    else:
        at = next((at for at, one in enumerate(built) if one.used), len(built))
        # not another name of the same image
        fitting = [one for one in built[at:] if one.image_id != built[at].image_id]
    if not fitting:
        what = wanted or f"before {in_use(variables, target) or 'the one that Compose uses'}"
        hint = f"choose one of python3 build.py images --target {target}"
        raise BuildError(f"the engine has no image {what} of target {target}", hint)
    name, own = fitting[0].image, read(env_file)
    before = own.get(variable(target), "")
    served = {} if "COMPOSE_PROFILES" in own else {"COMPOSE_PROFILES": target}
    put(env_file, {**served, variable(target): name})
    if pinned.model is not None:
        engine.client.volumes.create(MODELS_VOLUME)  # the image may come from another machine
    log.document({"target": target, "image": name, "before": before})
    log.info(f"Compose uses {name}{f', not {before} any more' if before else ''}")
    if os.environ.get(variable(target), name) != name:
        log.warning(f"{variable(target)} in the environment overrides .env: unset it")
    log.info("next     python3 build.py up   # a running server keeps its image until then")
    return 0


# -- the model ---------------------------------------------------------------------------------

HUB = "/var/cache/sparkforge/huggingface/hub"
_PROGRAM = "/opt/sparkforge/bin/sparkforge/serving/checkpoint.py"
_PYTHON = "/usr/bin/tini -- /opt/sparkforge/venv/bin/python -I"


@command_options
class FetchOptions(CheckoutOptions):
    target: str
    """target whose model to download"""
    dry_run: bool = False
    """print the model and the folder, and exit"""


def fetch(options: FetchOptions) -> int:
    """Download a target's model before its first start, or say what would be downloaded.

    Compose runs the image's program (``serving/checkpoint.py``), as in the first start: with the
    same volume or folder, user, variables and checks.
    """
    here = checkout(options.pins)
    target = here.pins.target(options.target)
    if target.model is None:
        msg = f"target {options.target} serves no model from the hub"
        raise UsageError(msg, "give the folder of a checkpoint: build.py serve --model DIR")
    model = here.pins.models[target.model]
    variables = seen(here.root / ".env")
    name = in_use(variables, options.target)
    if not name:
        msg = f"Compose has no image of target {options.target}; it would download"
        raise BuildError(msg, f"build it: python3 build.py --target {options.target}")
    place = variables.get("SPARKFORGE_HF_CACHE") or MODELS_VOLUME
    container = f"sparkforge-model-fetch-{os.getpid()}"
    command = [
        *("docker", "compose", "--project-directory", str(here.root), "run", "--rm", "--no-deps"),
        *("--no-TTY", f"--name={container}", f"--entrypoint={_PYTHON}", options.target),
        *(_PROGRAM, HUB, model.repository, model.revision),
    ]
    log.info(f"{model.repository} at {model.revision} to {place}, with {name}")
    if options.dry_run:
        log.info(f"command  {shlex.join(command)}")
    else:
        try:
            done = call(*command, check=False, stream=True)
        finally:
            call("docker", "rm", "--force", container, check=False)  # Compose may end before it
        if done.returncode:
            said = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
            msg = f"the download failed with exit code {done.returncode}: {said}"
            hint = "the next run continues; an image of an older checkout cannot: build it again"
            raise FetchError(msg, hint)
    found = {"target": options.target, "model": model.repository, "revision": model.revision}
    log.document({**found, "place": place, "image": name, "complete": not options.dry_run})
    return 0
