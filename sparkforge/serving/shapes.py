"""Shapes of models, as their ``config.json`` has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.document import Document

_MODEL_TYPE = "gpt_oss"


@dataclass(frozen=True)
class Shape:
    """A gpt-oss model: decoder layers with attention, a router and experts, and a head."""

    layers: int
    """Decoder layers."""
    sliding_layers: int
    """Layers with attention to ``sliding_window`` tokens only."""
    sliding_window: int
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of one expert between gate/up and down."""
    experts: int
    top_k: int
    """``experts``, ``top_k``: experts of a layer, and of each token."""
    heads: int
    kv_heads: int
    head_dim: int
    """``heads``, ``kv_heads``, ``head_dim``: attention; every query head has one sink."""
    vocab: int
    """Rows of the embedding and of the separate head."""

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused q, k and v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def o_columns(self) -> int:
        """Inputs of the output projection."""
        return self.heads * self.head_dim

    @classmethod
    def of(cls, folder: Path) -> Shape | None:
        """Return the shape of a checkpoint; None for a model that is not gpt-oss.

        Raises:
            OSError: its ``config.json`` cannot be read.
            DocumentError: a number of gpt-oss is missing there.
        """
        config = Document.load(folder / "config.json")
        if config.find(str, "model_type") != _MODEL_TYPE:
            return None
        kinds = config.get(list, "layer_types")
        return cls(
            layers=config.get(int, "num_hidden_layers"),
            sliding_layers=kinds.count("sliding_attention"),
            sliding_window=config.get(int, "sliding_window"),
            hidden=config.get(int, "hidden_size"),
            intermediate=config.get(int, "intermediate_size"),
            experts=config.get(int, "num_local_experts"),
            top_k=config.get(int, "num_experts_per_tok"),
            heads=config.get(int, "num_attention_heads"),
            kv_heads=config.get(int, "num_key_value_heads"),
            head_dim=config.get(int, "head_dim"),
            vocab=config.get(int, "vocab_size"),
        )
