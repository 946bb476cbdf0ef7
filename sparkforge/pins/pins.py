"""pins.yaml → a frozen, typed model. Unknown keys, short SHAs and floating tags are errors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from sparkforge.core.errors import PinsError, UsageError
from sparkforge.pins import checks, yamlfile
from sparkforge.pins.compiling import Compile, Plugin
from sparkforge.pins.contracts import Contract, MachineCode
from sparkforge.pins.pathmap import PathRule
from sparkforge.pins.types import (
    MACHINES,
    REMEDIES,
    UNKNOWN,
    AbsolutePath,
    Commit,
    Count,
    CudaArch,
    DebPackage,
    Digest,
    FileName,
    FilePath,
    GitUrl,
    ImageRepository,
    ImageTag,
    Model,
    ModelRepository,
    Module,
    Name,
    Place,
    Platform,
    ReleaseFileName,
    Sha256,
    Tag,
    TorchBackend,
    Variable,
    number,
    shaped,
)
from sparkforge.pins.yamlfile import Document, NotYamlError, dotted
from sparkforge.serving.profile import Choice, Profile

_T = TypeVar("_T")

Provider = Literal["git", "release"]
"""Kind of source: the upstream's commit, or the release file in its place."""


class Natives(Model):
    """An older release, of which a wheel's native files are."""

    release: Tag
    requires: tuple[str, ...] = ()
    """What the pinned release's Python files need and the older wheel does not declare."""


class ReleaseFile(Model):
    """A file that upstream published for the pinned version."""

    project: Name
    file: ReleaseFileName
    sha256: Sha256
    size: Count
    """Bytes; a dry run adds them up."""
    natives: Natives | None = None
    """The wheel is of an older release and gives native files only."""

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel, and not an sdist."""
        return self.file.endswith(".whl")

    def fits(self, platform: Platform) -> bool:
        """Return whether it is a wheel that a platform installs, by its name."""
        machines = (one for one, other in MACHINES.items() if other == platform)
        return self.file.endswith(("-any.whl", *(f"_{machine}.whl" for machine in machines)))


class External(Model):
    """A source that the upstream's own build fetches; pinned so that a compile needs no network."""

    git: GitUrl
    commit: Commit
    tag: Tag | None = None
    redirect: Variable
    """The variable that points the upstream's CMake at a local copy."""


class Recorded(Model):
    """The commit and tree of a series on one kind of source."""

    commit: Commit
    tree: Commit


class Upstream(Model):
    """A repository that we patch, at one commit, with the release files of that commit."""

    git: GitUrl
    tag: Tag
    commit: Commit | None = None
    """None: unknown, so sources come from release files (``pins resolve``)."""
    version: str
    files: Mapping[Name, ReleaseFile]
    source_file: Name | None = None
    """The one of ``files`` that replaces the git commit; of a wheel its Python files."""
    source_in: Name | None = None
    """Another upstream, the owner of ``source_file``: its wheels carry this one."""
    subdirectory: Place = ""
    paths: tuple[PathRule, ...] = ()
    version_file: FilePath | None = None
    """Path in the wheel of the module with the version; the overlay corrects it."""
    patched: Mapping[Provider, Recorded] = Field(default_factory=dict)
    externals: Mapping[Name, External] = Field(default_factory=dict)
    compile: Compile = Field(default_factory=Compile)
    """Settings for compiling its wheels (``--wheels compile``)."""

    @property
    def from_wheel(self) -> bool:
        """Whether the file that replaces the commit is a wheel."""
        file = self.files.get(self.source_file or "")
        return file is not None and file.is_wheel

    @property
    def commit_or_unknown(self) -> str:
        """The commit as receipt, SBOM, provenance and labels name it."""
        return self.commit or UNKNOWN


class BaseImage(Model):
    """A base image: the tag is for people, the digests count."""

    repository: ImageRepository
    tag: ImageTag
    index: Digest
    platforms: Mapping[Platform, Digest] = Field(default_factory=dict)

    def digest(self, wanted: Platform) -> Digest:
        """Return the digest for a platform; without one the index's, which leads there."""
        return self.platforms.get(wanted, self.index)


class ModelPin(Model):
    """A model's files at one revision."""

    repository: ModelRepository
    revision: Commit


class Vocabulary(Model):
    """A tokenizer vocabulary that is in the image, so that no request waits for a download."""

    file: FileName
    sha256: Sha256


