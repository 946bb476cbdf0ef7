# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_sparkforge.trial PLAN``: a line for each kind, and at last the verdict.

PLAN is a JSON object: ``options`` (of this plugin), vLLM's ``moe_backend`` and ``kv_cache_dtype``,
``ranks`` of tensor parallelism, and ``choose``: whether the faster experts of prompts may be
chosen. The verdict, JSON behind ``verdict: ``, has

* ``failed``: kinds that must not be used (``options.Options.failed``),
* ``moe_backend``: that of vLLM to use instead of the plan's, or null,
* ``expect``: what vLLM will say of it, by kind of backend; null where that is not known,
* ``keep``: whether another trial would find the same: not after a lack of memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

KIND_S, LOAD_S, DEATH_S = 60.0, 180.0, 20.0
"""Seconds for a kind, for all before the first one, and for the end of a child that is killed."""
ALL, PROMPTS = "all", "prompts"

Found = dict[str, dict[str, Any]]
"""By kind: ``problem`` (fault, hang, memory, wrong, or empty), ``text``, ``part``, and more."""


def run(
    plan: Mapping[str, Any],
    command: Sequence[str],
    say: Callable[[str], None],
    kind_s: float = KIND_S,
    load_s: float = LOAD_S,
) -> dict[str, Any]:
    """Try all kinds; returns the verdict.

    Args:
        command: of the child, to which the plan is appended.
        say: gets a line for each kind.
    """
    found: Found = {}
    while ALL not in found:
        before = len(found)
        if _run_child([*command, json.dumps({**plan, "found": found})], found, say, kind_s, load_s):
            break
        if len(found) == before:
            _note(found, say, ALL, "fault", "the process ended between two kinds")
    return verdict(found)


def _note(
    found: Found, say: Callable[[str], None], kind: str, problem: str, text: str, **more: Any
) -> None:
    found[kind] = {"problem": problem, "text": text, "part": "", **more}
    say(f"{kind}: {f'{problem}: ' if problem else ''}{text}")


def _run_child(
    command: Sequence[str], found: Found, say: Callable[[str], None], kind_s: float, load_s: float
) -> bool:
    """Read what a child tells until its end or a deadline; returns whether it did all."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    lines: Queue[str] = Queue()

    def read() -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                lines.put(line)
        lines.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    kind, part, problem, text = ALL, "", "", ""
    allowed_s = load_s
    end = time.monotonic() + load_s
    ended = False
    try:
        while not ended:
            try:
                line = lines.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                problem, text = "hang", f"no result within {allowed_s:.0f} s"
                break
            if not line:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(DEATH_S)
                problem, text = "fault", f"the process ended with {child.returncode}"
                break
            told = json.loads(line)
            allowed_s, end = kind_s, time.monotonic() + kind_s
            if "begin" in told:
                kind, part = told["begin"], told["part"]
            elif "kind" in told:
                kind = ""
                _note(found, say, told.pop("kind"), **told)
            else:
                ended = True
        if problem and kind:
            _note(found, say, kind, problem, text, part=part)
    finally:
        child.kill()
        reader.join(DEATH_S)
        try:
            child.wait(DEATH_S)
        except subprocess.TimeoutExpired:  # the driver holds it
            _note(found, say, ALL, "hang", "the process cannot be killed")
    return ended


def verdict(found: Found) -> dict[str, Any]:
    """Return what follows for a server."""
    wrong = {kind: one for kind, one in found.items() if one["problem"]}
    failed = [kind for kind, one in wrong.items() if one["part"] != PROMPTS]
    choice = found.get(PROMPTS, {})
    if backend := choice.get("moe_backend"):
        failed += choice["left_out"]
    expect: dict[str, str | None] = {}
    if failed:
        expect["failed"] = ",".join(sorted(failed)).upper()
    for part, kind in (("layers", "linear"), ("experts", "experts")):
        if ALL in wrong or any(one["part"] == part for one in wrong.values()):
            expect[kind] = None  # more than one, perhaps
    if backend:
        expect |= {"moe": choice["name"], "experts": None}
    keep = all(found[kind]["problem"] != "memory" for kind in failed if kind in found)
    return {"failed": sorted(failed), "moe_backend": backend, "expect": expect, "keep": keep}


def _end(number: int, _: object) -> None:
    """End, with the child, which may be starting."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    sys.exit(128 + number)


def main() -> None:
    """Run the trial of a plan."""
    began = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _end)
    child = [sys.executable, "-m", "vllm_sparkforge.trial.child"]
    found = run(json.loads(sys.argv[1]), child, lambda text: print(f"trial: {text}", flush=True))
    print(f"trial: {time.monotonic() - began:.0f} s")
    print(f"verdict: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
