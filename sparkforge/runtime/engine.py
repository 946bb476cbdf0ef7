"""The container engine: docker-py for containers and images, the CLI's buildx for builds.

An engine that is missing, too old or refuses, and an image that it lacks, are an MachineError.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.core.errors import BuildError, CommandError, MachineError, UsageError
from sparkforge.core.run import call, have

if TYPE_CHECKING:
    from docker import DockerClient

OLDEST_ENGINE = 25
"""docker-compose.yml's health check has a ``start_interval``, which older engines do not know. (To
build, with named build contexts and ``RUN --mount=type=bind,from=``, 23 would do.)"""
_INSTALL = (
    f"install Docker Engine {OLDEST_ENGINE} or newer with buildx, or build without one:"
    " --engine none"
)


@dataclass(frozen=True)
class BaseImage:
    """An image that others are built on."""

    reference: str
    """Its name, with the digest or of a local image."""
    digest: str
    """Of its manifest; the id of a local image."""


@dataclass(frozen=True)
class Engine:
    """A reachable engine that is new enough."""

    client: DockerClient
    version: str
    containerd_store: bool
    """Images are in containerd's store, which supports zstd layers."""
    context: str = "default"
    """Name of the engine in the docker CLI, and of its builder in buildx."""

    def image_id(self, reference: str) -> str:
        """Return the id of a local image; MachineError if the engine has no image of that name."""
        from docker.errors import APIError

        try:
            return str(self.client.images.get(reference).id)
        except APIError:  # missing, or not a valid name of an image
            msg = f"--base {reference}: no such image in the engine"
            remedy = (
                "build or load it first (scripts/make-base.sh NAME builds one without a"
                " registry), or give NAME@sha256:…"
            )
            raise MachineError(msg, remedy) from None

    def platform_of(self, image: str) -> str:
        """Return the platform of an image in the engine, e.g. ``linux/arm64``."""
        attrs = self.client.images.get(image).attrs
        return f"{attrs['Os']}/{attrs['Architecture']}"

    def has_image(self, image: str) -> bool:
        """Return whether the engine has an image, by its name or id."""
        from docker.errors import ImageNotFound

        try:
            self.client.images.get(image)
        except ImageNotFound:
            return False
        return True

    def load(self, archive: Path) -> None:
        """Load an image from its archive; BuildError if the engine refuses it."""
        try:
            call("docker", "load", "--input", archive, stream=True)
        except CommandError as error:
            msg = f"docker load failed:\n{error}"
            raise BuildError(msg, "see the docker output above") from error

    def remove(self, image: str) -> str:
        """Remove an image by name; returns the reason if it stays (a container uses it), or ""."""
        from docker.errors import APIError, NotFound

        try:
            self.client.images.remove(image)
        except NotFound:
            return ""  # another process was faster
        except APIError as error:
            return str(error.explanation or error)
        return ""

    def read_file(self, image: str, path: str) -> bytes:
        """Return a file of an image, without running anything of it."""
        from docker.errors import NotFound

        container = self.client.containers.create(image)
        try:
            pieces, _ = container.get_archive(path)
            with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
                file = archive.extractfile(archive.next() or path)
                return b"" if file is None else file.read()
        except NotFound:
            raise MachineError(f"image {image}: has no file {path}") from None
        finally:
            container.remove(v=True)

    def run_python(self, image: str, code: str, folder: str) -> bytes:
        """Return the output of Python code in an image, without network and with its packages.

        Args:
            folder: in the image, with further packages.
        """
        # by the CLI, which is attached: docker-py reads the engine's log, and of some megabytes in
        # one piece that gave lines cut in two
        command = (
            *("docker", "run", "--rm", "--network", "none", "--entrypoint", "python"),
            *("--env", f"PYTHONPATH={folder}", image, "-P", "-c", code),
        )
        try:
            return call(*command).stdout
        except CommandError as error:
            msg = f"Python in image {image} failed:\n{error}"
            raise MachineError(msg, "see its output above") from None

    def kept_as(self, name: str) -> tuple[str, ...]:
        """Return buildx's options for an image that never leaves this engine.

        Compressing its layers would be time for nothing.
        """
        if self.containerd_store:
            return "--output", f"type=image,name={name},compression=uncompressed,unpack=true"
        return "--load", "--tag", name

    def image_label(self, image: str, label: str) -> str:
        """Return a label of an image; the Dockerfile sets those that sparkforge reads."""
        value: str = self.client.images.get(image).labels[label]
        return value


