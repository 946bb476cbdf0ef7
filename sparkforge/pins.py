"""pins.yaml → a frozen, typed model. Unknown keys, short SHAs and floating tags are errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sparkforge.errors import PinsError, UsageError

_T = TypeVar("_T")

Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Tag = Annotated[str, StringConstraints(pattern=r"^v?[0-9]+(\.[0-9]+)+[0-9A-Za-z.]*$")]
Platform = Literal["linux/amd64", "linux/arm64"]

# how to mend, by the shape that a value should have had
_SHAPE_REMEDIES = {
    r"^[0-9a-f]{40}$": "give the full 40-digit commit SHA (git rev-parse REF^{commit})",
    r"^[0-9a-f]{64}$": "give the full 64-digit sha256 (sha256sum FILE)",
    r"^sha256:[0-9a-f]{64}$": "give the image digest, sha256: and 64 hex digits, not a tag",
    r"^v?[0-9]+(\.[0-9]+)+[0-9A-Za-z.]*$": (
        "name a release tag such as v0.31.0; branches and 'latest' move"
    ),
}


class Model(BaseModel):
    """Base of all parts: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ReleaseFile(Model):
    """One file that upstream published for the pinned version."""

    project: Name
    file: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]+\.(whl|tar\.gz)$")]
    sha256: Sha256
    size: int = Field(gt=0)
    """Bytes; a dry run adds them up."""


class PathRule(Model):
    """Where files of the repository are found in the release wheel."""

    repo: str
    """Prefix in the repository, with its trailing slash."""
    wheel: str | None
    """Prefix in the wheel; null: files that no wheel ships and none needs (tests, docs)."""


class External(Model):
    """A source that the upstream's own build fetches; pinned so that a compile needs no network."""

    git: str
    commit: Commit
    tag: Tag | None = None
    redirect: str
    """The variable that points the upstream's CMake at a local copy."""


class Recorded(Model):
    """The one commit and tree that a series gives on one kind of source."""

    commit: Commit
    tree: Commit


class Upstream(Model):
    """A repository that we patch, at one commit, with the release files of that commit."""

    git: Annotated[str, StringConstraints(pattern=r"^https://\S+\.git$")]
    tag: Tag
    commit: Commit
    version: str
    files: Mapping[Name, ReleaseFile]
    source_file: Name | None = None
    """Which of ``files`` stands in for the git commit (the ``release`` provider)."""
    subdirectory: str = ""
    paths: tuple[PathRule, ...] = ()
    version_file: str | None = None
    """Path in the wheel of the module that states the version; the overlay corrects it."""
    patched: Mapping[Literal["git", "release"], Recorded] = Field(default_factory=dict)
    externals: Mapping[Name, External] = Field(default_factory=dict)


class BaseImage(Model):
    """A base image: the tag is for people, the digests count."""

    repository: str
    tag: str
    index: Digest
    platforms: Mapping[Platform, Digest] = Field(default_factory=dict)


class ModelPin(Model):
    """A model's files at one revision."""

    repository: str
    revision: Commit


class Vocabulary(Model):
    """A tokenizer vocabulary that is baked in, so that no request waits for a download."""

    file: str
    sha256: Sha256


class WheelPlan(Model):
    """Which wheel of which upstream a target installs, and what the overlay changes in it."""

    files: Mapping[Platform, Name]
    """Per platform, the release wheel among the upstream's ``files``."""
    name: Name | None = None
    """Distribution name that the result installs as; null keeps the release wheel's."""
    local: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(\.[a-z0-9]+)*$")]
    """Local version part, before the release's counter: ``cpu.spark`` → ``0.31.0+cpu.spark.1``."""
    drop_requires: tuple[Name, ...] = ()
    """Requirements that the release wheel declares and this target does without."""


class SourcePlan(Model):
    """Where a target's sources come from."""

    provider: Literal["git", "release"]
    fallback: Literal["release"] | None = None


