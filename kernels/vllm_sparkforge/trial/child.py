# SPDX-License-Identifier: Apache-2.0
"""The process that runs the kernels of a trial, and tells ``__main__`` of each kind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm_sparkforge.decode import selfcheck
from vllm_sparkforge.trial import kinds

Tell = Callable[..., None]


def attempt(kind: kinds.Kind) -> dict[str, Any]:
    """Run one kind, and return its result for ``Found``."""
    began = time.perf_counter()
    more: dict[str, Any] = {}
    try:
        # the same numbers, whatever came before
        torch.manual_seed(0)
        more = kind.run()
        selfcheck.settle()
        difference = more.pop("difference", 0.0)
        right = difference <= selfcheck.TOLERANCE  # not with NaN
        problem = "" if right else "wrong"
        text = more.pop("text", f"differs by {difference:.2g}")
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if isinstance(error, torch.OutOfMemoryError) or "OUT_OF_MEMORY" in text:
            problem = "memory"
        else:  # the driver's and torch's errors of a device have no end
            problem = "fault" if "CUDA" in text else "wrong"
    return {
        "problem": problem,
        "text": f"{text} ({time.perf_counter() - began:.1f} s)",
        "part": kind.part,
        **more,
    }


def run(tried: Iterable[kinds.Kind], found: dict[str, dict[str, Any]], tell: Tell) -> bool:
    """Run the kinds that are not in ``found``, and add them; returns whether all could be run."""
    for kind in tried:
        if kind.name in found:
            continue
        tell(begin=kind.name, part=kind.part)
        found[kind.name] = attempt(kind)
        tell(kind=kind.name, **found[kind.name])
        if found[kind.name]["problem"] == "fault":
            return False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    tell(end=True)
    return True


def main() -> None:
    """Run the kinds of a plan."""
    plan = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no line of ours

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=lines, flush=True)

    with torch.inference_mode():
        done = run(kinds.Trial(plan).kinds(), plan["found"], tell)
    sys.stderr.flush()
    os._exit(0 if done else 1)  # a device that has faulted ends no other way


if __name__ == "__main__":
    main()
