"""A logits processor of vLLM that makes a model say what a test wrote, turn by turn.

``--logits-processors tests.patches.scripted:Scripted``, with the folder of scripts in ``SCRIPTS``.
A user's message names a script, ``script:NAME``: the file NAME.json there, a list of replies in raw
Harmony, each what follows ``<|start|>assistant``. Runs in the engine of the tested server.
"""

import itertools
import json
import os
import re
import time
from functools import cache
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

VARIABLE = "SCRIPTS"
# more than any logit of the checkpoint, and less than what a grammar takes off
_PUSH = 10_000.0
_NAMED = re.compile(r"script:([\w.-]+)")
# A worker spins for a second after each message: of minutes of requests that is a core, which the
# other tests of a machine lack. It cannot wait for the next notice: one soon after another is lost.
shm_broadcast.sched_yield = lambda: time.sleep(0.001)


def encode(text: str) -> list[int]:
    """Return the tokens of raw Harmony."""
    found: list[int] = get_encoding().encode(text, allowed_special="all")
    return found


@cache
def _start() -> int:
    (token,) = encode("<|start|>")
    return token


def _messages(prompt: list[int]) -> list[str]:
    """Return the messages of a prompt; text that looks like a frame is text here."""
    ends = [at for at, token in enumerate(prompt) if token == _start()] + [len(prompt)]
    return [get_encoding().decode(prompt[at + 1 : end]) for at, end in itertools.pairwise(ends)]


def calls(reply: str) -> int:
    """Return how many tools a reply calls."""
    headers = (part.partition("<|message|>")[0] for part in reply.split("<|start|>"))
    return sum(" to=" in header for header in headers)


def next_reply(prompt: list[int], folder: Path) -> str | None:
    """Return the reply that is due, None without one.

    A reply with calls is over when all their results are in the prompt, another one when the
    conversation has one answer more: so nothing depends on how a client orders or splits a turn.
    """
    replies: list[str] = []
    results = answers = 0
    for message in _messages(prompt):
        role = re.split(r"[ <]", message, maxsplit=1)[0]
        if role == "user" and (names := _NAMED.findall(message)):
            file = folder / f"{names[-1]}.json"
            replies = json.loads(file.read_text()) if file.exists() else []
            results = answers = 0
        elif role == "assistant":
            answers += "<|channel|>final" in message.partition("<|message|>")[0]
        elif role not in ("system", "developer", "user"):
            results += 1
    for reply in replies:
        wanted = calls(reply)
        if wanted > results or (not wanted and not answers):
            return reply
        results -= wanted
        answers -= not wanted
    return None


class Scripted(LogitsProcessor):  # type: ignore[misc]
    """Raises the logit of the script's next token; without one the model is left alone."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._folder = Path(os.environ[VARIABLE])
        self._rows: dict[int, tuple[list[int], list[int]]] = {}
        """The tokens of the reply, and those made so far, by row of the batch."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._begin)

    def _begin(
        self, params: SamplingParams, prompt: list[int] | None, said: list[int]
    ) -> tuple[list[int], list[int]] | None:
        reply = next_reply(prompt or [], self._folder)
        return None if reply is None else (encode(reply), said)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (reply, said) in self._rows.items():
            # a token that is not read back yet counts, as -1
            if len(said) < len(reply):
                logits[row, reply[len(said)]] += _PUSH
        return logits