class Target(Model):
    """What is built for whom."""

    summary: str
    platforms: tuple[Platform, ...]
    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")]
    cuda_arch: str | None = None
    source: SourcePlan
    wheels: Mapping[Name, WheelPlan]
    requirements: Mapping[Platform, str]
    """Per platform, a hash-locked requirements file, relative to pins.yaml."""
    torch_backend: str | None = None
    """Which PyTorch build the lock wants, in uv's words (``cpu``, ``cu130``)."""
    base: Name | None = None
    """Base image among ``images``; null: none is pinned, ``--base`` names one."""
    serve: tuple[str, ...]
    """Arguments of ``vllm serve`` for this target's model."""
    smoke: Literal["tiny-mxfp4"] | None = None
    model: Name | None = None


class Release(Model):
    """What this project calls the result."""

    counter: int = Field(gt=0)
    source_date_epoch: int = Field(gt=0)


class Pins(Model):
    """The whole of pins.yaml."""

    version: Literal[1] = Field(alias="schema")
    release: Release
    upstreams: Mapping[Name, Upstream]
    images: Mapping[Name, BaseImage]
    models: Mapping[Name, ModelPin]
    vocabularies: Mapping[Name, Vocabulary]
    targets: Mapping[Name, Target]

    def upstream(self, name: str) -> Upstream:
        """Return an upstream by name.

        Raises:
            UsageError: there is none of that name.
        """
        return _pick(self.upstreams, name, "upstream")

    def target(self, name: str) -> Target:
        """Return a target by name.

        Raises:
            UsageError: there is none of that name.
        """
        return _pick(self.targets, name, "target")


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
            reported as ``pins.yaml:LINE: key: what is wrong: how to mend``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        msg = f"{path}: no such file"
        raise PinsError(msg, "run from a sparkforge checkout, or name one with --pins") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PinsError(f"{path}: {error}", "make it readable UTF-8 text") from None
    try:
        node = yaml.compose(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        msg = f"{path.name}:{line}: not valid YAML: {error.problem}"
        raise PinsError(msg, "correct the syntax of that line") from None
    except yaml.YAMLError as error:
        raise PinsError(f"{path.name}:1: not valid YAML: {error}", "make it UTF-8 text") from None
    lines: dict[tuple[str | int, ...], int] = {(): 1}
    problems: list[tuple[int, str]] = []
    data = _value(node, (), lines, problems)
    if not problems:
        try:
            pins = Pins.model_validate(data)
        except ValidationError as error:
            problems = [_problem(lines, detail) for detail in error.errors()]
        else:
            problems = _cross_check(pins, lines, path.parent)
    if problems:
        shown = [f"{path.name}:{line}: {text}" for line, text in sorted(problems)]
        raise PinsError("\n".join(shown))
    return pins


def _loader() -> type[yaml.SafeLoader]:
    # the C parser is five times as fast; a build of PyYAML without libyaml lacks it
    loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return loader


def _value(
    node: yaml.Node | None,
    where: tuple[str | int, ...],
    lines: dict[tuple[str | int, ...], int],
    problems: list[tuple[int, str]],
) -> Any:
    """Turn a YAML node into plain values, noting the line of each and keys given twice."""
    if node is None:
        return None
    lines[where] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in result:
                problems.append((line, f"{_dotted((*where, key))}: given twice: keep one of them"))
            result[key] = _value(value_node, (*where, key), lines, problems)
            lines[(*where, key)] = line  # the key's line is the better place to point at
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*where, i), lines, problems) for i, item in enumerate(node.value)]
    scalar = node.value
    if node.tag == "tag:yaml.org,2002:null":
        return None
    if node.tag == "tag:yaml.org,2002:int" and re.fullmatch(r"\d+", scalar):
        # 3.11 and 0123 must not lose digits: everything else stays the text that was written;
        # an all-digit SHA would be taken for a number, so long ones stay text too
        return int(scalar) if len(scalar) < 20 else scalar
    if node.tag == "tag:yaml.org,2002:bool":
        return scalar.lower() in ("true", "yes", "on")
    return scalar


def _dotted(where: tuple[str | int, ...]) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text or "top level"


