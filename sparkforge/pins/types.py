"""The types of pins.yaml's values, and the rules for a repository's files in a wheel.

Each type accepts plain values of its users (git, CMake, apt, uv, container engines, the file
system), and nothing that they would read as an option, another place or another command.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
)

from sparkforge.core import plain

UNKNOWN = "unknown"
"""An unknown commit in receipt, SBOM, provenance and labels."""


class Model(BaseModel):
    """Base of all parts: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def shaped(pattern: str, longest: int = 200) -> StringConstraints:
    """Return the constraint of a text by a regular expression."""
    return StringConstraints(pattern=pattern, max_length=longest)


def _place(path: str) -> str:
    # git and others read values that begin so as options or patterns
    wrong = "starts like an option or a pattern" if path.startswith(("-", ":")) else None
    if wrong := wrong or plain.path_problem(path.removesuffix("/")):
        raise ValueError(wrong)
    return path


Count = Annotated[int, Field(gt=0)]
Bytes = Annotated[int, Field(ge=0)]
Commit = Annotated[str, shaped(r"^[0-9a-f]{40}$")]
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
    if rule is None or rule.wheel is None:
        return None
    return rule.wheel + path[len(rule.repo) :]


def origin_of(rules: Iterable[PathRule], member: str) -> tuple[PathRule, str] | None:
    """Return the origin of a wheel's member: the longest rule and the path; None: no rule."""
    fitting = [(rule.wheel, rule) for rule in rules if rule.wheel and member.startswith(rule.wheel)]
    if not fitting:
        return None
    prefix, rule = max(fitting, key=lambda pair: len(pair[0]))
    return rule, rule.repo + member[len(prefix) :]
