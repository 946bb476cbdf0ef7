"""A profile: settings to serve a model, in pins.yaml and in the image.

Its options have the names that vLLM's own ``--config`` file gives them. The other keys are ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from sparkforge.serving import arguments
from sparkforge.serving.errors import SettingError, StartError

VARIABLE = "SPARKFORGE_PROFILE"
OPTION = "--mxfp4-layers"
_WITHOUT_DECODE_EXPERTS = (
    "--decode-kernels",
    "--moe-backend",
    "--enable-lora",
    "--enable-expert-parallel",
    "--dtype",
)
"""Options with which experts may not go through the decode kernels."""
_NAMES = {
    "prefix_caching": "enable-prefix-caching",
    "exclude_tools_when_none": "exclude-tools-when-tool-choice-none",
}
"""vLLM's names, of options that are called otherwise here."""
_OPTIONS = (
    "moe_backend",
    "attention_backend",
    "kv_cache_dtype",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "mxfp4_layers",
    "reasoning_parser",
    "cudagraph_capture_sizes",
    "tool_call_parser",
    "exclude_tools_when_none",
    "prefix_caching",
    "enforce_eager",
)


def _number(value: Any) -> Any:
    """Turn a plain decimal number into an int; 010, 0x10 and 1e3 stay text and are refused."""
    plain = isinstance(value, str) and re.fullmatch(r"0|[1-9][0-9]{0,17}", value)
    return int(value) if plain else value


