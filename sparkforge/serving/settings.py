"""The container's variables, read and checked; docs/variables.md is made of this module."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from sparkforge.serving import profile
from sparkforge.serving.options import StartError


def _split(value: Any) -> Any:
    return tuple(value.replace(",", " ").split())


def _pairs(value: Any) -> Any:
    return {one.partition("=")[0].replace("-", "_"): one.partition("=")[2] for one in _split(value)}


class Checks(BaseModel, frozen=True, extra="forbid"):
    """Which checks run, and how strictly: ``Variables.checks``."""

    preflight: Literal["auto", "off", "always"] = "auto"
    backends: Literal["fail", "warn", "off"] | None = None  # None: the profile decides
    warm_up: Literal["off", "on"] | None = None
    guard: Literal["off", "warn", "on"] | None = None
    hang: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60


Words = Annotated[tuple[str, ...], BeforeValidator(shlex.split)]
Origin = Annotated[
    str, Field(pattern=r"^https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?$", max_length=200)
]
Origins = Annotated[tuple[Origin, ...], BeforeValidator(_split)]
Listen = Annotated[str, Field(pattern=r"^(\*|127\.0\.0\.1|0\.0\.0\.0):[0-9]{1,5}$")]


class Variables(BaseModel, frozen=True, use_attribute_docstrings=True):
    """All variables ``SPARKFORGE_*`` of the image, but for two machines or a router.

    An empty value stands for the default, but in ``SPARKFORGE_PROFILE``.
    """

    model: Annotated[str, Field(pattern="^[^-@]")] = "/model"
    """A folder in the container, or a name on the hub, which is downloaded first:
    ``NAME@REVISION``, with a commit, branch or tag; without it the newest."""
    model_name: str = ""
    """The model's name for clients; without it the model's own."""
    profile: str | None = None
    """``exact``, ``balanced``, ``fast`` or ``fastest``, the choices of the image's profile; or a
    profile file in the container, with a / in its path; empty: no profile."""
    serve_args: Words = ()
    """Options of the target, set by the build."""
    extra_args: Words = ()
    """Further options of ``vllm serve``, like ``--max-num-seqs 8``."""
    checks: Annotated[Checks, BeforeValidator(_pairs)] = Checks()
    """``NAME=VALUE`` with spaces or commas between: ``preflight`` (auto, off, always), ``backends``
    (fail, warn, off: where vLLM chooses others), ``warm-up`` (off, on), ``guard`` of memory (off,
    warn, on), ``hang`` (60; seconds without progress until the server is ended, 0: never)."""
    restart: str = ""
    """Docker's restart policy of this container, which cannot see it. Where it restarts without
    limit, the entrypoint waits instead of ending for an error that a restart does not fix."""
    jit_dir: Path | None = None
    """Folder of compiled kernels, with one for each build and device; set by the image."""
    share: Annotated[Path, Field(exclude=True)] = Path("/opt/sparkforge/share")
    """The image's folder of data; for trials outside of an image."""
    release: str = ""
    """Of the image; set by the build."""
    bind: str = ""
    """The host's address of the published port; another than loopback needs an API key."""
    allow_open: bool = False
    """1: no API key is needed."""
    origins: Origins = ()
    """Web pages that may ask, like ``http://localhost:3000``."""
    open_metrics: bool = False
    """1: /metrics needs no API key."""
    listen: Listen = "*:8000"
    """Address and port in the container; the address is ``*``, 127.0.0.1 or 0.0.0.0."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Variables:
        """Read and check the variables."""
        found = {
            name: text
            for name in cls.model_fields
            if (text := environment.get(f"SPARKFORGE_{name.upper()}", ""))
            or (name == "profile" and profile.VARIABLE in environment)
        }
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            name, *inner = map(str, first["loc"])
            given = "" if name.endswith("_args") else f" {found[name][:100]!r}"
            msg = f"SPARKFORGE_{name.upper()}{given}: {' '.join([*inner, first['msg']])}"
            raise StartError(msg) from None
