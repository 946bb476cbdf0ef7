"""The trial of our plugin's kernels, before anything is downloaded.

A kernel may fault or hang on a device that nobody has tried, so the plugin runs each in a process
of its own, with a deadline (``python -m vllm_sparkforge.trial``). The server gets what failed as an
option, and does not use it. Where CUTLASS's experts are right and faster, it gets these, too.
"""

import importlib.util
import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from sparkforge.serving import health, options, supervise
from sparkforge.serving.options import StartError, say

MODULE, FAILED = "vllm_sparkforge", "--failed-kernels"
NAME = "trial"  # of the file that has the last verdict
# what decides beside options which kernels there are
_VARIABLES = ("VLLM_SPARKFORGE", "VLLM_BATCH_INVARIANT", "VLLM_LORA_ENABLE_DUAL_STREAM")


class Verdict(BaseModel, frozen=True):
    """What the plugin found; the default is that of no trial."""

    failed: tuple[str, ...] = ()
    moe_backend: str | None = None
    """CUTLASS's experts, where they are right and faster."""
    expect: Mapping[str, str | None] = Field(default_factory=dict)
    """What vLLM will say of it, by kind of backend; None: unknown."""
    keep: bool = False
    """Whether another trial would find the same: not after a lack of memory."""
    before: bool = False  # of an earlier start

    def options(self) -> list[str]:
        """Return the server's options that follow."""
        found = [FAILED, ",".join(self.failed)] if self.failed else []
        return [*found, "--moe-backend", self.moe_backend] if self.moe_backend else found


class Kept(BaseModel, frozen=True):
    """A verdict in a file, and what it depends on."""

    asked: Any
    verdict: Verdict


def plan(real: Sequence[str], variables: Mapping[str, str], *, choose: bool) -> dict[str, Any]:
    """Return what is to be tried for a server with these options; nothing where it is empty."""
    ours = json.loads(options.value(options.for_plugin(real), options.CONFIG) or "{}")
    given = ours.get(options.KEY, {})
    plugins = variables.get("VLLM_PLUGINS")
    loaded = plugins is None or options.KEY in plugins.split(",")
    there = loaded and importlib.util.find_spec(MODULE) is not None
    if not there or given.get("decode_kernels") == "off":
        return {}
    backend = (options.value(real, "--moe-backend") or "auto").lower().replace("-", "_")
    cache = options.value(real, "--kv-cache-dtype") or "auto"
    return {
        "options": given,
        "moe_backend": backend,
        "kv_cache_dtype": cache,
        "ranks": options.positive(real, "--tensor-parallel-size", 1),
        "choose": choose,
    }


def run(
    asked: Mapping[str, Any],
    variables: Mapping[str, str],
    signals: supervise.Signals,
    driver: str,
    file: Path | None,
) -> Verdict:
    """Return the plugin's verdict, from a file where the same was asked before.

    Raises StartError where ``--decode-kernels on`` cannot be met, StoppedError after a signal.
    """
    question = [driver, asked, [variables.get(name) for name in _VARIABLES]]
    kept = None
    if file is not None and file.exists():
        with suppress(ValueError):  # cut off: the disk was full
            kept = Kept.model_validate_json(file.read_bytes())
    if kept is not None and kept.asked == question:
        verdict = kept.verdict.model_copy(update={"before": True})
        say(f"trial: as before; failed: {', '.join(verdict.failed) or 'none'}")
    else:
        program = [sys.executable, "-m", f"{MODULE}.trial", json.dumps(asked)]
        verdict = tried(program, variables, signals)
        if file is not None and verdict.keep:
            file.write_text(Kept(asked=question, verdict=verdict).model_dump_json())
    # a tactic of CUTLASS is no decode kernel: another one is used
    failed = ", ".join(one for one in verdict.failed if not one.startswith("CUTLASS"))
    if failed and asked["options"].get("decode_kernels") == "on":
        raise StartError(f"--decode-kernels on: these failed their trial: {failed}")
    return verdict


def tried(
    command: Sequence[str], variables: Mapping[str, str], signals: supervise.Signals
) -> Verdict:
    """Run the plugin's trial, and show what it says; StoppedError after a signal."""
    health.tell("trial of the kernels")
    say(f"trial: the kernels run in a process of their own: {shlex.join(command)}")
    child = signals.child = supervise.start(command, variables)
    verdict = None
    assert child.stdout is not None
    try:
        with io.TextIOWrapper(child.stdout, "utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("verdict: "):
                    verdict = Verdict.model_validate_json(line.partition(" ")[2])
                    break  # a process that the driver holds may keep the pipe open
                if line.startswith("trial: "):
                    say(options.shown(line))
                else:
                    print(line, end="", flush=True)
        child.wait()
    finally:
        supervise.kill(child.pid)
        signals.child = None
    if signals.came:
        raise supervise.StoppedError
    if verdict is None:
        say(f"warning: trial: no verdict (exit code {child.returncode}); going on without")
    return verdict or Verdict()