def resolve(reference: str, engine: Engine | None) -> BaseImage:
    """Return a base image with the digest in its reference, or the id that the engine has for it.

    Raises:
        MachineError: the digest is malformed, or nothing has an image of that name.
    """
    _, at, digest = reference.partition("@")
    if at and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        msg = f"--base {reference}: {digest!r} is not a digest"
        raise MachineError(msg, "give NAME@sha256: and 64 hex digits")
    if not at and engine is None:
        msg = f"--base {reference}: cannot be resolved without a container engine"
        raise MachineError(msg, "give NAME@sha256:…, or start an engine")
    return BaseImage(reference, digest if engine is None or at else engine.image_id(reference))


def connect() -> Engine:
    """Connect to the engine that the docker CLI would use."""
    if not have("docker"):
        raise MachineError("no container engine: the docker program is not on the PATH", _INSTALL)
    import docker
    from docker.errors import DockerException

    context, host = _context()
    try:
        client = docker.DockerClient(host, timeout=600) if host else docker.from_env(timeout=600)
        version = str(client.version()["Version"])
        status = client.info().get("DriverStatus") or []
    except DockerException as error:
        where = host or os.environ.get("DOCKER_HOST", "its default socket")
        msg = f"no container engine answers at {where}: {_reason(error)}"
        raise MachineError(msg, f"start it, set DOCKER_HOST, or: {_INSTALL}") from None
    check_version(version)
    try:
        call("docker", "buildx", "version")
    except CommandError:
        msg = f"engine {version} answers, but the docker CLI has no buildx plugin"
        remedy = "install the package docker-buildx (or docker-buildx-plugin)"
        raise MachineError(msg, remedy) from None
    store = any("io.containerd.snapshotter" in str(value) for value in status)
    return Engine(client, version, store, context)


# an OSError in the text of other errors
_SYSTEM = re.compile(r"\w+Error\(\d+, '([^']+)'\)|\[Errno -?\d+\] ([^'\")]+)")


def _reason(error: Exception) -> str:
    """Return why an engine cannot be reached: the operating system's error, or the whole text."""
    found = _SYSTEM.search(str(error))
    return (found[1] or found[2]) if found else str(error).splitlines()[0][:200]


def _context() -> tuple[str, str | None]:
    """Return the name and address of the engine that the docker CLI would use.

    docker-py supports the default variables (DOCKER_HOST …) but no ``docker context``. Without this
    the CLI would build in one engine, and docker-py search another.
    """
    if os.environ.get("DOCKER_HOST"):
        return "default", None
    try:
        name = call("docker", "context", "show").stdout.decode().strip()
        if name == "default":
            return name, None
        form = "{{.Endpoints.docker.Host}}"
        host = call("docker", "context", "inspect", "--format", form, name).stdout.decode().strip()
    except CommandError as error:
        msg = f"docker cannot show its context:\n{error}"
        raise MachineError(msg, "select one: docker context use default") from None
    return name, host


def check_version(version: str) -> None:
    """Raise MachineError for an engine that is too old."""
    match = re.match(r"(\d+)\.", version)
    if match is None or int(match[1]) < OLDEST_ENGINE:
        msg = f"container engine {version} is too old: {OLDEST_ENGINE} or newer is needed"
        raise MachineError(msg, _INSTALL)


def choose(wish: str, base: str | None, image_base: str | None) -> tuple[Engine | None, str]:
    """Choose between an image, with an engine, and a virtual environment.

    Args:
        wish: ``auto``, ``docker`` or ``none``.
        image_base: the base image that pins.yaml has for the target, or None.

    Returns:
        The engine or None, and the reason in one sentence.
    """
    if wish == "none":
        if base is not None:
            raise UsageError("--base and --engine none conflict", "omit one of them")
        return None, "a virtual environment (--engine none)"
    if wish == "auto" and base is None and image_base is None:
        why = "no base image is pinned for this target (give one with --base)"
        return None, f"a virtual environment: {why}"
    try:
        engine = connect()
    except MachineError as error:
        if wish == "docker" or base is not None:
            raise
        return None, f"a virtual environment: {error.what}"
    if base is None and image_base is None:
        msg = "pins.yaml has no base image for this target"
        raise MachineError(msg, "give one: --base IMAGE (scripts/make-base.sh builds one)")
    return engine, f"an image, with engine {engine.version} on base {base or image_base}"


def container_state(container: Any) -> dict[str, Any]:
    """Return a container's fresh state, as the engine reports it."""
    container.reload()
    state: dict[str, Any] = container.attrs["State"]
    return state