class WheelPlan(Model):
    """The wheel of an upstream that a target installs, and the overlay's changes of it."""

    files: Mapping[Platform, Name]
    """Per platform, the release wheel among the upstream's ``files``."""
    name: Name | None = None
    """Distribution name of the result; null keeps the release wheel's."""
    local: Annotated[
        str, shaped(r"^[a-z0-9]+(\.[a-z0-9]+)*$", "use a-z, 0-9 and dots, as in cpu.spark")
    ]
    """Local version part, before the release's counter: ``cpu.spark`` → ``0.33.0+cpu.spark.1``."""
    drop_requires: tuple[Name, ...] = ()
    """Requirements of the release wheel to remove for this target."""
    carries: tuple[Name, ...] = ()
    """Other upstreams with a copy in the wheel, whose series is applied to it, too."""


SourcePlan = Literal["release", "git", "auto"]
"""The provider of sources: release files, commits of the pinned tags, or these with release files
where git is unreachable."""
RELEASE_PLAN: SourcePlan = "release"
"""The plan of commands for a series without a target: release files are available everywhere."""


class Need(Model):
    """A requirement of the image, without which its build fails. One of the first four fields."""

    program: FileName | None = None
    """On the server's PATH."""
    file: AbsolutePath | None = None
    library: FileName | None = None
    """The loader finds it by this name, and loads it without a driver."""
    module: Module | None = None
    """Can be imported without a driver."""
    package: DebPackage
    """The distribution package or wheel that contains it."""

    @model_validator(mode="after")
    def _one_thing(self) -> Need:
        given = (self.program, self.file, self.library, self.module)
        if sum(value is not None for value in given) != 1:
            raise ValueError("must have exactly one of program, file, library and module")
        return self


class Target(Model):
    """A target: platforms, wheels, model and settings."""

    summary: str
    platforms: Annotated[tuple[Platform, ...], Field(min_length=1)]
    python: Annotated[str, shaped(r"^3\.[0-9]+$", "give 3.MINOR, for example 3.12")]
    cuda_arch: CudaArch | None = None
    memory_gb_s: Count | None = None
    """Bandwidth of the memory with the model, in 10^9 bytes a second."""
    source: SourcePlan
    wheels: Mapping[Name, WheelPlan]
    requirements: Mapping[Platform, FilePath]
    """Per platform, a hash-locked requirements file, relative to pins.yaml."""
    torch_backend: TorchBackend | None = None
    """The lock's PyTorch build by uv's name (``cpu``, ``cu130``)."""
    base: Name | None = None
    """Base image among ``images``; null: none is pinned, ``--base`` names one."""
    system_packages: tuple[DebPackage, ...] = ()
    """Distribution packages that the image needs beside Python and the wheels."""
    build_packages: tuple[DebPackage, ...] = ()
    """Distribution packages that only the image's build needs; not in the image."""
    needs: tuple[Need, ...] = ()
    """Requirements that the end of the image's build checks: ``serving/image_build.py``."""
    absent: tuple[FileName, ...] = ()
    """Programs that the image must not have; with any, the build removes NVIDIA's packages."""
    builder: Mapping[Platform, FilePath] = Field(default_factory=dict)
    """Per platform, a hash-locked requirements file of the builds of wheels."""
    profile: Name | None = None
    """Its profile among ``profiles``."""
    serve: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, after the profile's."""
    pack: tuple[str, ...] = ()
    """FlashInfer's modules to compile ahead of time: ``default``, ``all``, or names."""
    machine_code: MachineCode | None = None
    """Requirements of ``proofs --wheel`` for the kernels in its wheels."""
    smoke: Literal["tiny-mxfp4"] | None = None
    model: Name | None = None


class Release(Model):
    """A release of this project: its number, and the date of all files."""

    counter: Count
    source_date_epoch: Annotated[Count, Field(ge=315532800, lt=4354819200)]
    """Seconds since 1970, within the range of a zip archive: 1980 to 2107."""


