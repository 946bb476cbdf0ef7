"""pins.yaml → a frozen, typed model. Unknown keys, short SHAs and floating tags are errors."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from sparkforge.core.errors import PinsError, UsageError
from sparkforge.pins import checks, yamlfile
from sparkforge.pins import types as t
from sparkforge.pins.types import MACHINES, Model
from sparkforge.pins.yamlfile import Document, dotted
from sparkforge.serving.profile import Choice, Profile

_T = TypeVar("_T")

Provider = Literal["git", "release"]
"""Kind of source: the upstream's commit, or the release file in its place."""


class Natives(Model):
    """An older release, of which a wheel's native files are."""

    release: t.Tag
    requires: tuple[str, ...] = ()
    """What the pinned release's Python files need and the older wheel does not declare."""


class ReleaseFile(Model):
    """A file that upstream published for the pinned version."""

    project: t.Name
    file: t.ReleaseFileName
    sha256: t.Sha256
    size: t.Count
    natives: Natives | None = None
    """The wheel is of an older release and gives native files only."""

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")

    def fits(self, platform: t.Platform) -> bool:
        """Return whether it is a wheel that a platform installs, by its name."""
        machines = [f"_{machine}.whl" for machine, one in MACHINES.items() if one == platform]
        return self.file.endswith(("-any.whl", *machines))


class External(Model):
    """A source that the upstream's own build fetches; pinned so that a compile needs no network."""

    git: t.GitUrl
    commit: t.Commit
    tag: t.Tag | None = None
    redirect: t.Variable
    """The variable that points the upstream's CMake at a local copy."""


class Recorded(Model):
    """The commit and tree of a series on one kind of source."""

    commit: t.Commit
    tree: t.Commit


class Upstream(Model):
    """A repository that we patch, at one commit, with the release files of that commit."""

    git: t.GitUrl
    tag: t.Tag
    commit: t.Commit | None = None
    """None: unknown, so sources come from release files."""
    version: str
    files: Mapping[t.Name, ReleaseFile]
    source_file: t.Name | None = None
    """The one of ``files`` that replaces the git commit; of a wheel its Python files."""
    source_in: t.Name | None = None
    """Another upstream, the owner of ``source_file``: its wheels carry this one."""
    subdirectory: t.Place = ""
    paths: tuple[t.PathRule, ...] = ()
    version_file: t.FilePath | None = None
    """Path in the wheel of the module with the version; the overlay corrects it."""
    patched: Mapping[Provider, Recorded] = Field(default_factory=dict)
    externals: Mapping[t.Name, External] = Field(default_factory=dict)
    compile: t.Compile = Field(default_factory=t.Compile)

    @property
    def commit_or_unknown(self) -> str:
        """The commit as receipt, SBOM and labels name it."""
        return self.commit or "unknown"


class BaseImage(Model):
    """A base image: the tag is for people, the digests count."""

    repository: t.ImageRepository
    tag: t.ImageTag
    index: t.Digest
    platforms: Mapping[t.Platform, t.Digest] = Field(default_factory=dict)

    def digest(self, wanted: t.Platform) -> t.Digest:
        """Return the digest for a platform; without one the index's, which leads there."""
        return self.platforms.get(wanted, self.index)


class ModelPin(Model):
    """A model's files at one revision."""

    repository: t.ModelRepository
    revision: t.Commit


class Vocabulary(Model):
    """A tokenizer vocabulary that is in the image, so that no request waits for a download."""

    file: t.FileName
    sha256: t.Sha256


class WheelPlan(Model):
    """The wheel of an upstream that a target installs, and the overlay's changes of it."""

    files: Mapping[t.Platform, t.Name]
    """The release wheel among the upstream's ``files``."""
    name: t.Name | None = None
    """Distribution name of the result; null keeps the release wheel's."""
    local: t.LocalVersion
    """Local version part, before the release's counter: ``cpu.spark`` → ``0.33.0+cpu.spark.1``."""
    drop_requires: tuple[t.Name, ...] = ()
    """Requirements of the release wheel to remove for this target."""
    carries: tuple[t.Name, ...] = ()
    """Other upstreams with a copy in the wheel, whose series is applied to it, too."""


SourcePlan = Literal["release", "git", "auto"]
"""Release files, commits of the pinned tags, or these with release files where git fails."""
RELEASE_PLAN: SourcePlan = "release"
"""The plan of commands for a series without a target: release files are available everywhere."""


class Need(Model):
    """A requirement of the image, without which its build fails. One of the first four fields."""

    program: t.FileName | None = None
    """On the server's PATH."""
    file: t.AbsolutePath | None = None
    library: t.FileName | None = None
    """The loader finds it by this name, and loads it without a driver."""
    module: t.Module | None = None
    """Can be imported without a driver."""
    package: t.DebPackage
    """The distribution package or wheel that contains it."""

    @model_validator(mode="after")
    def _one_thing(self) -> Need:
        given = (self.program, self.file, self.library, self.module)
        if sum(value is not None for value in given) != 1:
            raise ValueError("must have exactly one of program, file, library and module")
        return self


