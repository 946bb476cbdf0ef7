"""Types of pins.yaml: plain values, places of a repository's files in a wheel, and machine code.

Each type accepts plain values of its users (git, CMake, apt, uv, container engines, the file
system), and nothing that they would read as an option, another place or another command.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from sparkforge.core import plain


class Model(BaseModel):
    """Base of all parts: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def shaped(pattern: str, longest: int = 200) -> StringConstraints:
    """Return the constraint of a text by a regular expression."""
    return StringConstraints(pattern=pattern, max_length=longest)


def _whole(commit: str) -> str:
    if commit.endswith("0" * 12):  # by chance once in 2.8e14 commits
        raise ValueError("is an abbreviated SHA padded with zeros; omit a commit that is unknown")
    return commit


def _place(path: str) -> str:
    # git and others read values that begin so as options or patterns
    wrong = "starts like an option or a pattern" if path.startswith(("-", ":")) else None
    if wrong := wrong or plain.path_problem(path.removesuffix("/")):
        raise ValueError(wrong)
    return path


Count = Annotated[int, Field(gt=0)]
Bytes = Annotated[int, Field(ge=0)]
Commit = Annotated[str, shaped(r"^[0-9a-f]{40}$"), AfterValidator(_whole)]
Sha256 = Annotated[str, shaped(r"^[0-9a-f]{64}$")]
Digest = Annotated[str, shaped(r"^sha256:[0-9a-f]{64}$")]
Name = Annotated[str, shaped(r"^[a-z0-9][a-z0-9._-]*$", 100)]
Tag = Annotated[str, shaped(r"^v?[0-9]+(\.[0-9]+)+[0-9A-Za-z.]*$")]
Platform = Literal["linux/amd64", "linux/arm64"]
MACHINES: dict[str, Platform] = {
    "x86_64": "linux/amd64",
    "aarch64": "linux/arm64",
    "arm64": "linux/arm64",
}
"""By the kernel's name of the machine."""
Place = Annotated[str, AfterValidator(_place)]
"""A file, or with a trailing slash a folder, below the folder that the key is about."""
Folder = Annotated[str, shaped(r"/$"), AfterValidator(_place)]
FilePath = Annotated[str, shaped(r"[^/]$"), AfterValidator(_place)]
"""A file below that folder."""
AbsolutePath = Annotated[str, shaped(r"^(/[A-Za-z0-9_+][A-Za-z0-9_.+-]*)+$")]
Module = Annotated[str, shaped(r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
FileName = Annotated[str, shaped(r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
ReleaseFileName = Annotated[str, shaped(r"^[A-Za-z0-9][A-Za-z0-9_.+-]*\.(whl|tar\.gz)$")]
_HOST = r"^https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?"
GitUrl = Annotated[str, shaped(rf"{_HOST}(/[A-Za-z0-9_~][A-Za-z0-9._~-]*)+\.git$")]
Variable = Annotated[str, shaped(r"^[A-Z][A-Z0-9_]*$")]
CMakeTarget = Annotated[str, shaped(r"^[A-Za-z_][A-Za-z0-9_]*$")]
CMakeWord = Annotated[str, shaped(r"^-D[A-Za-z0-9_]+(:[A-Z]+)?=([^{}]|\{device\})*$")]
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = rf"^{r'([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?/)?'}{_PART}(/{_PART})*$"
ImageRepository = Annotated[str, shaped(_IMAGE)]
ImageTag = Annotated[str, shaped(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", 128)]
_MODEL = r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*$"
ModelRepository = Annotated[str, shaped(_MODEL)]
# with a hyphen at the end apt would remove the package
DebPackage = Annotated[str, shaped(r"^[a-z0-9][a-z0-9+.-]*[a-z0-9+](=[0-9][A-Za-z0-9.+:~-]*)?$")]
Snapshot = Annotated[str, shaped(r"^20[0-9]{6}T[0-9]{6}Z$")]
"""A moment in UTC, as archives of Debian and Ubuntu name their snapshots."""
AptWord = Annotated[str, shaped(r"^[a-z][a-z0-9-]*$")]
TorchBackend = Annotated[str, shaped(r"^(cpu|xpu|cu[0-9]{2,3}|rocm[0-9]+(\.[0-9]+)*)$")]
CudaArch = Annotated[str, shaped(r"^[1-9][0-9]?\.[0-9]$")]
GpuCode = Annotated[str, shaped(r"^[1-9][0-9]{1,2}[af]?$")]
Python = Annotated[str, shaped(r"^3\.[0-9]+$")]
LocalVersion = Annotated[str, shaped(r"^[a-z0-9]+(\.[a-z0-9]+)*$")]


class PathRule(Model):
    """The folder of the release wheel for files of the repository."""

    repo: Place
    """Prefix in the repository, with its trailing slash; with ``build`` also a file."""
    wheel: Folder | None
    """Prefix in the wheel; null: files that no wheel contains or needs (tests, docs)."""
    build: bool = False
    """Build rules: a change of them affects a compile only, never an overlay."""


def below(path: str, places: tuple[str, ...]) -> bool:
    """Return whether a path is one of some files, or lies in one of some folders (``NAME/``)."""
    return any(path == p or (p.endswith("/") and path.startswith(p)) for p in places)


def rule_of(rules: Iterable[PathRule], path: str) -> PathRule | None:
    """Return the longest rule that matches a path of the repository, or None."""
    fitting = [rule for rule in rules if below(path, (rule.repo,))]
    return max(fitting, key=lambda rule: len(rule.repo), default=None)


def member_of(rules: Iterable[PathRule], path: str) -> str | None:
    """Return the path in a wheel of a file of the repository; None: not in a wheel, or no rule."""
    rule = rule_of(rules, path)
    return rule.wheel + path[len(rule.repo) :] if rule and rule.wheel else None


def origin_of(rules: Iterable[PathRule], member: str) -> tuple[PathRule, str] | None:
    """Return the origin of a wheel's member: the longest rule and the path; None: no rule."""
    fitting = [(rule.wheel, rule) for rule in rules if rule.wheel and member.startswith(rule.wheel)]
    if not fitting:
        return None
    prefix, rule = max(fitting, key=lambda pair: len(pair[0]))
    return rule, rule.repo + member[len(prefix) :]


# -- machine code: how it is compiled, and what wheels may hold ------------------------------


class Native(Model):
    """One native file of the release wheel."""

    file: FilePath
    target: CMakeTarget
    """The CMake target and install component that builds it."""
    device: Literal["empty", "cpu", "cuda"]
    """Configuration of the upstream's CMake. ``empty``: neither GPU nor CPU kernels, so that it
    reads none of the upstream's ``externals``."""
    sources: tuple[Place, ...] = ()
    """Its sources in the repository. Empty: they are outside, so no patch can change it."""
    besides: tuple[Place, ...] = ()
    """Those below ``sources`` that are not its sources."""
    blocked: str | None = None
    """Reason why the pinned inputs are not enough to compile it."""

    def made_from(self, path: str) -> bool:
        """Return whether a file of the repository is one of its sources."""
        return below(path, self.sources) and not below(path, self.besides)


class Compile(Model):
    """Settings for compiling wheels of an upstream."""

    blocked: str | None = None
    """Reason why they can't be compiled: they are overlaid."""
    variables: Mapping[Variable, str] = Field(default_factory=dict)
    configure: tuple[CMakeWord, ...] = ()
    """Arguments for CMake; ``{device}`` stands for a native's device."""
    natives: tuple[Native, ...] = ()
    redirect: Variable | None = None
    """Variable with the folder of this upstream's patched files (the first of ``paths``), for the
    build of a wheel that carries it."""


class Plugin(Model):
    """Our plugin for vLLM, which every target gets: what the stage ``kernels`` compiles of it."""

    folder: Folder
    """In the checkout: ``pyproject.toml``, ``csrc/`` and the Python package."""
    architectures: Annotated[tuple[GpuCode, ...], Field(min_length=1)]
    requirements: FilePath
    """The compiler's, hash-locked, relative to pins.yaml."""
    spills: tuple[Name, ...] = ()
    """Kernels that may keep registers in memory; others may not."""

    @property
    def source(self) -> str:
        """The file to compile; it includes files of its folder only."""
        return f"{self.folder}csrc/kernels.cu"


# -- contracts: build.py proofs --wheel ------------------------------------------------


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression; it must match anywhere in a kernel's mangled name."""


class Kernels(Model):
    """Kernels of a library that must have certain instructions."""

    kernels: Pattern
    mma: Pattern
    """Each of them has a matrix instruction that matches this completely."""
    least: Count = 1
    """Number of such kernels."""


class Excused(Model):
    """Kernels that may break a rule, with the reason."""

    kernels: Pattern
    reason: str


class Code(Model):
    """Rules for files of a wheel."""

    files: str
    """Pattern of their paths in the wheel (fnmatch); machine code without a host library counts as
    one library for each folder, named ``FOLDER/*.cubin``."""
    unused: str | None = None
    """Reason why the target runs no kernel of them; they are counted, not checked."""
    stack: Bytes | None = None
    """Limit for a thread's stack in bytes, instead of the contract's."""
    needs: tuple[Kernels, ...] = ()
    jit: tuple[Excused, ...] = ()
    """Kernels that may be in PTX only."""
    stubs: tuple[Excused, ...] = ()
    """Kernels that may be empty stubs, which trap."""


class Contract(Model):
    """Limits and rules for the kernels of a family of devices."""

    registers: Count
    """Most of a thread."""
    shared: Count
    """Most memory of a block, in bytes."""
    stack: Bytes = 0
    """Limit for a thread's stack in bytes: spilled registers, and arrays with a computed index."""
    foreign: Pattern
    """Opcodes that no device of the family has."""
    libraries: tuple[Code, ...] = ()
    """The first entry that matches a file applies; without one: the limits above, no exceptions."""

    def rules(self, file: str) -> Code:
        """Return the rules for a file of a wheel."""
        return next((c for c in self.libraries if fnmatchcase(file, c.files)), Code(files=file))


class MachineCode(Model):
    """The contract, among ``contracts``, that a target's wheels must keep."""

    contract: Name
    architectures: Annotated[tuple[GpuCode, ...], Field(min_length=1)]
    """Architectures of the target's own machine code; code for others is not checked."""


def loads(code: str, device: str) -> bool:
    """Return whether a device (``12.1``) loads machine code for an architecture (``120f``)."""
    bare = code.rstrip("af")
    major, minor = int(bare[:-1]), int(bare[-1])
    ours, ours_minor = map(int, device.split("."))
    if code.endswith("a"):
        return (major, minor) == (ours, ours_minor)
    return major == ours and minor <= ours_minor


def compiles(ptx: str, device: str) -> bool:
    """Return whether a driver compiles PTX for an architecture (``80``) to a device's code."""
    if not ptx.isdecimal():  # 90a, 120f: as machine code
        return loads(ptx, device)
    return int(ptx) <= int(device.replace(".", ""))