class Pins(Model):
    """The whole of pins.yaml."""

    version: Annotated[Literal[1], BeforeValidator(number)] = Field(alias="schema")
    release: Release
    upstreams: Mapping[Name, Upstream]
    plugin: Plugin | None = None
    """Our plugin for vLLM, which every target gets."""
    images: Mapping[Name, BaseImage]
    models: Mapping[Name, ModelPin]
    vocabularies: Mapping[Name, Vocabulary]
    choices: Mapping[Name, Choice] = Field(default_factory=dict)
    """Users' choices for a profile with a ``choice``."""
    contracts: Mapping[Name, Contract] = Field(default_factory=dict)
    """Rules for machine code, by the name in a target's ``machine_code``."""
    profiles: Mapping[Name, Profile] = Field(default_factory=dict)
    targets: Mapping[Name, Target]

    def upstream(self, name: str) -> Upstream:
        """Return an upstream by name; UsageError if there is none of that name."""
        return _pick(self.upstreams, name, "upstream")

    def target(self, name: str) -> Target:
        """Return a target by name; UsageError if there is none of that name."""
        return _pick(self.targets, name, "target")

    def profile_of(self, target: Target) -> dict[str, Any]:
        """Return a target's profile for the image; empty without one."""
        if target.profile is None:
            return {}
        profile = self.profiles[target.profile]
        document = profile.document()
        if profile.choice is not None:
            document["choices"] = {
                name: choice.model_dump(mode="json", exclude_defaults=True)
                for name, choice in self.choices.items()
            }
        if profile.vocabulary is not None:
            document["vocabulary_sha256"] = self.vocabularies[profile.vocabulary].sha256
        if target.cuda_arch is not None:
            document["cuda_arch"] = target.cuda_arch
        return document


def _pick(table: Mapping[str, _T], name: str, kind: str) -> _T:
    try:
        return table[name]
    except KeyError:
        import difflib

        near = difflib.get_close_matches(name, table, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        msg = f"{name!r}: no such {kind}"
        raise UsageError(msg, f"{guess}pins.yaml has: {', '.join(sorted(table))}") from None


def load(path: Path) -> Pins:
    """Read and check pins.yaml.

    Raises:
        PinsError: the file is missing, is no YAML, or a value is wrong; every problem is
            reported as ``pins.yaml:LINE: key: what is wrong: hint``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        msg = f"{path}: no such file"
        raise PinsError(msg, "run from a sparkforge checkout, or use --pins") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PinsError(f"{path}: {error}", "make it readable UTF-8 text") from None
    return parse(path, text)


def parse(path: Path, text: str) -> Pins:
    """Check the text of pins.yaml; raises as ``load``."""
    try:
        document, pins = _validated(text)
    except NotYamlError as error:
        msg = f"{path.name}:{error.line}: not valid YAML: {error}"
        raise PinsError(msg, "fix the syntax of that line") from None
    problems = list(document.problems)
    if isinstance(pins, ValidationError):
        problems += [_problem(document, detail) for detail in pins.errors()]
    else:
        problems += checks.cross_check(pins, document, path.parent)
    if problems or isinstance(pins, ValidationError):
        found = sorted(set(problems))
        raise PinsError("\n".join(f"{path.name}:{line}: {text}" for line, text in found))
    return _lend(pins)


@lru_cache(maxsize=1)  # a command that changes the checkout reads it again in its lock
def _validated(text: str) -> tuple[Document, Pins | ValidationError]:
    document = yamlfile.read(text)
    try:
        return document, Pins.model_validate(document.data)
    except ValidationError as error:
        return document, error


def _lend(pins: Pins) -> Pins:
    """Fill in the file of upstreams that are part of another upstream's wheel."""

    def with_file(upstream: Upstream) -> Upstream:
        if upstream.source_in is None or upstream.source_file is None:
            return upstream
        file = pins.upstreams[upstream.source_in].files[upstream.source_file]
        files = {**upstream.files, upstream.source_file: file}
        return upstream.model_copy(update={"files": files})

    upstreams = {name: with_file(upstream) for name, upstream in pins.upstreams.items()}
    return pins.model_copy(update={"upstreams": upstreams})


def _problem(document: Document, detail: Any) -> tuple[int, str]:
    where = tuple(part for part in detail["loc"] if part != "[key]")
    kind = detail["type"]
    context = detail.get("ctx", {})
    given = repr(detail["input"])
    given = given if len(given) <= 60 else f"{given[:57]}..."
    if kind == "extra_forbidden":
        what, remedy = "unknown key", "remove it, or fix its spelling"
    elif kind == "missing":
        what, remedy = "missing", "add it"
    elif kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        what = f"{given} has the wrong form"
        remedy = REMEDIES.get(pattern, f"it must match {pattern}")
    elif kind == "padded":
        what = f"{given}: {detail['msg']}"
        remedy = "give the full SHA; an upstream's commit is optional"
    elif kind == "literal_error":
        what, remedy = f"{given} is not allowed", f"use {context['expected']}"
    elif kind in ("model_type", "mapping_type", "dict_type"):
        what, remedy = f"{given} is not a mapping", "write KEY: VALUE lines below it"
    elif kind == "value_error":
        what, remedy = f"{given} {context['error']}", "fix the value"
    else:
        what, remedy = f"{given}: {detail['msg']}", "fix the value"
    return document.line(where), f"{dotted(where)}: {what}: {remedy}"
