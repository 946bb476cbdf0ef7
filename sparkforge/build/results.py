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
    """An upstream's source.

    Attributes:
        commit, tree: full SHAs in the store's repository.
        origin: for people: where it came from.
    """

    provider: Provider
    commit: str
    tree: str
    origin: str


@dataclass(frozen=True)
class ExternalResult:
    """A repository that an upstream's build reads.

    Attributes:
        repository: name of its folder among the store's repositories.
        submodules: commits by folder, inner submodules too.
    """

    commit: str
    repository: str
    submodules: Mapping[str, str]


@dataclass(frozen=True)
class SeriesResult:
    """A patched source.

    Attributes:
        source: commit before the patches.
        commit, tree: after them.
        touched: changed paths, each with the name of the last patch that changes it.
    """

    source: str
    commit: str
    tree: str
    touched: Mapping[str, str]


@dataclass(frozen=True)
class KernelsResult:
    """Machine code for GPUs, and its manifest, in the artefact's folder.

    Attributes:
        files: sha256 of each, by its path in the wheel.
    """

    files: Mapping[str, str]


@dataclass(frozen=True)
class BuilderResult:
    """The image that wheels are compiled in.

    Attributes:
        system: packages of the distribution, as ``sbom.system`` lists them.
    """

    image_id: str
    tag: str
    system: tuple[str, ...]


@dataclass(frozen=True)
class WheelResult:
    """A wheel: the file in the artefact's folder, and which of its members are ours.

    Attributes:
        left_out: changed files of the repository that no wheel ships.
        compile_only: of these, build rules, which only a compile uses.
        kernels: sha256 of our machine code and its manifest, among ``added``.
    """

    file: str
    sha256: str
    version: str
    replaced: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    compile_only: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NativeFile:
    """A native file of a compiled wheel.

    Attributes:
        origin: ``compiled`` from the patched tree, or taken from the ``release`` wheel.
    """

    sha256: str
    origin: Annotated[Literal["compiled", "release"], Field(alias="from")]


@dataclass(frozen=True)
class CompiledWheelResult(WheelResult):
    """A compiled wheel.

    Attributes:
        differs: files that no patch changes, and that differ from the release's.
    """

    natives: Mapping[str, NativeFile] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    compiled: Literal[True] = True


@dataclass(frozen=True)
class WheelhouseResult:
    """A folder of third-party wheels."""

    files: int


@dataclass(frozen=True)
class CheckpointResult:
    """The checkpoint of the preflight."""

    kind: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True)
class EnvironmentResult:
    """A virtual environment, in the artefact's folder."""

    kind: Literal["environment"] = "environment"


@dataclass(frozen=True)
class ImageResult:
    """An image in the engine.

    Attributes:
        digest: of its manifest; None where the engine's store has none.
        system: packages of the distribution, as ``sbom.system`` lists them.
    """

    tag: str
    image_id: str
    digest: str | None
    base: str
    system: tuple[str, ...]
    kind: Literal["image"] = "image"


@dataclass(frozen=True)
class ImageArchiveResult:
    """An image in a file of the artefact's folder, of a build without the engine's cache."""

    digest: str | None
    archive: str
    kind: Literal["image"] = "image"


@dataclass(frozen=True)
class Answer:
    """A server's first token after one of ``smoke.PROMPTS``, and its natural log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True)
class ReleaseProof:
    """What the unpatched release did with the same checkpoint.

    Attributes:
        done: ``refused``: it cannot serve it on this machine. ``compared``: it can, on a backend of
            its own, and answers ``smoke.PROMPTS`` as the patched server does.
        refusal: the line that it refuses with; where it was compared, with ``hidden`` hidden from
            that one process.
        hidden: the instruction set that was hidden for the refusal, or "".
        difference: of log-probabilities, the largest; 0 where it refused.
    """

    done: Literal["refused", "compared"]
    refusal: str
    hidden: str = ""
    difference: float = 0.0


@dataclass(frozen=True)
class SmokeResult:
    """What the smoke test saw; times in seconds.

    Attributes:
        ready_s: from start to the first 200 of ``/health``.
        completion_s: one completion of ``tokens`` tokens, not streamed.
        tokens: completion tokens that the server counted.
        text: what the model said, escaped (a random model says random bytes).
        stop_s: from SIGTERM to the end of the process.
        answers: to ``smoke.PROMPTS``.
        release: what the unpatched release did; None where not tried.
    """

    ready_s: float
    completion_s: float
    tokens: int
    text: str
    stop_s: float
    answers: tuple[Answer, ...]
    release: ReleaseProof | None = None


Product = ImageResult | ImageArchiveResult | EnvironmentResult
"""What a build serves."""
