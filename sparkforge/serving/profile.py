"""A profile: how a model is served, in pins.yaml and in the image; and the backends in vLLM's log.

Its options have the names that vLLM's own ``--config`` file gives them. The other keys are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from sparkforge.serving.options import SettingError, StartError, has, layers, value

VARIABLE = "SPARKFORGE_PROFILE"
_LAYERS = "--mxfp4-layers"
# fields with the names of vLLM's options
_OPTIONS = (
    *("moe_backend", "attention_backend", "kv_cache_dtype", "load_format", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "reasoning_parser", "cudagraph_capture_sizes"),
    *("tool_call_parser", "enforce_eager", "prefix_cache_retention_interval"),
)

Count = Annotated[int, Field(gt=0)]
# in pins.yaml all values are text
_WORDS = {"true": True, "false": False}
Truth = Annotated[
    bool, BeforeValidator(lambda given: _WORDS.get(str(given), given)), Field(strict=True)
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)]
Backend = Annotated[str, Field(pattern=r"^[A-Z0-9_]+$")]
LayerList = Annotated[str, AfterValidator(layers)]


class MemoryPlan(BaseModel, frozen=True, extra="forbid"):
    """vLLM's share of a memory that GPU and host share; computed when it starts."""

    keep_free_gib: Count  # memory for the host and for the server's own host memory
    most_percent: Annotated[Count, Field(le=95)]  # limit as a share of all memory
    least_gib: Count  # minimum to start the model: weights, activations, one request's KV cache


class Choice(BaseModel, frozen=True, extra="forbid"):
    """The settings of a profile that the user's choice determines."""

    mxfp4_layers: LayerList | None = None  # dense layers to quantise while loading; docs/kernels.md


class Profile(BaseModel, frozen=True, extra="forbid"):
    """Options of ``vllm serve``, which decides the others, and the entrypoint's steps."""

    model: Name | None = None  # in pins.yaml's ``models``
    moe_backend: Name | None = None
    attention_backend: Backend | None = None
    kv_cache_dtype: Name | None = None
    load_format: Name | None = None
    mxfp4_layers: LayerList | None = None  # for a profile without a choice
    choice: Name | None = None  # by default; null: the user has no choice
    max_model_len: Count | None = None  # tokens of prompt and answer together
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    cudagraph_capture_sizes: tuple[Count, ...] = ()  # batch sizes: tokens of one step
    prefix_caching: Truth | None = None
    prefix_cache_retention_interval: Count | None = None
    """Tokens between two places of a sliding window that a later request can go on from. By
    vLLM's default these are ends of prompts only, so what was generated is computed again."""
    enforce_eager: Truth = False
    reasoning_parser: Name | None = None
    tool_call_parser: Name | None = None
    exclude_tools_when_none: Truth = False
    """Leave tools out of the prompt of a request whose ``tool_choice`` is ``none``. Otherwise the
    model calls them anyway, vLLM drops the call, and the answer is empty."""
    memory: MemoryPlan | None = None  # null: vLLM's default, a fixed share
    evict_page_cache: Truth = False  # drop the weights from it before and after loading
    vocabulary: Name | None = None  # required vocabulary among pins.yaml's ``vocabularies``
    warm_up: Literal["off", "quick", "full"] = "off"  # quick and full are the same
    answers: Truth = False  # whether the model must answer a question at the end of the warm-up
    expect: Mapping[Literal["moe", "experts", "attention", "linear"], Backend] = Field(
        default_factory=dict
    )
    """Names of the backends as vLLM's log has them; ``experts``: of few rows with Marlin as MoE
    backend; ``linear``: of dense layers in MX formats."""
    on_mismatch: Literal["fail", "warn"] = "fail"

    # the build adds these for the image
    choices: Mapping[Name, Choice] = Field(default_factory=dict)
    vocabulary_sha256: str | None = None  # of the Harmony vocabulary of chats
    cuda_arch: str | None = None  # compute capability of the image, as ``12.1``; null: a CPU

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if self.choice is not None and self.mxfp4_layers is not None:
            raise ValueError("has both mxfp4_layers and a choice")
        if self.choices and self.choice not in self.choices:
            raise ValueError("has a choice that is not in choices")
        return self

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Return the profile in a file, YAML or JSON."""
        import yaml

        try:
            return cls.model_validate(yaml.safe_load(path.read_bytes()))
        except (yaml.YAMLError, RecursionError) as error:
            text = " ".join(str(error).split())[:200]
        except ValidationError as error:
            first = error.errors()[0]
            text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise StartError(f"invalid profile {path}: {text}")

    def document(self) -> dict[str, Any]:
        """Return the profile as JSON values, without defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def options(self, *, most_memory: bool = False) -> list[str]:
        """Return the options of ``vllm serve``."""
        words: list[str] = []
        if most_memory and self.memory is not None:
            words += ["--gpu-memory-utilization", f"{self.memory.most_percent / 100:.2f}"]
        if self.prefix_caching is not None:
            words.append(f"--{'' if self.prefix_caching else 'no-'}enable-prefix-caching")
        for name in _OPTIONS:
            if given := getattr(self, name):
                values = given if isinstance(given, tuple) else () if given is True else (given,)
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        chosen = self.choices[self.choice] if self.choice else self
        if chosen.mxfp4_layers:
            words += [_LAYERS, chosen.mxfp4_layers]
        if self.exclude_tools_when_none:
            words.append("--exclude-tools-when-tool-choice-none")
        if self.tool_call_parser:  # without it "tool_choice": "auto" gets status 400
            words.append("--enable-auto-tool-choice")
        return words

    def expectations(self, command: Sequence[str], caller: Sequence[str]) -> dict[str, str]:
        """Return the backends that vLLM has to choose, by kind; the user's own are not checked."""
        given = (value(command, _LAYERS) or "moe").split(",")
        # vLLM logs the backend of dense layers only where some are quantised. Where there are no
        # decode kernels, lossless, INT8 and INT6 stay in BF16 with a warning: right, and slower
        dense = [one for one in given if not re.search("^ *moe|lossless|int[68]", one)]
        own = {kind for kind in self.expect if has(caller, f"--{kind}-backend")}
        if not dense or has(caller, "--decode-kernels"):
            own.add("linear")
        # with these experts may not go through the decode kernels
        others = ("decode-kernels", "moe-backend", "enable-lora", "enable-expert-parallel", "dtype")
        if any(has(caller, f"--{option}") for option in others):
            own.add("experts")
        return {kind: name for kind, name in self.expect.items() if kind not in own}


