"""Dockerfile → image with ``docker buildx build`` (docker-py has no BuildKit).

Without ``--builder``, buildx uses the user's last builder of any project. One in a container sees
no local base image. One of another engine stores the image there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core.errors import BuildError, CommandError, MachineError
from sparkforge.core.run import call
from sparkforge.runtime.engine import Engine


@dataclass(frozen=True)
class Builder:
    """One of buildx's builders."""

    name: str
    driver: str
    """``docker`` is the BuildKit in an engine, which sees that engine's images."""
    platforms: frozenset[str]
    """Platforms of the programs that it runs, natively or emulated."""


@dataclass(frozen=True)
class ImageBuild:
    """One run of ``docker buildx build``."""

    dockerfile: Path
    context: Path
    """The folder that ``COPY`` without ``--from`` reads."""
    builder: str
    output: tuple[str, ...]
    """Options for the image's name and destination."""
    stage: str | None = None
    """Stage of the Dockerfile; None builds the last one."""
    platform: str | None = None
    """e.g. ``linux/arm64``; None builds for the engine's own."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    contexts: Mapping[str, Path] = field(default_factory=dict)
    """Further folders, by their names in the Dockerfile."""
    options: tuple[str, ...] = ()
    ca_bundle: Path | None = None
    """Certificates for a proxy that signs its own; mounted as a secret, never copied."""

    def command(self) -> list[str | Path]:
        """Return the command line."""
        command: list[str | Path] = ["docker", "buildx", "build", "--builder", self.builder]
        # the provenance is our own (build/provenance.py); buildx's has the time of the build in it
        command += ["--progress=plain", "--provenance=false", *self.output, *self.options]
        command += ["--file", self.dockerfile]
        if self.stage is not None:
            command += ["--target", self.stage]
        if self.platform is not None:
            command += ["--platform", self.platform]
        for option, values in (
            ("--build-context", self.contexts),
            ("--build-arg", self.arguments),
            ("--label", self.labels),
        ):
            for name, value in values.items():
                command += [option, f"{name}={value}"]
        if self.ca_bundle is not None:
            command += ["--secret", f"id=ca,src={self.ca_bundle}"]
        return [*command, self.context]


def build(request: ImageBuild) -> None:
    """Build an image, showing buildx's output; BuildError if that fails."""
    try:
        call(*request.command(), stream=True)
    except CommandError as error:
        msg = f"docker buildx build failed:\n{error}"
        raise BuildError(msg, "see the docker output above") from error


def choose(engine: Engine, wish: str | None) -> Builder:
    """Return the named builder, else the engine's own.

    Raises:
        MachineError: it does not exist, does not start, or belongs to another engine.
    """
    name = wish or engine.context
    builder = _inspect(name)
    if builder.driver == "docker" and name != engine.context:
        msg = f"--builder {name}: is the default builder of another engine than {engine.context}"
        raise MachineError(msg, f"omit --builder, or choose that engine: DOCKER_CONTEXT={name}")
    return builder


def _inspect(name: str, *words: str) -> Builder:
    try:
        return parse(name, call("docker", "buildx", "inspect", *words, name).stdout.decode())
    except CommandError as error:
        msg = f"--builder {name}: buildx cannot use it:\n{error}"
        raise MachineError(msg, "see docker buildx ls") from None


def parse(name: str, text: str) -> Builder:
    """Read the output of ``docker buildx inspect``."""

    def values(key: str) -> list[str]:
        return re.findall(rf"^{key}:[ \t]*(.*)$", text, re.MULTILINE)

    # an asterisk marks a platform that the user set
    words = [word.strip(" *") for line in values("Platforms") for word in line.split(",")]
    return Builder(name, (values("Driver") or ["unknown"])[0], frozenset(filter(None, words)))


def check(builder: Builder, engine: Engine, base: str, platform: str) -> None:
    """Refuse a base or a platform that the builder cannot use, before anything is fetched.

    Raises:
        MachineError: the base is a local image that the builder does not see or of another
            platform, or the platform's programs do not run there.
    """
    local = "@" not in base
    if local and builder.driver != "docker":
        msg = f"--builder {builder.name} reads from registries only, but --base {base} is local"
        raise MachineError(msg, "omit --builder, or give a base in a registry: NAME@sha256:…")
    if local and (found := engine.platform_of(base)) != platform:
        msg = f"--base {base}: is for {found}, but the target is for {platform}"
        machine = platform.rpartition("/")[2]
        remedy = f"use another base (scripts/make-base.sh --arch {machine} NAME builds one)"
        raise MachineError(msg, remedy)
    if not builder.platforms:  # it sleeps; starting it may fetch its image, so not before now
        builder = _inspect(builder.name, "--bootstrap")
    if platform not in builder.platforms:
        msg = f"builder {builder.name} cannot run programs for {platform}"
        remedy = (
            "apt-get install qemu-user-static binfmt-support on the engine's machine, or build on a"
            " machine of that kind; --until wheelhouse needs neither"
        )
        raise MachineError(msg, remedy)
