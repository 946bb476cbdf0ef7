"""The plugin in a server of vLLM as upstream made it, with torch.compile: `test.py --stock`.

The server has the processes that a user's has. What it answers is compared with the reference in
float32, which shares nothing with the engine.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparkforge.build import smoke
from sparkforge.build.smoke import from_environment
from sparkforge.runtime import servers
from sparkforge.runtime.client import COMPLETIONS, Place, post
from tests import reference
from tests.patches import mx_reference as mx
from tests.patches import stock
from tests.patches.probing import PROMPT
from tests.reference import TinyCheckpoint

pytestmark = pytest.mark.skipif(
    stock.VARIABLE not in os.environ, reason=f"{stock.VARIABLE} names no environments"
)
# Between log-probabilities, over a prompt: rounding to BF16 makes 0.03, another format of one kind
# of layer 0.3 or more.
MEDIAN_TOLERANCE = 0.1
READY_S = 900  # some 60 on a quiet machine
# token ids, the first alone in a server's first forward; the tiny model's next token leads by 1.5
# logits or more in float32, so rounding decides nothing
PROMPTS = ((5,), (33,), tuple(b"hammer"), tuple(b"every byte counts"))
# between log-probabilities of one token in BF16 and in float32; measured: 0.0043
TOLERANCE = 0.1
LAYERS = "qkv=mxfp8,o,lm_head=mxfp8"
FORMATS = {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"}


def start(tiny: TinyCheckpoint, folder: Path, *more: str) -> AbstractContextManager[servers.Server]:
    """Start `vllm serve` with the plugin, as a user does."""
    environment = Path(os.environ[stock.VARIABLE], stock.WITH_PLUGIN)
    options = ("--max-num-seqs", "4", "--moe-backend", "bf16_dequant", *more)
    launch = servers.Launch(tiny.path, options, (), {"VLLM_CPU_KVCACHE_SPACE": "1"})
    return from_environment(environment, launch, folder, folder / "cache")


def complete(server: servers.Server, **asked: Any) -> Any:
    body = {"model": servers.MODEL_NAME, "temperature": 0, **asked}
    (choice,) = post(Place(f"{server.url}/v1"), COMPLETIONS, body).json()["choices"]
    return choice


def logprobs(model: reference.Model, prompt: Sequence[int]) -> npt.NDArray[np.float64]:
    """What the reference makes of a prompt, by place and token."""
    logits = reference.logits(model, list(prompt)).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def test_a_server_answers_as_the_reference_does(
    tiny: TinyCheckpoint, model: reference.Model, tmp_path: Path
) -> None:
    with start(tiny, tmp_path) as server:
        servers.wait_ready(server, READY_S)
        for prompt in PROMPTS:
            more = {"logprobs": 1, "max_tokens": 1, "return_token_ids": True}
            choice = complete(server, prompt=list(prompt), **more)
            wanted = logprobs(model, prompt)[-1]
            assert choice["token_ids"] == [wanted.argmax()]
            (logprob,) = choice["logprobs"]["token_logprobs"]
            assert abs(logprob - wanted.max()) < TOLERANCE
    with start(tiny, tmp_path) as server:
        smoke.exercise(server, READY_S)


def test_a_server_of_quantized_layers_does_too(
    tiny: TinyCheckpoint, model: reference.Model, tmp_path: Path
) -> None:
    """Without statistics, from whose loggers the plugin's gauge comes."""
    with start(tiny, tmp_path, "--mxfp4-layers", LAYERS, "--disable-log-stats") as server:
        servers.wait_ready(server, READY_S)
        choice = complete(server, prompt=list(PROMPT), echo=True, logprobs=0, max_tokens=1)
        assert server.stop()[0] == 0
    found = np.array(choice["logprobs"]["token_logprobs"][1 : len(PROMPT)])

    def distance(formats: dict[str, str]) -> float:
        wanted = logprobs(mx.quantize_layers(model, formats), PROMPT)
        places = np.arange(len(PROMPT) - 1)
        return float(np.median(np.abs(found - wanted[places, list(PROMPT[1:])])))

    same, controls = distance(FORMATS), [distance({}), distance({**FORMATS, "qkv": "mxfp4"})]
    assert same < MEDIAN_TOLERANCE < min(controls)