def pick(profile: Profile, name: str, setting: str) -> Profile:
    """Return a profile with another choice; SettingError where there is no such one."""
    if name in profile.choices:
        return profile.model_copy(update={"choice": name})
    known = f"use {', '.join(profile.choices)}" if profile.choices else "omit it: there is none"
    raise SettingError(f"{setting} {name!r}: no such profile", known)


# The sentences of vLLM 0.33.0 and of our plugin; tests/patches/test_profiles.py compares. The
# group, in capitals, is the backend's name; without one it is Marlin.
SENTENCES: Mapping[str, re.Pattern[str]] = {
    "moe": re.compile(r"\] Using '([A-Z0-9_]+)' Mxfp4 MoE backend\."),
    # named in the options, or chosen by vLLM
    "attention": re.compile(
        r"\[cuda\.py:\d+\] Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+)"
        r" (?:backend\.|attention backend out of)"
    ),
    # dense layers with a format: the kernel's class, e.g. MarlinMxFp4LinearKernel
    "linear": re.compile(
        r"\] Using (\w+?)(?:M[xX][fF][pP][48]|Int[68]|NvFp4|Lossless)\w*Kernel for [A-Z0-9]+ GEMM"
    ),
    "failed": re.compile(r"\] Kernels that failed their trial: (.+)\."),
    # Few rows of the experts, with Marlin as MoE backend. "switched off": chosen, and then found
    # wrong by their self-check; the plugin warns, and serves with Marlin
    "experts": re.compile(
        r"\] (Decode)(?= kernels (?:are used for MXFP4 experts |for MXFP4 experts are switched))"
        r"|\] Decode kernels are (?:not used for MXFP4 experts|off): "
    ),
}


# vLLM's own account of its start, in seconds
_TIMES = re.compile(
    r"\] (?:(?:Loading weights|Model loading) took .*?(?P<load>[\d.]+) seconds"
    r"|Graph capturing finished in (?P<graphs>\d+) secs"
    r"|init engine .*\(compilation: (?P<compile>[\d.]+) s)"
)


@dataclass
class Watch:
    """Compares vLLM's log with the expected backends: names in the log, by kind."""

    expected: Mapping[str, str]
    seen: dict[str, set[str]] = field(default_factory=dict)  # names read so far, by kind
    took_s: dict[str, float] = field(default_factory=dict)  # of parts of vLLM's start

    def feed(self, line: str) -> str | None:
        """Read a line; returns a problem, or None."""
        if match := _TIMES.search(line):
            self.took_s |= {part: float(s) for part, s in match.groupdict().items() if s}
        for kind, pattern in SENTENCES.items():
            if match := pattern.search(line):
                name = (match[1] or "Marlin").upper()
                self.seen.setdefault(kind, set()).add(name)
                if name != (wanted := self.expected.get(kind, name)):
                    return f"vLLM chose the {kind} backend {name}; the profile says {wanted}"
        return None

    def missing(self) -> list[str]:
        """Return a problem for each expected backend that the log of a ready server lacks."""
        return [
            f"vLLM did not say which {kind} backend it uses (VLLM_LOGGING_LEVEL=INFO is needed);"
            f" the profile says {wanted}"
            for kind, wanted in self.expected.items()
            if kind not in self.seen
        ]

    def __str__(self) -> str:
        kinds = [kind for kind in SENTENCES if kind in self.seen]
        return ", ".join(f"{kind} {'/'.join(sorted(self.seen[kind]))}" for kind in kinds)
