"""A check of doctor: a decorated function that reads the machine, judges, and returns findings.

The function's docstring is the reason for the check. To add one, write the function.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from sparkforge.check.doctor.readings import Machine
from sparkforge.check.doctor.wanted import Wanted

State = Literal["ok", "warning", "error", "not checked"]
"""``error``: the target cannot be built or served; ``warning``: it may fail."""
Need = Literal["platform", "gpu", "image", "model", "pair"]
"""A machine of the target's platform; a target with a GPU, image or model; one machine of two."""
_LIMIT_S = 30.0


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    state: State
    seen: str
    hint: str = ""
    """A command, mostly; "" if there is nothing to do."""
    name: str = ""
    """Of the check; ``judge`` sets it."""


ok, warning = partial(Finding, "ok"), partial(Finding, "warning")
error, unknown = partial(Finding, "error"), partial(Finding, "not checked")
Found = Finding | list[Finding] | None
"""None: the check does not concern this machine, or another one reports it."""
Function = Callable[[Machine, Wanted], Found]


@dataclass(frozen=True)
class Check:
    """A check; ``alike``: state and hint where the two machines of a pair differ in it."""

    name: str
    needs: tuple[Need, ...]
    alike: tuple[State, str] | None
    run: Function


CHECKS: list[Check] = []


def check(
    name: str, *needs: Need, alike: tuple[State, str] | None = None
) -> Callable[[Function], Function]:
    """Register a function as a check."""

    def register(run: Function) -> Function:
        CHECKS.append(Check(name, needs, alike, run))
        return run

    return register


def judge(seen: Machine, want: Wanted, limit_s: float = _LIMIT_S) -> list[Finding]:
    """Run all checks that concern the target, at once; one that fails or hangs is a finding."""
    needs: dict[Need, bool] = {
        "gpu": want.cuda_arch is not None,
        "image": want.image,
        "model": bool(want.repository),
        "pair": seen.in_pair,
    }
    chosen = [one for one in CHECKS if all(needs.get(need, True) for need in one.needs)]
    results: dict[str, Found] = {}

    def run(one: Check) -> None:
        if "platform" in one.needs and seen.platform not in want.platforms:
            text = f"this machine is {seen.platform}; run doctor on {' or '.join(want.platforms)}"
            results[one.name] = unknown(text)
            return
        try:
            results[one.name] = one.run(seen, want)
        except Exception as why:  # a machine may report anything: the other checks still count
            text = f"the check failed: {type(why).__name__}: {why}"
            hint = "python3 build.py doctor --report   # and attach it to an issue"
            results[one.name] = unknown(text, hint)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in chosen]
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = unknown(f"no answer within {limit_s:.0f} s", "df -h; sudo dmesg | tail")
    findings: list[Finding] = []
    for one in chosen:
        found = results.get(one.name, late)
        listed = found if isinstance(found, list) else [found] if found else []
        findings += [replace(each, name=one.name) for each in listed]
    return findings


def compare(ours: Sequence[Finding], theirs: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding for each check in which the two machines of a pair must be alike."""
    sides = [{each.name: each.seen for each in findings} for findings in (ours, theirs)]
    for one in CHECKS:
        if one.alike is None or not any(one.name in side for side in sides):
            continue
        here, there = (side.get(one.name, "not checked") for side in sides)
        name, (state, hint) = f"same {one.name}", one.alike
        if here == there:
            yield ok(f"{here} on both", name=name)
        else:
            yield Finding(state, f"here {here}; there {there}", hint, name)
