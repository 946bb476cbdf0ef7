"""The container engine: docker-py for containers and images, the docker CLI for all else.

An engine that is missing, too old or refuses, and an image that it lacks, are a MachineError. The
CLI builds with buildx, and pushes and pulls with the user's credentials.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.core.errors import BuildError, CommandError, MachineError, UsageError
from sparkforge.core.run import call

if TYPE_CHECKING:
    from docker import DockerClient

OLDEST_ENGINE = 25
"""docker-compose.yml's health check has a ``start_interval``, which older engines do not know."""
_INSTALL = (
    f"install Docker Engine {OLDEST_ENGINE} or newer with buildx; build.py build and serve also"
    " work without one: --engine none"
)
# the first part is a registry by docker's rules: it has a dot, a port, or is localhost
_NAME = re.compile(r"(localhost|[\w-]*[.:][\w.:-]*)(/[a-z0-9][a-z0-9._-]*)+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class BaseImage:
    """An image that others are built on."""

    reference: str
    digest: str
    """Of the manifest; the id of a local image."""


@dataclass(frozen=True)
class Engine:
    """A reachable engine that is new enough."""

    client: DockerClient
    version: str
    containerd_store: bool
    """Images are in containerd's store, which supports zstd layers."""
    context: str = "default"
    """Name of the engine in the docker CLI, and of its builder in buildx."""

    def image_id(self, image: str) -> str | None:
        """Return the id of an image by its name or id; None: the engine does not have it."""
        from docker.errors import APIError

        try:
            return str(self.client.images.get(image).id)
        except APIError:  # missing, or not a valid name of an image
            return None

    def run(self, image: str, *words: str, path: str = "") -> bytes:
        """Return the output of a program in an image, without network; ``path``: PYTHONPATH."""
        # by the CLI: docker-py reads the engine's log, where megabytes in one line were cut
        options = ("--rm", "--network=none", f"--entrypoint={words[0]}", f"--env=PYTHONPATH={path}")
        try:
            return call("docker", "run", *options, image, *words[1:]).stdout
        except CommandError as error:
            msg = f"{words[0]} in image {image} failed:\n{error}"
            raise MachineError(msg, "see its output above") from None


def docker(
    *words: str | Path, remedy: str, error: type[BuildError | MachineError], show: bool = True
) -> bytes:
    """Run the docker CLI and show or return its output; error: what is raised if it fails."""
    try:
        return call("docker", *words, stream=show).stdout
    except CommandError as failed:
        raise error(f"docker {words[0]} failed:\n{failed}", remedy) from failed


# -- the engine that is used -------------------------------------------------------------------


def choose(wish: str, base: str | None, image_base: str | None) -> tuple[Engine | None, str]:
    """Return the engine for an image, or None for a virtual environment, and why in one sentence.

    ``wish`` is ``auto``, ``docker`` or ``none``; ``image_base``: what pins.yaml has for the target.
    """
    pinned = base or image_base
    if wish == "none":
        if base is not None:
            raise UsageError("--base and --engine none conflict", "omit one of them")
        return None, "a virtual environment (--engine none)"
    if pinned is None and wish == "auto":
        return None, "a virtual environment (no base image is pinned; give one with --base)"
    try:
        engine = connect()
    except MachineError as error:
        if wish == "docker" or base is not None:
            raise
        return None, f"a virtual environment: {error.what}"
    if pinned is None:
        msg = "pins.yaml has no base image for this target"
        raise MachineError(msg, "give one: --base IMAGE (scripts/make-base.sh builds one)")
    return engine, f"an image, with engine {engine.version} on base {pinned}"


def connect() -> Engine:
    """Connect to the engine that the docker CLI would use."""
    if shutil.which("docker") is None:
        raise MachineError("no container engine: the docker program is not on the PATH", _INSTALL)
    from docker import from_env
    from docker.errors import DockerException

    host = "its socket"
    try:
        # docker-py supports the variables (DOCKER_HOST …) but no `docker context`
        form = ("--format", "{{.Name}} {{.Endpoints.docker.Host}}")
        context, host = call("docker", "context", "inspect", *form).stdout.decode().split()
        client = from_env(timeout=600, environment={**os.environ, "DOCKER_HOST": host})
        version = str(client.version()["Version"])
        status = client.info().get("DriverStatus") or []
        call("docker", "buildx", "version")
    except (DockerException, CommandError) as error:
        msg = f"no container engine answers at {host}: {str(error).splitlines()[0][:200]}"
        raise MachineError(msg, f"start Docker, set DOCKER_HOST, or: {_INSTALL}") from None
    if not re.match(r"\d+\.", version) or int(version.partition(".")[0]) < OLDEST_ENGINE:
        msg = f"container engine {version} is too old: {OLDEST_ENGINE} or newer is needed"
        raise MachineError(msg, _INSTALL)
    store = any("io.containerd.snapshotter" in str(value) for value in status)
    return Engine(client, version, store, context)


def resolve(reference: str, engine: Engine | None) -> BaseImage:
    """Return a base image with the digest in its reference, or the id that the engine has for it.

    MachineError: the digest is malformed, or nothing has an image of that name.
    """
    _, at, digest = reference.partition("@")
    found = digest if _DIGEST.fullmatch(digest) else None
    if not at and engine is not None:
        found = engine.image_id(reference)
    if found is None:
        msg = f"--base {reference}: no such image in the engine, and no digest"
        raise MachineError(msg, "give NAME@sha256:…, or build one first: scripts/make-base.sh NAME")
    return BaseImage(reference, found)


# -- builds ------------------------------------------------------------------------------------


def build_image(
    dockerfile: Path,
    context: Path,
    builder: str,
    output: tuple[str, ...],
    *,
    stage: str | None = None,
    platform: str | None = None,
    arguments: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    contexts: Mapping[str, Path] | None = None,
    options: tuple[str, ...] = (),
    ca_bundle: Path | None = None,
) -> None:
    """Build an image with ``docker buildx build``, and show its output; BuildError if that fails.

    ``context`` is what ``COPY`` without ``--from`` reads, ``output`` names the image and its
    destination; ``ca_bundle`` is mounted as a secret, never copied.
    """
    secret = None if ca_bundle is None else f"id=ca,src={ca_bundle}"
    found = [("target", stage), ("platform", platform), ("secret", secret)]
    found += [("build-context", f"{name}={path}") for name, path in (contexts or {}).items()]
    found += [("build-arg", f"{name}={value}") for name, value in (arguments or {}).items()]
    found += [("label", f"{name}={value}") for name, value in (labels or {}).items()]
    words = [f"--{option}={value}" for option, value in found if value is not None]
    # buildx's provenance has the time of the build in it
    start = ("buildx", "build", f"--builder={builder}", "--progress=plain", "--provenance=false")
    more: tuple[str | Path, ...] = (*output, *options, f"--file={dockerfile}", *words, context)
    docker(*start, *more, remedy="see the docker output above", error=BuildError)


def check_builder(engine: Engine, base: str, platform: str) -> None:
    """Check that the engine's own builder can make an image on a base.

    MachineError: a local base is for another platform, or the builder runs no programs of that.
    """
    text = call("docker", "buildx", "inspect", "--bootstrap", engine.context).stdout.decode()
    kind = platform.split("/")[1]
    if "@" not in base and engine.client.images.get(base).attrs["Architecture"] != kind:
        msg = f"--base {base}: is not for {platform}, as the target is"
        raise MachineError(msg, "use another base (scripts/make-base.sh --arch builds one)")
    # an asterisk marks a platform that the user set
    if platform not in re.findall(r"linux/\w+", " ".join(re.findall(r"(?m)^Platforms:.*$", text))):
        remedy = (
            "apt-get install qemu-user-static binfmt-support on the engine's machine, or build on a"
            " machine of that kind; --until wheelhouse needs neither"
        )
        raise MachineError(f"the engine cannot run programs for {platform}", remedy)


# -- registries --------------------------------------------------------------------------------


def repository(text: str) -> str:
    """Return REGISTRY/NAME after checking it; UsageError, without the text: it may be secret."""
    if not _NAME.fullmatch(text) or ":" in text.rpartition("/")[2]:
        msg = "the name of an image in a registry is not REGISTRY/NAME"
        raise UsageError(msg, "for example registry.example.org/team/sparkforge")
    return text


def is_published(text: str) -> bool:
    """Return whether a name is REGISTRY/NAME@sha256:…, and not that of an image of the engine."""
    name, _, digest = text.partition("@")
    return bool(_DIGEST.fullmatch(digest) and _NAME.fullmatch(name))


def push(image: str, to: str, tag: str) -> None:
    """Push an image of the engine, and check that the registry has it by its digest, in ``to``."""
    name = f"{to.partition('@')[0]}:{tag}"
    call("docker", "image", "tag", image, name)
    try:
        registry("push", name)
    finally:
        call("docker", "image", "rm", name, check=False)  # the name; the image has its own
    registry("buildx", "imagetools", "inspect", to)


def join(images: Sequence[str], tag: str) -> str:
    """Make one name of images for several platforms, and return it by its digest."""
    create = ("buildx", "imagetools", "create", f"--tag={images[0].partition('@')[0]}:{tag}")
    # the same images in the same order give the same list
    text = registry(*create, "--dry-run", *images, show=False).removesuffix(b"\n")
    registry(*create, *images)
    reference = f"{images[0].partition('@')[0]}@sha256:{hashlib.sha256(text).hexdigest()}"
    registry("buildx", "imagetools", "inspect", reference)
    return reference


def parts(image: str) -> list[str]:
    """Return the images for single platforms that a name in a registry stands for."""
    found = json.loads(registry("buildx", "imagetools", "inspect", "--raw", image, show=False))
    name = image.partition("@")[0]
    return [f"{name}@{one['digest']}" for one in found.get("manifests", ())] or [image]


def labels(image: str) -> dict[str, str]:
    """Return the labels of an image for one platform in its registry."""
    how = ("imagetools", "inspect", "--format", "{{json .Image}}")
    found = json.loads(registry("buildx", *how, image, show=False))
    return dict((found.get("config") or {}).get("Labels") or {})


def registry(*words: str, show: bool = True) -> bytes:
    """Run docker with a registry; MachineError if it fails, or an image's bytes differ."""
    remedy = "check name and network; docker login REGISTRY; then run this again: it continues"
    return docker(*words, remedy=remedy, error=MachineError, show=show)
