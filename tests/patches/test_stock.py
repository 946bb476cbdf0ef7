"""The plugin in a server of vLLM as upstream made it, with torch.compile: `test.py --stock`.

The server has the processes that a user's has. What it answers is compared with the reference in
float32, which shares nothing with the engine.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sparkforge.build import smoke
from sparkforge.build.launcher import from_environment
from sparkforge.checkpoints import gptoss as reference
from sparkforge.checkpoints.tiny import TinyCheckpoint
from sparkforge.runtime.servers import Launch
from tests.patches import mx_reference as mx
from tests.patches import stock

pytestmark = pytest.mark.skipif(
    stock.VARIABLE not in os.environ, reason=f"{stock.VARIABLE} names no environments"
)
READY_S = 900  # some 60 on a quiet machine
FORMATS = {
    "": {},
    "qkv=mxfp8,o,lm_head=mxfp8": {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"},
    "qkv,o=mxfp8,lm_head": {"qkv": "mxfp4", "o": "mxfp8", "lm_head": "mxfp4"},
}


@pytest.mark.parametrize("layers", FORMATS)
def test_a_server_answers_as_the_reference_does(
    tiny: TinyCheckpoint, model: reference.Model, tmp_path: Path, layers: str
) -> None:
    folder = Path(os.environ[stock.VARIABLE], stock.WITH_PLUGIN)
    options = ["--max-num-seqs", "4", "--moe-backend", "bf16_dequant"]
    if layers:
        # the gauge of the plugin comes from a logger of statistics
        options += ["--mxfp4-layers", layers, "--disable-log-stats"]
    launch = Launch(tiny.path, options, (), {"VLLM_CPU_KVCACHE_SPACE": "1"})
    result = smoke.exercise(
        lambda: from_environment(folder, launch, tmp_path, tmp_path / "cache"), READY_S
    )
    quantized = mx.quantize_layers(model, FORMATS[layers])
    for prompt, answer in zip(smoke.PROMPTS, result.answers, strict=True):
        logits = reference.logits(quantized, list(prompt))[-1].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert abs(answer.logprob - logprobs[answer.token]) < smoke.TOLERANCE
        # rounding may turn a near tie round
        assert logprobs.max() - logprobs[answer.token] < smoke.TOLERANCE
        if not layers:
            assert answer.token == logprobs.argmax()
