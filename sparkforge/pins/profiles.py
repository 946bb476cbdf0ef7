"""The part of pins.yaml that says how a model is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from sparkforge.pins.types import Backend, Count, LayerList, Model, Name, Truth


class MemoryPlan(Model):
    """How much of a unified memory vLLM gets; computed when it starts, from MemAvailable."""

    keep_free_gib: Count
    """Left to the host and to the server's own host memory."""
    most_percent: Annotated[Count, Field(le=95)]
    """Of all memory, at most."""
    least_gib: Count
    """With less, the model does not start: weights, activations, one request's KV cache."""


class Choice(Model):
    """What the user's choice sets in a profile."""

    mxfp4_layers: LayerList | None = None
    """Dense layers that are quantised while loading; docs/mxfp4-layers.md."""


class Profile(Model):
    """How a model is served: the options of ``vllm serve``, and what has to come of them.

    An option without a value here is left to vLLM.
    """

    model: Name | None = None
    moe_backend: Name | None = None
    attention_backend: Backend | None = None
    kv_cache_dtype: Name | None = None
    load_format: Name | None = None
    mxfp4_layers: LayerList | None = None
    """Dense layers that are quantised while loading, for a profile without a choice."""
    choice: Name | None = None
    """The one among ``choices`` that counts where the user takes none; null: the user has none."""
    max_model_len: Count | None = None
    """Tokens of prompt and answer together."""
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    cudagraph_capture_sizes: tuple[Count, ...] = ()
    """Batch sizes (tokens of one step) that CUDA graphs are recorded for."""
    prefix_caching: Truth | None = None
    enforce_eager: Truth = False
    reasoning_parser: Name | None = None
    tool_call_parser: Name | None = None
    exclude_tools_when_none: Truth = False
    """Leave tools out of the prompt of a request whose ``tool_choice`` is ``none``."""
    memory: MemoryPlan | None = None
    """Null: what vLLM takes by itself, a fixed share."""
    evict_page_cache: Truth = False
    """Drop the weight files from the page cache before and after they are loaded."""
    vocabulary: Name | None = None
    """Vocabulary among ``vocabularies`` that has to be there."""
    warm_up: Literal["off", "quick", "full"] = "off"
    """Requests that have kernels compiled before the server counts as healthy."""
    answers: Truth = False
    """Whether the model, with its real weights, has to answer a question before the server counts
    as healthy: at the end of the warm-up."""
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
