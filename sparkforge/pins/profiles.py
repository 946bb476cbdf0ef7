"""The part of pins.yaml about serving a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from sparkforge.pins.types import Backend, Count, LayerList, Model, Name, Truth


class MemoryPlan(Model):
    """vLLM's share of a unified memory; computed when it starts, from MemAvailable."""

    keep_free_gib: Count
    """Memory for the host and for the server's own host memory."""
    most_percent: Annotated[Count, Field(le=95)]
    """Limit as a share of all memory."""
    least_gib: Count
    """Minimum to start the model: weights, activations, one request's KV cache."""


class Choice(Model):
    """Settings of a profile that depend on the user's choice."""

    mxfp4_layers: LayerList | None = None
    """Dense layers to quantise while loading; docs/kernels.md."""


class Profile(Model):
    """A model's settings: the options of ``vllm serve``, and their expected effect.

    Without a value here, vLLM decides.
    """

    model: Name | None = None
    moe_backend: Name | None = None
    attention_backend: Backend | None = None
    kv_cache_dtype: Name | None = None
    load_format: Name | None = None
    mxfp4_layers: LayerList | None = None
    """Dense layers to quantise while loading, for a profile without a choice."""
    choice: Name | None = None
    """Default among ``choices``; null: the user has no choice."""
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
    """Leave tools out of the prompt of a request whose ``tool_choice`` is ``none``."""
    memory: MemoryPlan | None = None
    """Null: vLLM's default, a fixed share."""
    evict_page_cache: Truth = False
    """Drop the weight files from the page cache before and after loading."""
    vocabulary: Name | None = None
    """Required vocabulary among ``vocabularies``."""
    warm_up: Literal["off", "quick", "full"] = "off"
    """Requests that compile kernels before the server counts as healthy."""
    answers: Truth = False
    """Whether the model, with its real weights, must answer a question at the end of the warm-up,
    before the server counts as healthy."""
    expect: Mapping[Literal["moe", "experts", "attention", "linear"], Backend] = Field(
        default_factory=dict
    )
    """Names of the backends as vLLM's log has them; ``experts``: of few rows with Marlin as MoE
    backend; ``linear``: of dense layers in MX formats."""
    on_mismatch: Literal["fail", "warn"] = "fail"

    @field_validator("cudagraph_capture_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)):
            raise ValueError("sizes must ascend")
        return sizes

    @model_validator(mode="after")
    def _chosen(self) -> Profile:
        if self.choice is not None and self.mxfp4_layers is not None:
            raise ValueError("has both mxfp4_layers and a choice")
        return self

    @model_validator(mode="after")
    def _asked(self) -> Profile:
        if self.answers and (self.vocabulary is None or self.warm_up == "off"):
            raise ValueError("has answers without a vocabulary or a warm-up")
        return self