def _problem(lines: Mapping[tuple[str | int, ...], int], detail: Any) -> tuple[int, str]:
    where = tuple(part for part in detail["loc"] if part != "[key]")
    line_at = where
    while line_at not in lines:
        line_at = line_at[:-1]
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        what, remedy = "unknown key", "remove it, or correct its spelling"
    elif kind == "missing":
        what, remedy = "missing", "add it"
    elif kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        what = f"{detail['input']!r} has not the form asked for"
        remedy = _SHAPE_REMEDIES.get(pattern, f"it must match {pattern}")
    elif kind == "literal_error":
        what, remedy = f"{detail['input']!r} is not allowed", f"use {context['expected']}"
    else:
        what, remedy = f"{detail['input']!r}: {detail['msg']}", "correct the value"
    return lines[line_at], f"{_dotted(where)}: {what}: {remedy}"


def _cross_check(
    pins: Pins, lines: Mapping[tuple[str | int, ...], int], root: Path
) -> list[tuple[int, str]]:
    """Find names that point at nothing, and files that are not there."""
    problems: list[tuple[int, str]] = []

    def report(where: tuple[str | int, ...], what: str, remedy: str) -> None:
        line_at = where
        while line_at not in lines:
            line_at = line_at[:-1]
        problems.append((lines[line_at], f"{_dotted(where)}: {what}: {remedy}"))

    for name, upstream in pins.upstreams.items():
        here: tuple[str | int, ...] = ("upstreams", name)
        if upstream.source_file is not None and upstream.source_file not in upstream.files:
            report(
                (*here, "source_file"), f"{upstream.source_file!r} is not among files",
                f"use one of {', '.join(sorted(upstream.files))}",
            )  # fmt: skip
        for i, rule in enumerate(upstream.paths):
            if not rule.repo:
                report((*here, "paths", i, "repo"), "empty", "name a folder or file")
    for name, target in pins.targets.items():
        here = ("targets", name)
        if target.base is not None and target.base not in pins.images:
            report((*here, "base"), f"{target.base!r} is not among images", "pin it there")
        if target.model is not None and target.model not in pins.models:
            report((*here, "model"), f"{target.model!r} is not among models", "pin it there")
        for platform in target.platforms:
            lock = target.requirements.get(platform)
            if lock is None:
                report((*here, "requirements"), f"none for {platform}", "name a lock file")
            elif not (root / lock).is_file():
                report((*here, "requirements", platform), f"{lock} is not there", "make the lock")
        for up_name, plan in target.wheels.items():
            at = (*here, "wheels", up_name)
            if up_name not in pins.upstreams:
                report(at, "no such upstream", f"use one of {', '.join(sorted(pins.upstreams))}")
                continue
            for platform in target.platforms:
                file = plan.files.get(platform)
                if file is None:
                    report((*at, "files"), f"none for {platform}", "name the release wheel")
                elif file not in pins.upstreams[up_name].files:
                    report(
                        (*at, "files", platform), f"{file!r} is not among the upstream's files",
                        f"use one of {', '.join(sorted(pins.upstreams[up_name].files))}",
                    )  # fmt: skip
    return problems


def record(path: Path, upstream: str, provider: str, recorded: Recorded) -> None:
    """Write what a series gives into pins.yaml, leaving every other line as it is.

    Raises:
        PinsError: the file has no such upstream (it is read anew: it may have changed).
    """
    text = path.read_text(encoding="utf-8")
    present = dict(load(path).upstreams[upstream].patched) | {provider: recorded}
    lines = text.splitlines(keepends=True)
    block = ["    patched:\n"] + [
        f"      {kind}: {{commit: {value.commit}, tree: {value.tree}}}\n"
        for kind, value in sorted(present.items())
    ]
    start = lines.index(f"  {upstream}:\n", lines.index("upstreams:\n")) + 1
    end = next(
        (i for i in range(start, len(lines)) if re.match(r" {0,2}[^ #\n]", lines[i])), len(lines)
    )
    section = lines[start:end]
    if "    patched:\n" in section:
        first = section.index("    patched:\n")
        last = first + 1
        while last < len(section) and section[last].startswith("      "):
            last += 1
    else:
        # right behind the source file, which is what the tree was made from
        marks = [i for i, line in enumerate(section) if line.startswith("    source_file:")]
        first = last = (marks[0] + 1) if marks else 0
    section[first:last] = block
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join([*lines[:start], *section, *lines[end:]]), encoding="utf-8")
    fresh.rename(path)
    load(path)
