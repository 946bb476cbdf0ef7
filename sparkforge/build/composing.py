"""The images and the volume that docker-compose.yml uses.

Every image keeps its own tag, so ``rollback`` can choose an older one. Only ``images --prune``
removes images, and never one that Compose uses or ``rollback`` would choose next.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from cyclopts import Parameter

from sparkforge.build import image
from sparkforge.build.options import OutputOptions, platform_of
from sparkforge.core.errors import BuildError, UsageError
from sparkforge.core.log import human_bytes, log
from sparkforge.pins import pins
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import envfile, registry
from sparkforge.runtime.engine import Engine, connect
from sparkforge.sources.project import PinsFile, checkout

if TYPE_CHECKING:
    from docker.models.images import Image as DockerImage

MODELS_VOLUME = "sparkforge-models"
"""Of the models; docker-compose.yml names it. It is none of the Compose project's own, so that
``docker compose down --volumes`` keeps it."""


@dataclass(frozen=True)
class BuiltImage:
    """A name of an image of a target in the engine; a published image has several."""

    target: str
    image: str
    """The name, which no other image ever gets."""
    image_id: str
    release: str
    key: str
    made: str
    """Time when it was built or loaded."""
    size: int
    """Bytes of all its layers, including shared ones."""
    used: bool
    """Compose uses it."""


def variable(target: str) -> str:
    """Return the name of Compose's variable for a target's image."""
    return "_".join(("SPARKFORGE_IMAGE", target.upper()))


def in_use(variables: Mapping[str, str], target: str) -> str:
    """Return the image that Compose uses for a target, or ""."""
    return variables.get(variable(target)) or variables.get("SPARKFORGE_IMAGE") or ""


def familiar(name: str) -> str:
    """Return an image's name as the engine writes it: without the default registry."""
    return name.removeprefix("docker.io/")


def _names(docker_image: DockerImage, repository: str) -> list[str]:
    """Return an image's names: those that a build gave it, and by digest those of registries.

    An image that is based on ours has our labels, and other names.
    """
    digests: list[str] = docker_image.attrs.get("RepoDigests") or []
    return [
        *(name for name in docker_image.tags if name.startswith(f"{repository}:")),
        *(name for name in digests if registry.reference(name) or not docker_image.tags),
    ]


def keep_models(engine: Engine, target: pins.Target, image_platform: str) -> None:
    """Create the volume of the models if Compose needs it here."""
    served_here = MACHINES.get(platform.machine()) == image_platform
    if target.model is not None and served_here:
        engine.client.volumes.create(MODELS_VOLUME)


def on_engine(
    engine: Engine, targets: Sequence[str], variables: Mapping[str, str]
) -> list[BuiltImage]:
    """Return the images of targets, by target, the newest first."""
    found = []
    for docker_image in engine.client.images.list(filters={"label": image.TARGET_LABEL}):
        labels, attrs = docker_image.labels, docker_image.attrs
        target = labels[image.TARGET_LABEL]
        if target not in targets:
            continue
        found += [
            BuiltImage(
                target,
                name,
                str(docker_image.id),
                labels.get("org.opencontainers.image.version", ""),
                labels.get(image.KEY_LABEL, ""),
                str(attrs.get("Metadata", {}).get("LastTagTime", "")),
                int(attrs.get("Size", 0)),
                familiar(in_use(variables, target)) in (name, docker_image.id),
            )
            for name in _names(docker_image, image.repository(target))
        ]
    newest = sorted(found, key=lambda built: built.made, reverse=True)
    return sorted(newest, key=lambda built: built.target)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ImagesOptions:
    """Options of ``images``."""

    target: str | None = None
    """list only this target's images"""
    prune: bool = False
    """remove images older than the one before the one that Compose uses"""
    dry_run: bool = False
    """print the images and exit"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RollbackOptions:
    """Options of ``rollback``."""

    image: str | None = field(default=None, kw_only=False)
    """image or tag from `build.py images` (default: the previous image)"""
    target: str
    """target whose image to switch"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def images(options: ImagesOptions = ImagesOptions()) -> int:
    """List the built images and the one that Compose uses, or remove old images."""
    if options.dry_run and not options.prune:
        raise UsageError("--dry-run needs --prune", "add --prune, or omit it")
    here = checkout(options.pins)
    targets = [options.target] if options.target else sorted(here.pins.targets)
    for target in targets:
        here.pins.target(target)
    variables = envfile.seen(here.root / ".env")
    engine = connect()
    built = on_engine(engine, targets, variables)
    if options.prune:
        return _prune(engine, built, dry_run=options.dry_run)
    missing = {
        target: name
        for target in targets
        if (name := in_use(variables, target))
        and not any(image.used for image in built if image.target == target)
    }
    log.document({"images": [asdict(image) for image in built], "missing": missing})
    if built:
        log.table([_row(image) for image in built])
        log.info(
            "*: used by Compose; to switch: build.py rollback --target NAME [IMAGE];"
            " remove old ones: build.py images --prune"
        )
    else:
        log.info(f"the engine has no image of {', '.join(targets)}")
    for target, name in missing.items():
        log.warning(f"{variable(target)} is {name}, which the engine does not have")
    return 0


