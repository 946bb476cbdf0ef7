"""Images in a registry: push and pull by the docker CLI, which has the user's credentials."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparkforge.core.errors import CommandError, MachineError, UsageError
from sparkforge.core.run import call

# the first part is a registry by docker's rules: it has a dot, a port, or is localhost
_NAME = re.compile(r"(localhost|[\w-]*[.:][\w.:-]*)(/[a-z0-9][a-z0-9._-]*)+")
_REMEDY = "check name and network; docker login REGISTRY; then run this again: it continues"


@dataclass(frozen=True)
class Reference:
    """An image in a registry, by its digest."""

    repository: str
    """REGISTRY/NAME."""
    digest: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"


def repository(text: str) -> str:
    """Return REGISTRY/NAME after checking it; UsageError if it has another form.

    The error does not quote it: it may have a password.
    """
    if not _NAME.fullmatch(text) or ":" in text.rpartition("/")[2]:
        msg = "the name of an image in a registry is not REGISTRY/NAME"
        raise UsageError(msg, "for example registry.example.org/team/sparkforge")
    return text


def reference(text: str) -> Reference | None:
    """Return the image that REGISTRY/NAME@sha256:… names; None for other texts."""
    name, _, digest = text.partition("@")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest) or not _NAME.fullmatch(name):
        return None  # NAME@sha256:… alone is an image that only the engine knows
    return Reference(name, digest)


def push(image: str, to: Reference, tag: str) -> None:
    """Push an image of the engine, and check that the registry has it by its digest.

    Raises:
        MachineError: docker fails, or the registry has no image with this digest.
    """
    name = f"{to.repository}:{tag}"
    _docker("image", "tag", image, name)
    try:
        _docker("push", name)
    finally:
        call("docker", "image", "rm", name, check=False)  # the name; the image has its own
    _docker("buildx", "imagetools", "inspect", str(to))


def pull(image: Reference) -> None:
    """Pull an image by its digest; MachineError if docker fails or the bytes differ."""
    _docker("pull", str(image))


def _docker(*words: str) -> None:
    try:
        call("docker", *words, stream=True)
    except CommandError as error:
        raise MachineError(error.what, _REMEDY) from None
