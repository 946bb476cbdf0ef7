"""The results of a build's items, one type for each kind.

The store and the receipt hold them as JSON objects with these fields. A record that does not load
as its type, for example that of an older version, counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from sparkforge.pins.pins import Provider


@dataclass(frozen=True)
class SourceResult:
    """An upstream's source."""

    provider: Provider
    commit: str
    tree: str
    """``commit``, ``tree``: full SHAs in the store's repository."""
    origin: str
    """Its origin, for people."""


@dataclass(frozen=True)
class ExternalResult:
    """A repository that an upstream's build reads."""

    commit: str
    sha256: str
    """Of the archive of its files, in the artefact's folder."""


@dataclass(frozen=True)
class SeriesResult:
    """A patched source."""

    source: str
    """Commit before the patches."""
    commit: str
    tree: str
    """``commit``, ``tree``: after them."""
    touched: Mapping[str, str]
    """Changed paths, each with the name of the last patch that changes it."""


@dataclass(frozen=True)
class KernelsResult:
    """Machine code for GPUs, and its manifest, in the artefact's folder."""

    files: Mapping[str, str]
    """sha256 of each, by its name."""


@dataclass(frozen=True)
class BuilderResult:
    """The image that wheels are compiled in."""

    image_id: str
    tag: str
    system: tuple[str, ...]
    """Packages of the distribution, as ``sbom.system`` lists them."""


@dataclass(frozen=True)
class OwnWheel:
    """A wheel that a build made: the file in the artefact's folder."""

    file: str
    sha256: str
    version: str


@dataclass(frozen=True)
class WheelResult(OwnWheel):
    """A wheel of an upstream, and which of its members are ours."""

    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Changed files of the repository that no wheel ships."""
    compile_only: tuple[str, ...] = ()
    """Of these, build rules, which only a compile uses."""


@dataclass(frozen=True)
class PluginResult(OwnWheel):
    """The wheel of our plugin for vLLM."""

    kernels: Mapping[str, str]
    """sha256 of its machine code and their manifest, by their paths in the wheel."""


@dataclass(frozen=True)
class PackResult(OwnWheel):
    """A wheel of FlashInfer's modules.

    Attributes:
        modules: sha256 of each library, by its module's name.
        units: sources that they were compiled from.
    """

    modules: Mapping[str, str]
    units: int


@dataclass(frozen=True)
class NativeFile:
    """A native file of a compiled wheel."""

    sha256: str
    origin: Annotated[Literal["compiled", "release"], Field(alias="from")]
    """``compiled`` from the patched tree, or taken from the ``release`` wheel."""


@dataclass(frozen=True)
class CompiledWheelResult(WheelResult):
    """A wheel of an upstream, with compiled native files."""

    natives: Mapping[str, NativeFile] = field(default_factory=dict)
    compiled: Literal[True] = True


@dataclass(frozen=True)
class WheelhouseResult:
    """A folder of third-party wheels."""

    files: int


@dataclass(frozen=True)
class CheckpointResult:
    """The checkpoint of the preflight."""

    files: Mapping[str, str]
    """sha256 of each file, by its path in the artefact's folder and in the image's share."""


@dataclass(frozen=True)
class EnvironmentResult:
    """A virtual environment, in the artefact's folder."""


@dataclass(frozen=True)
class ImageResult:
    """An image in the engine."""

    tag: str
    image_id: str
    digest: str | None
    """Of its manifest; None where the engine's store has none."""
    base: str
    system: tuple[str, ...]
    """Packages of the distribution, as ``sbom.system`` lists them."""


@dataclass(frozen=True)
class ImageArchiveResult:
    """An image in a file of the artefact's folder, of a build without the engine's cache."""

    digest: str | None
    archive: str


@dataclass(frozen=True)
class Answer:
    """A server's first token after one of ``smoke.PROMPTS``, and its natural log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True)
class ReleaseProof:
    """Result of the unpatched release with the same checkpoint."""

    done: Literal["refused", "compared"]
    """``refused``: it cannot serve it on this machine. ``compared``: it can, on a backend of its
    own, and answers ``smoke.PROMPTS`` as the patched server does."""
    refusal: str
    """The line that it refuses with; where it was compared, with ``hidden`` hidden from that one
    process."""
    hidden: str = ""
    """The instruction set that was hidden for the refusal, or ""."""
    difference: float = 0.0
    """Of log-probabilities, the largest; 0 where it refused."""


@dataclass(frozen=True)
class SmokeResult:
    """Result of the smoke test; times in seconds."""

    ready_s: float
    """From start to the first 200 of ``/health``."""
    completion_s: float
    """One completion of ``tokens`` tokens, not streamed."""
    tokens: int
    """Completion tokens that the server counted."""
    text: str
    """The model's text, escaped (a random model gives random bytes)."""
    stop_s: float
    """From SIGTERM to the end of the process."""
    answers: tuple[Answer, ...]
    """To ``smoke.PROMPTS``."""
    release: ReleaseProof | None = None
    """Result of the unpatched release; None if it was not tried."""


Product = ImageResult | ImageArchiveResult | EnvironmentResult
"""A result that can be served."""