def _row(image: BuiltImage) -> tuple[str, ...]:
    made = image.made[:16].replace("T", " ")
    used = "*" if image.used else ""
    return used, image.image, made, human_bytes(image.size), f"key {image.key[:12]}"


def old_images(built: Sequence[BuiltImage]) -> list[BuiltImage]:
    """Return the images to remove: older than the one before the one that Compose uses.

    If Compose uses no image of a target, the target's newest image counts as used.

    Args:
        built: as ``on_engine`` gives them.
    """
    old: list[BuiltImage] = []
    for _, group in itertools.groupby(built, key=lambda image: image.target):
        names = list(group)
        ids = list(dict.fromkeys(image.image_id for image in names))
        used = next((ids.index(image.image_id) for image in names if image.used), 0)
        old += [image for image in names if ids.index(image.image_id) > used + 1]
    return old


def _prune(engine: Engine, built: Sequence[BuiltImage], *, dry_run: bool) -> int:
    """Remove old images, or print them; images of containers stay, with a warning."""
    removed, stay = [], {}
    for old in old_images(built):
        if dry_run:
            log.info(f"would remove {old.image}, {human_bytes(old.size)}, less what others share")
        elif why := engine.remove(old.image):
            stay[old.image] = why
            log.warning(f"{old.image} stays: {why}")
            continue
        else:
            log.info(f"removed {old.image}")
        removed.append(old.image)
    if not removed:
        log.info("nothing to remove")
    log.document({"removed": removed, "stay": stay, "dry_run": dry_run})
    return 0


def rollback(options: RollbackOptions) -> int:
    """Switch Compose to the previous image, or to the named one; BuildError if there is none."""
    place = checkout(options.pins)
    target = options.target
    pinned = place.pins.target(target)
    env_file = place.root / ".env"
    variables, engine = envfile.seen(env_file), connect()
    built = on_engine(engine, [target], variables)
    chosen = _chosen(built, target, options.image, in_use(variables, target))
    here = envfile.read(env_file)
    before = here.get(variable(target), "")
    served = {} if "COMPOSE_PROFILES" in here else {"COMPOSE_PROFILES": target}
    envfile.put(env_file, {**served, variable(target): chosen.image})
    keep_models(engine, pinned, platform_of(pinned))  # the image may come from another machine
    log.document({"target": target, "image": chosen.image, "before": before})
    log.info(f"Compose uses {chosen.image}{f', not {before} any more' if before else ''}")
    if (outside := os.environ.get(variable(target))) and outside != chosen.image:
        log.warning(f"{variable(target)} in the environment overrides .env: unset it")
    log.info("next     docker compose up -d   # a running server keeps its image until then")
    return 0


def _chosen(built: Sequence[BuiltImage], target: str, wanted: str | None, used: str) -> BuiltImage:
    """Return the named image, else the one before the one that Compose uses."""
    hint = f"choose one of python3 build.py images --target {target}"
    if wanted is not None:
        for image in built:
            names = (image.image, image.image.partition(":")[2], image.image_id)
            if familiar(wanted) in names:
                return image
        raise BuildError(f"the engine has no image {wanted} of target {target}", hint)
    at = next((at for at, image in enumerate(built) if image.used), None)
    if at is None:
        what = f"{used}, which Compose uses, is gone" if used else "Compose uses no image yet"
        raise BuildError(f"no previous image of {target} is known: {what}", hint)
    for image in built[at + 1 :]:
        if image.image_id != built[at].image_id:  # not another name of the same image
            return image
    raise BuildError(f"{built[at].image} is the oldest image of target {target}", hint)
