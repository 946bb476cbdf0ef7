"""Check the profile's kernels on this machine, before anything large is downloaded.

The image has a small checkpoint with gpt-oss' architecture, and its expected answers
(``sparkforge/checkpoints/trial.py``). It is served on loopback with the real model's backends, and
its log-probabilities are compared. A pass is recorded with the compiled kernels, so the next
start of the same build, device and driver skips it.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving import arguments
from sparkforge.serving.errors import StartError, say
from sparkforge.serving.progress import Client

REFERENCE = "reference.json"
MARK = "preflight"
NAME = "preflight"
"""Name of the model, and of its folder in the image's share and in the build."""

MEDIAN, MOST = 0.1, 0.3
"""Limits of the distance between a server's log-probabilities and the reference's, in nats: of the
median, and of 19 in 20. Random changes of the weights by a step of BF16 give 0.02 and 0.06. Every
wrong model that was tried (no sinks, no window, no YaRN, nibbles or gate and up swapped, one expert
of 16 missing, one of four skipped, no bias) gives more than 0.4 for the second:
tests/unit/serving/test_preflight.py. Marlin's and Triton's experts on an H200: 0.02 and 0.06
(docs/serving.md, Preflight)."""
LEAD = 1.0
"""Nats. A token with a larger lead has to be the next one."""

# these determine the kernels; the small model needs other values of the rest
_CARRIED = (
    "--decode-kernels",  # who switches them off, since they hang, would meet them here again
    "--moe-backend",
    "--attention-backend",
    "--kv-cache-dtype",
    "--load-format",
    "--linear-backend",
)
_LIMIT_S = 600.0  # for each answer: FlashInfer and Triton may compile for it
_OWN = (
    "--served-model-name",
    NAME,
    "--enforce-eager",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "4",
    # not the real model's share: this server ends soon
    "--gpu-memory-utilization",
    "0.05",
    "--kv-cache-memory-bytes",
    str(256 << 20),
)


@dataclass(frozen=True)
class Trial:
    """One start of the small model."""

    model: Path
    """Folder of the checkpoint and its reference."""
    options: Sequence[str]
    """Of ``vllm serve``."""
    client: Client
    mark: Path | None
    """File that records a pass; None: not recorded."""
    key: str
    """Digest of driver, options and reference."""

    @classmethod
    def of(
        cls, model: Path, options: Sequence[str], driver: str, folder: Path | None, client: Client
    ) -> Trial:
        """Prepare a start.

        Args:
            options: of the real server.
            driver: version of the device's driver.
            folder: of this build's and device's kernels.

        Raises:
            StartError: the image has no checkpoint for it.
        """
        try:
            reference = (model / REFERENCE).read_bytes()
        except OSError as error:
            msg = (
                f"the preflight has no checkpoint in this image ({error}): SPARKFORGE_PREFLIGHT=off"
            )
            raise StartError(msg) from None
        carried = [
            word
            for option in _CARRIED
            if (value := arguments.value(options, option)) is not None
            for word in (option, value)
        ]
        text = json.dumps([driver, carried, hashlib.sha256(reference).hexdigest()])
        key = hashlib.sha256(text.encode()).hexdigest()
        return cls(model, [*carried, *_OWN], client, folder and folder / MARK, key)

    def passed(self) -> bool:
        """Return whether the same trial has passed before."""
        try:
            return self.mark is not None and self.mark.read_text(encoding="utf-8") == self.key
        except (OSError, ValueError):
            return False

    def note(self) -> None:
        """Record a pass."""
        try:
            if self.mark is not None:
                self.mark.write_text(self.key, encoding="utf-8")
        except OSError as error:
            say(f"warning: {self.mark} cannot be written: {error}; the next start tries again")

    def run(self) -> str:
        """Compare the answers of a server that has answered once; returns the problem, or "".

        Raises:
            PROBLEMS of ``progress``: no answer, or an invalid one.
        """
        distances: list[float] = []
        for expected in json.loads((self.model / REFERENCE).read_bytes())["answers"]:
            body = {
                "model": NAME,
                "prompt": expected["tokens"],
                "temperature": 0,
                "max_tokens": len(expected["next"]),
                "ignore_eos": True,
                "logprobs": 1,
                "prompt_logprobs": 1,
                "return_token_ids": True,
            }
            end = time.monotonic() + _LIMIT_S
            answer = json.loads(self.client.ask(end, "POST", "/v1/completions", body))
            found, problem = compare(expected, answer)
            if problem:
                return problem
            distances += found
        return judge(distances)


def compare(expected: Mapping[str, Any], answer: Mapping[str, Any]) -> tuple[list[float], str]:
    """Return the distances of one answer's log-probabilities in nats, and a wrong token, or "".

    Raises:
        LookupError, TypeError, ValueError: the answer lacks a part.
    """
    found, tokens, distances = answer["choices"][0], expected["tokens"], []
    for index, reference in enumerate(expected["prompt"], start=1):
        actual = float(found["prompt_logprobs"][index][str(tokens[index])]["logprob"])
        distances.append(abs(actual - reference))
    for index, wanted in enumerate(expected["next"]):
        if found["token_ids"][index] != wanted["token"]:
            if wanted["lead"] > LEAD:
                return distances, f"token {index + 1} after {len(tokens)} differs"
            break  # rounding may decide a close race; the rest is another text
        actual = float(found["logprobs"]["token_logprobs"][index])
        distances.append(abs(actual - wanted["logprob"]))
    return distances, ""


def judge(distances: Sequence[float]) -> str:
    """Return the problem with the distances of all answers, in nats, or ""."""
    ordered = sorted(value if math.isfinite(value) else math.inf for value in distances)
    middle = statistics.median(ordered)
    most = ordered[min(len(ordered) - 1, len(ordered) * 19 // 20)]
    shown = f"log-probabilities {middle:.2f} nats from the reference in the median, 19 of 20 within"
    shown += f" {most:.2f}"
    if not (middle <= MEDIAN and most <= MOST):
        return f"{shown}; the limits are {MEDIAN} and {MOST}"
    say(f"preflight: {shown}")
    return ""
