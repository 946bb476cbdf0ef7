"""What vLLM's CPU engine says of texts, in a process of its own: see formats.py."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOP = 256
"""Likeliest tokens of each distribution; the rest of the vocabulary counts as one."""
Page = list[dict[int, float]]
"""After each token but the last, the logarithms of the likeliest tokens' probabilities."""


def scored(checkpoint: Path, texts: Sequence[Sequence[int]]) -> list[Page]:
    """Serve a checkpoint and score texts, given as tokens."""
    out = checkpoint / "scored.json"
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in that process, not in a third
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(
        [sys.executable, __file__, checkpoint, out],
        input=json.dumps([list(one) for one in texts]).encode(),
        stdout=sys.stderr,
        env={**os.environ, **variables},
        check=True,
    )
    pages = json.loads(out.read_bytes())
    return [[{int(key): one for key, one in row.items()} for row in page] for page in pages]


def main(checkpoint: str, out: str) -> None:
    """Score the texts of standard input."""
    from vllm import LLM, SamplingParams

    texts = json.load(sys.stdin)
    llm = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(map(len, texts)) + 1,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_logprobs=TOP,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": one} for one in texts]
    pages = [
        [
            {token: one.logprob for token, one in row.items()}
            for row in found.prompt_logprobs or ()
            if row
        ]
        for found in llm.generate(prompts, sampling, use_tqdm=False)
    ]
    Path(out).write_text(json.dumps(pages), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
