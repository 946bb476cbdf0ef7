"""The preflight's model on a device: a small gpt-oss checkpoint, and its expected answers.

It has the shapes that the real model's kernels need: heads of 64, eight query heads a KV head,
sizes that Marlin takes without padding. The answers are computed in float64, by definition of the
parts, and rounded far above any difference between two machines.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from sparkforge.checkpoints import gptoss
from sparkforge.checkpoints.tiny import Shape, make_tiny_gpt_oss
from sparkforge.serving.preflight import REFERENCE

SHAPE = Shape(2, hidden=256, inter=256, experts=16, experts_per_token=4, heads=16, head_dim=64)
LENGTHS = (2, 17, 48, 100)  # of prompts: within and beyond a window and YaRN's original context
DECODED = 4  # tokens after each prompt: steps of one row, for which there are other kernels
_SEED, _DIGITS = 4, 4


def make(folder: Path) -> None:
    """Write checkpoint and reference to a new folder; the same bytes on every machine."""
    make_tiny_gpt_oss(folder, seed=_SEED, shape=SHAPE)
    (folder / REFERENCE).write_text(json.dumps(reference(load(folder))) + "\n", encoding="utf-8")
    (folder / REFERENCE).chmod(0o644)


def load(folder: Path) -> gptoss.Model:
    """Read the checkpoint, for computing in float64."""
    model = gptoss.load(folder)
    floats = {name: one for name, one in model.tensors.items() if one.dtype == np.float32}
    return model.replaced(tensors={name: one.astype(np.float64) for name, one in floats.items()})


def reference(model: gptoss.Model) -> dict[str, Any]:
    """Return the expected answers for ``serving/preflight.py``.

    ``prompt``: the natural log-probability of each token but the first, after those before it;
    ``next``: of the likeliest tokens that follow, each with its lead over the second likeliest.
    """
    random = np.random.RandomState(_SEED)  # the legacy generator's stream is frozen
    answers = []
    for length in LENGTHS:
        tokens = [int(token) for token in random.randint(32, 127, size=length)]
        following, leads = gptoss.greedy(model, tokens, DECODED)
        text = [*tokens, *following]
        logits = gptoss.logits(model, text)
        rows = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        found = [round(float(rows[i, token]), _DIGITS) for i, token in enumerate(text[1:])]
        after = zip(following, found[length - 1 :], leads, strict=True)
        expected = [
            {"token": token, "logprob": logprob, "lead": round(lead, _DIGITS)}
            for token, logprob, lead in after
        ]
        answers.append({"tokens": tokens, "prompt": found[: length - 1], "next": expected})
    digest = hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()
    return {"schema": 1, "answers": answers, "sha256": digest}