class Target(Model):
    """Platforms, wheels, model and settings."""

    summary: str
    platforms: Annotated[tuple[t.Platform, ...], Field(min_length=1)]
    python: t.Python
    cuda_arch: t.CudaArch | None = None
    memory_gb_s: t.Count | None = None
    """Bandwidth of the memory with the model, in 10^9 bytes a second."""
    source: SourcePlan
    wheels: Mapping[t.Name, WheelPlan]
    requirements: Mapping[t.Platform, t.FilePath]
    """A hash-locked requirements file, relative to pins.yaml."""
    torch_backend: t.TorchBackend | None = None
    """The lock's PyTorch build by uv's name (``cpu``, ``cu130``)."""
    base: t.Name | None = None
    """Base image among ``images``; null: none is pinned, ``--base`` names one."""
    system_packages: tuple[t.DebPackage, ...] = ()
    """Distribution packages that the image needs beside Python and the wheels."""
    build_packages: tuple[t.DebPackage, ...] = ()
    """Distribution packages that only the image's build needs; not in the image."""
    needs: tuple[Need, ...] = ()
    """Requirements that the end of the image's build checks: ``serving/image_build.py``."""
    absent: tuple[t.FileName, ...] = ()
    """Programs that the image must not have; with any, the build removes NVIDIA's packages."""
    builder: Mapping[t.Platform, t.FilePath] = Field(default_factory=dict)
    """A hash-locked requirements file of the builds of wheels."""
    profile: t.Name | None = None
    serve: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, after the profile's."""
    pack: tuple[str, ...] = ()
    """FlashInfer's modules to compile ahead of time: ``default``, ``all``, or names."""
    machine_code: t.MachineCode | None = None
    """Requirements of ``proofs --wheel`` for the kernels in its wheels."""
    smoke: Literal["tiny-mxfp4"] | None = None
    model: t.Name | None = None


class Release(Model):
    """A release of this project: its number, and the date of all files."""

    counter: t.Count
    source_date_epoch: Annotated[t.Count, Field(ge=315532800, lt=4354819200)]
    """Seconds since 1970, within the range of a zip archive: 1980 to 2107."""


class Pins(Model):
    """The whole of pins.yaml."""

    version: Literal["1"] = Field(alias="schema")
    release: Release
    upstreams: Mapping[t.Name, Upstream]
    plugin: t.Plugin | None = None
    images: Mapping[t.Name, BaseImage]
    models: Mapping[t.Name, ModelPin]
    vocabularies: Mapping[t.Name, Vocabulary]
    choices: Mapping[t.Name, Choice] = Field(default_factory=dict)
    """Users' choices for a profile with a ``choice``."""
    contracts: Mapping[t.Name, t.Contract] = Field(default_factory=dict)
    profiles: Mapping[t.Name, Profile] = Field(default_factory=dict)
    targets: Mapping[t.Name, Target]

    def upstream(self, name: str) -> Upstream:
        """Return an upstream; UsageError if there is none of that name."""
        return _pick(self.upstreams, name, "upstream")

    def target(self, name: str) -> Target:
        """Return a target; UsageError if there is none of that name."""
        return _pick(self.targets, name, "target")

    def profile_of(self, target: Target) -> Profile:
        """Return a target's profile as its image has it; an empty one without."""
        if target.profile is None:
            return Profile()
        profile = self.profiles[target.profile]
        more: dict[str, Any] = {"cuda_arch": target.cuda_arch}
        if profile.choice is not None:
            more["choices"] = self.choices
        if profile.vocabulary is not None:
            more["vocabulary_sha256"] = self.vocabularies[profile.vocabulary].sha256
        return profile.model_copy(update=more)


def _pick(table: Mapping[str, _T], name: str, kind: str) -> _T:
    try:
        return table[name]
    except KeyError:
        hint = f"pins.yaml has: {', '.join(sorted(table))}"
        raise UsageError(f"{name!r}: no such {kind}", hint) from None


def load(path: Path) -> Pins:
    """Read and check pins.yaml; PinsError: every problem, as ``pins.yaml:LINE: key: what``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: {getattr(error, 'strerror', error)}"
        raise PinsError(msg, "run from a sparkforge checkout, or use --pins") from None
    return parse(path, text)


@lru_cache(maxsize=1)  # a command that changes the checkout reads it again in its lock
def parse(path: Path, text: str) -> Pins:
    """Check the text of pins.yaml; raises as ``load``."""
    try:
        document = yamlfile.read(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = str(getattr(error, "problem", None) or error).splitlines()[0]
        msg = f"{path.name}:{mark.line + 1 if mark else 1}: not valid YAML: {what}"
        raise PinsError(msg, "fix the syntax of that line") from None
    try:
        pins = Pins.model_validate(document.data)
    except ValidationError as error:
        problems = {_problem(document, detail) for detail in error.errors()}
    else:
        crossed = checks.cross_check(pins, path.parent)
        problems = {(document.line(where), f"{dotted(where)}: {what}") for where, what in crossed}
        if not problems:
            return _lend(pins)
    raise PinsError("\n".join(f"{path.name}:{line}: {text}" for line, text in sorted(problems)))


def _lend(pins: Pins) -> Pins:
    """Fill in the file of upstreams that are part of another upstream's wheel."""
    upstreams = dict(pins.upstreams)
    for name, upstream in pins.upstreams.items():
        if upstream.source_in is not None and upstream.source_file is not None:
            file = pins.upstreams[upstream.source_in].files[upstream.source_file]
            files = {**upstream.files, upstream.source_file: file}
            upstreams[name] = upstream.model_copy(update={"files": files})
    return pins.model_copy(update={"upstreams": upstreams})


def _problem(document: Document, detail: Any) -> tuple[int, str]:
    """Return the line and the text of one of pydantic's errors."""
    where = tuple(part for part in detail["loc"] if part != "[key]")
    given = "" if detail["type"] == "missing" else f"{reprlib.repr(detail['input'])}: "
    return document.line(where), f"{dotted(where)}: {given}{detail['msg']}"
