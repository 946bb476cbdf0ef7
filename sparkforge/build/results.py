"""The results of a build, one type for each kind; the store and the receipt hold them as JSON.

A record that does not load as its type, for example that of an older version, counts as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparkforge.core.disk import intact
from sparkforge.pins.pins import Provider
from sparkforge.store.store import Artefact


@dataclass(frozen=True)
class SourceResult:
    """An upstream's source: full SHAs in the store's repository, and its origin for people."""

    provider: Provider
    commit: str
    tree: str
    origin: str


@dataclass(frozen=True)
class SeriesResult:
    """A source before and after its patches; changed paths with the last patch of each."""

    source: str
    commit: str
    tree: str
    touched: Mapping[str, str]


@dataclass(frozen=True)
class FilesResult:
    """Files of the result's folder, by path with their sha256: machine code, an archive."""

    files: Mapping[str, str]


def all_intact(artefact: Artefact[FilesResult]) -> bool:
    """Return whether the files of a result are as they were made."""
    return all(intact(artefact.path / name, of) for name, of in artefact.result.files.items())


@dataclass(frozen=True)
class OwnWheel:
    """A wheel that a build made: the file in the result's folder."""

    file: str
    sha256: str
    version: str


@dataclass(frozen=True)
class WheelResult(OwnWheel):
    """A wheel of an upstream, and which of its members are ours.

    ``left_out``: changed files that no wheel ships; ``compile_only``: the build rules of these.
    """

    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    compile_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompiledWheelResult(WheelResult):
    """A wheel of an upstream; sha256 of its compiled native files, by paths in the wheel."""

    natives: Mapping[str, str] = field(default_factory=dict)
    compiled: Literal[True] = True


@dataclass(frozen=True)
class PluginResult(OwnWheel):
    """The wheel of our plugin for vLLM; sha256 of its machine code, by paths in the wheel."""

    kernels: Mapping[str, str]


@dataclass(frozen=True)
class PackResult(OwnWheel):
    """A wheel of FlashInfer's modules: sha256 of each library."""

    modules: Mapping[str, str]


@dataclass(frozen=True)
class WheelhouseResult:
    """A folder with third-party wheels, by name with their sha256."""

    files: Mapping[str, str]


@dataclass(frozen=True)
class EnvironmentResult:
    """A virtual environment, in the result's folder."""


@dataclass(frozen=True)
class ImageArchiveResult:
    """An image in a file of the result's folder; ``digest``: of its manifest, if that is known."""

    digest: str | None
    archive: str


@dataclass(frozen=True)
class ImageResult:
    """An image in the engine; ``system``: the distribution's packages, as in the SBOM."""

    tag: str
    image_id: str
    digest: str | None
    base: str
    system: tuple[str, ...]


Product = ImageResult | ImageArchiveResult | EnvironmentResult
"""A result that can be served."""


@dataclass(frozen=True)
class SmokeResult:
    """Times of a start, of one completion of ``tokens`` tokens, and of the end, in seconds.

    ``release``: the line with which the unpatched release refused the checkpoint, if it was tried.
    """

    ready_s: float
    completion_s: float
    tokens: int
    stop_s: float
    release: str = ""
