"""Before anything large is fetched: do this profile's kernels compute the right thing here?

A small checkpoint with gpt-oss' architecture lies in the image, with the answers that it has to
give (``sparkforge/trial.py``). It is served as the real model will be, with the same backends, on
loopback, and its log-probabilities are compared. A pass is noted beside the compiled kernels, so
that the next start of the same build, device and driver leaves it out.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving import profile
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import StartError
from sparkforge.serving.progress import Client

MODES = ("auto", "off", "always")
REFERENCE = "reference.json"
MARK = "preflight.json"
NAME = "preflight"
"""The model's, and its folder's: in the image's share, and in the item that makes it."""

MEDIAN, MOST = 0.1, 0.3
"""Limits of the distance between a server's log-probabilities and the reference's, in nats: of the
median, and of 19 in 20. Weights moved at random by BF16's step move these by 0.02 and 0.06; every
wrong model tried (no sinks, no window, no YaRN, nibbles or gate and up mixed up, one expert of 16
gone, one of four left out, no bias) by more than 0.4 in the second: tests/unit/test_preflight.py.
Marlin's and Triton's experts on an H200: 0.02 and 0.06 (docs/serving.md, Preflight)."""
LEAD = 1.0
"""Nats: a token that leads by more must be the next one."""

# what decides which kernels are taken; of the rest the small model needs other values
_CARRIED = (
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
    # neither the share nor the size of the real model's: this start is over soon
    "--gpu-memory-utilization",
    "0.05",
    "--kv-cache-memory-bytes",
    str(256 << 20),
    "--disable-access-log-for-endpoints",
    "/health,/metrics,/v1/models,/v1/completions",
)


class PreflightError(StartError):
    """The small model is answered wrongly here, or not at all."""


@dataclass(frozen=True)
class Trial:
    """One start of the small model.

    Attributes:
        model: folder of the checkpoint and its reference.
        command: of the server.
        client: asks it.
        mark: where a pass is noted, None: nowhere.
        key: of what is tried.
        say: takes a line for the log.
    """

    model: Path
    command: Sequence[str]
    client: Client
    mark: Path | None
    key: str
    say: Callable[[str], None]

    @classmethod
    def of(
        cls,
        model: Path,
        words: Sequence[str],
        driver: str,
        folder: Path | None,
        key: str,
        say: Callable[[str], None],
    ) -> Trial:
        """Prepare a start.

        Args:
            words: options of the real server.
            driver: version of the device's driver.
            folder: of this build's and device's kernels.
            key: API key, or "".

        Raises:
            PreflightError: this image has no checkpoint for it.
        """
        try:
            reference = (model / REFERENCE).read_bytes()
        except OSError as error:
            msg = (
                f"the preflight has no checkpoint in this image ({error}): SPARKFORGE_PREFLIGHT=off"
            )
            raise PreflightError(msg) from None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        carried = [
            word
            for option in _CARRIED
            if (value := profile.value(words, option)) is not None
            for word in (option, value)
        ]
        command = [
            "vllm",
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *carried,
        ]
        text = json.dumps([driver, carried, hashlib.sha256(reference).hexdigest()])
        return cls(
            model,
            [*command, *_OWN],
            Client(port, 6.0, key),
            folder and folder / MARK,
            hashlib.sha256(text.encode()).hexdigest(),
            say,
        )

    def passed(self) -> bool:
        """Tell whether the same passed before."""
        try:
            return self.mark is not None and (Document.load(self.mark).get(str, "key") == self.key)
        except (OSError, DocumentError):
            return False

    def note(self) -> None:
        """Note that it has passed."""
        if self.mark is None:
            return
        try:
            self.mark.write_text(json.dumps({"key": self.key}) + "\n", encoding="utf-8")
        except OSError as error:
            self.say(f"warning: {self.mark} cannot be written: {error}; the next start tries again")

    def run(self) -> str:
        """Ask the server, which has answered once; returns what is wrong, or nothing.

        Raises:
            PROBLEMS of ``progress``: no answer, or another than a server's.
        """
        reference = Document.load(self.model / REFERENCE)
        distances: list[float] = []
        for number in range(len(reference.get(list, "answers"))):
            wanted = Document("the reference", reference.get(dict, "answers", number))
            body = {
                "model": NAME,
                "prompt": wanted.get(list, "tokens"),
                "temperature": 0,
                "max_tokens": len(wanted.get(list, "next")),
                "ignore_eos": True,
                "logprobs": 1,
                "prompt_logprobs": 1,
                "return_token_ids": True,
            }
            end = time.monotonic() + _LIMIT_S
            answer = self.client.ask(end, "POST", "/v1/completions", body)
            found, problem = compare(wanted, Document.parse("the answer", answer))
            if problem:
                return problem
            distances += found
        return judge(distances, self.say)


def compare(wanted: Document, answer: Document) -> tuple[list[float], str]:
    """Return the distances of one answer's log-probabilities in nats, and what is plainly wrong.

    Raises:
        DocumentError: the answer lacks a part.
    """
    choice = answer.get(dict, "choices", 0)
    found = Document("the answer", choice)
    tokens = wanted.get(list, "tokens")
    distances = []
    for index, reference in enumerate(wanted.get(list, "prompt"), start=1):
        theirs = _number(found, "prompt_logprobs", index, str(tokens[index]), "logprob")
        distances.append(abs(theirs - reference))
    for index in range(len(wanted.get(list, "next"))):
        token = found.get(int, "token_ids", index)
        lead = _number(wanted, "next", index, "lead")
        if token != wanted.get(int, "next", index, "token"):
            if lead > LEAD:
                return distances, f"token {index + 1} after {len(tokens)} is another"
            break  # a close race that rounding may decide; what follows is another text
        theirs = _number(found, "logprobs", "token_logprobs", index)
        distances.append(abs(theirs - _number(wanted, "next", index, "logprob")))
    return distances, ""


def judge(distances: Sequence[float], say: Callable[[str], None] = lambda line: None) -> str:
    """Return what is wrong with the distances of all answers, in nats, or nothing."""
    ordered = sorted(one if math.isfinite(one) else math.inf for one in distances)
    middle = statistics.median(ordered)
    most = ordered[min(len(ordered) - 1, len(ordered) * 19 // 20)]
    shown = f"log-probabilities {middle:.2f} nats from the reference in the median, 19 of 20 within"
    shown += f" {most:.2f}"
    if not (middle <= MEDIAN and most <= MOST):
        return f"{shown}; {MEDIAN} and {MOST} at most are right"
    say(f"preflight: {shown}")
    return ""


def _number(document: Document, *path: str | int) -> float:
    found: Any = document.get(object, *path)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise DocumentError(f"{path} of {document.what} is no number")
    return float(found)


def wanted(mode: str, plan: Mapping[str, Any]) -> bool:
    """Tell whether a preflight is to be made: by default on a device that compiles kernels."""
    return mode == "always" or (mode == "auto" and bool(plan.get("cuda_arch")))