def _truth(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_number), Field(gt=0, strict=True)]
Truth = Annotated[bool, BeforeValidator(_truth), Field(strict=True)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)]
Backend = Annotated[str, StringConstraints(pattern=r"^[A-Z0-9_]+$")]
_LAYER = "((qkv|o|lm_head)(=mxfp[48])?|moe(=mxfp4)?)"
LayerList = Annotated[str, StringConstraints(pattern=f"^{_LAYER}(,{_LAYER})*$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MemoryPlan(_Model):
    """vLLM's share of a memory that GPU and host share; computed when it starts."""

    keep_free_gib: Count
    """Memory for the host and for the server's own host memory."""
    most_percent: Annotated[Count, Field(le=95)]
    """Limit as a share of all memory."""
    least_gib: Count
    """Minimum to start the model: weights, activations, one request's KV cache."""

    def split(self, machines: int) -> MemoryPlan:
        """Return the plan of each of several machines that hold the model together."""
        return self.model_copy(update={"least_gib": -(-self.least_gib // machines)})


class Choice(_Model):
    """The settings of a profile that the user's choice determines."""

    mxfp4_layers: LayerList | None = None
    """Dense layers to quantise while loading; docs/kernels.md."""


class Profile(_Model):
    """Options of ``vllm serve``, and the entrypoint's checks and actions for the model.

    vLLM decides an option without a value, and judges the values of the others.
    """

    model: Name | None = None
    """In pins.yaml's ``models``."""
    moe_backend: Name | None = None
    attention_backend: Backend | None = None
    kv_cache_dtype: Name | None = None
    load_format: Name | None = None
    mxfp4_layers: LayerList | None = None
    """Dense layers to quantise while loading, for a profile without a choice."""
    choice: Name | None = None
    """The choice that counts, by default the one here; null: the user has no choice."""
    max_model_len: Count | None = None
    """Tokens of prompt and answer together."""
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    cudagraph_capture_sizes: tuple[Count, ...] = ()
    """Batch sizes (tokens of one step) of the CUDA graphs."""
    prefix_caching: Truth | None = None
    enforce_eager: Truth = False
    reasoning_parser: Name | None = None
    tool_call_parser: Name | None = None
    exclude_tools_when_none: Truth = False
    """Leave tools out of the prompt of a request whose ``tool_choice`` is ``none``. Otherwise the
    model calls them anyway, vLLM drops the call, and the answer is empty."""
    memory: MemoryPlan | None = None
    """Null: vLLM's default, a fixed share."""
    evict_page_cache: Truth = False
    """Drop the weight files from the page cache before and after loading."""
    vocabulary: Name | None = None
    """Required vocabulary among pins.yaml's ``vocabularies``."""
    warm_up: Literal["off", "quick", "full"] = "off"
    """Requests that compile kernels before the server counts as healthy; quick and full are the
    same."""
    answers: Truth = False
    """Whether the model, with its real weights, must answer a question at the end of the warm-up,
    before the server counts as healthy."""
    expect: Mapping[Literal["moe", "experts", "attention", "linear"], Backend] = Field(
        default_factory=dict
    )
    """Names of the backends as vLLM's log has them; ``experts``: of few rows with Marlin as MoE
    backend; ``linear``: of dense layers in MX formats."""
    on_mismatch: Literal["fail", "warn"] = "fail"

    # the build adds these for the image
    choices: Mapping[Name, Choice] = Field(default_factory=dict)
    vocabulary_sha256: str | None = None
    """Of the Harmony vocabulary that the chat endpoint has to use."""
    cuda_arch: str | None = None
    """Compute capability that the image is built for, as ``12.1``; null: a CPU."""

    @field_validator("cudagraph_capture_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise ValueError("sizes must ascend")
        return sizes

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if self.choice is not None and self.mxfp4_layers is not None:
            raise ValueError("has both mxfp4_layers and a choice")
        if self.answers and (self.vocabulary is None or self.warm_up == "off"):
            raise ValueError("has answers without a vocabulary or a warm-up")
        if self.choices and self.choice not in self.choices:
            raise ValueError("has a choice that is not in choices")
        return self

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Return the profile in a file, YAML or JSON.

        Raises:
            StartError: it holds no profile.
            OSError: it cannot be read.
        """
        import yaml

        try:
            return cls.model_validate(yaml.safe_load(path.read_bytes()))
        except (yaml.YAMLError, RecursionError) as error:
            text = " ".join(str(error).split())[:200]
            raise StartError(f"invalid profile {path}: {text}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise StartError(f"invalid profile {path}: {where}: {first['msg']}") from None

    def document(self) -> dict[str, Any]:
        """Return the profile as JSON values, without defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def layers(self) -> str | None:
        """Value of ``--mxfp4-layers``: the choice's, if there are choices; None: none."""
        return self.choices[self.choice].mxfp4_layers if self.choice else self.mxfp4_layers

    def options(self, *, most_memory: bool = False) -> list[str]:
        """Return the options of ``vllm serve``.

        Args:
            most_memory: add the largest share of memory that the profile allows. The right share
                depends on the machine's free memory: ``memory.utilisation``.
        """
        words: list[str] = []
        if most_memory and self.memory is not None:
            words += ["--gpu-memory-utilization", f"{self.memory.most_percent / 100:.2f}"]
        # names and values are checked with vLLM's own parser in tests/patches/test_profiles.py
        for field in _OPTIONS:
            name = _NAMES.get(field, field.replace("_", "-"))
            value = self.layers if field == "mxfp4_layers" else getattr(self, field)
            if isinstance(value, bool):
                # only prefix caching has a default that false changes
                words += [f"--{name}"] if value else [f"--no-{name}"] * (field == "prefix_caching")
            elif isinstance(value, tuple):
                words += [f"--{name}", *map(str, value)] if value else []
            elif value is not None:
                words += [f"--{name}", str(value)]
        if self.tool_call_parser:
            # without it "tool_choice": "auto" gets status 400
            words.append("--enable-auto-tool-choice")
        return words

    def expectations(self, command: Sequence[str], caller: Sequence[str]) -> dict[str, str]:
        """Return the backends that vLLM has to choose, by kind.

        A backend in the user's options replaces the profile's, and is not checked. vLLM logs the
        backend of dense layers only where ``--mxfp4-layers`` quantises some.

        Args:
            command: all options of the server.
            caller: the user's options among them.
        """
        expected: dict[str, str] = {
            kind: name
            for kind, name in self.expect.items()
            if not arguments.has(caller, f"--{kind}-backend")
        }
        layers = (arguments.value(command, OPTION) or "").split(",")
        if not {layer.partition("=")[0].strip() for layer in layers} - {"", "moe"}:
            expected.pop("linear", None)
        if arguments.has(caller, "--decode-kernels"):  # which are the profile's choice for these
            expected.pop("linear", None)
        if any(arguments.has(caller, option) for option in _WITHOUT_DECODE_EXPERTS):
            expected.pop("experts", None)
        return expected


class ChoiceError(SettingError):
    """There is no such choice."""


def named(variables: Mapping[str, str]) -> str:
    """Return the name in ``SPARKFORGE_PROFILE``; "" for none, or where it is the path of a file."""
    value = variables.get(VARIABLE, "")
    return "" if "/" in value else value


def pick(profile: Profile, name: str, setting: str) -> Profile:
    """Return a profile with another choice.

    Args:
        setting: the variable or option that has the name, for the error.

    Raises:
        ChoiceError: the profile has no such choice.
    """
    if name in profile.choices:
        return profile.model_copy(update={"choice": name})
    near = difflib.get_close_matches(name, profile.choices, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    known = f"use {', '.join(profile.choices)}" if profile.choices else "omit it: there is none"
    raise ChoiceError(f"{setting} {name!r}: no such profile", guess + known)
