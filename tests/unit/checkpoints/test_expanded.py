"""The tiny checkpoint with experts in BF16."""

from pathlib import Path

import numpy as np

from sparkforge.checkpoints.tiny import dequantize, expand
from tests import reference as gptoss
from tests.reference import make_tiny


def test_the_weights_are_the_same_in_the_other_format(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    expand(tiny.path, tmp_path / "wide")
    packed, wide = gptoss.load(tiny.path), gptoss.load(tmp_path / "wide")
    assert "quantization_config" in packed.config
    assert "quantization_config" not in wide.config
    assert not [name for name in wide.tensors if name.endswith(("_blocks", "_scales"))]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights = dequantize(packed.tensors[f"{name}_blocks"], packed.tensors[f"{name}_scales"])
    assert weights.shape == (8, 192, 128)
    assert wide.tensors[name].shape == (8, 128, 192)
    assert np.array_equal(np.swapaxes(wide.tensors[name], 1, 2), weights)
    sizes = [one.size * 2 for key, one in wide.tensors.items() if key.endswith("_proj")]
    assert sum(sizes) == tiny.bf16_expert_bytes
    kept = "model.layers.0.self_attn.sinks"
    assert np.array_equal(wide.tensors[kept], packed.tensors[kept])
