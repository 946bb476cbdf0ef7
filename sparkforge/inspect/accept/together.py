"""Checks of the server as a whole: users at once, backends, memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event

from sparkforge.core.parallel import in_parallel
from sparkforge.inspect.accept import behind, talk
from sparkforge.inspect.accept.behind import Metrics, Unseen
from sparkforge.inspect.accept.row import Check, Subject, Unmet, need
from sparkforge.inspect.doctor.chats import TOGETHER
from sparkforge.runtime import client
from sparkforge.serving import answers
from sparkforge.serving.backends import Watch

CANCELLED = 4
IDLE_S = 60.0
"""Time for the gauges to reach 0: the engine handles an abort between two steps."""
_LOOK_EVERY_S = 0.2
_UNBROKEN, _MEANWHILE_S, _LOOKS = 600_000, 10.0, 10  # characters; an encoder may take minutes
_ROUNDS = 4
GROWTH_BYTES = 64 << 20
"""Limit for the growth of memory in ``_ROUNDS`` rounds; an estimate."""


def hang_up(subject: Subject) -> bool:
    """Start an answer of minutes, and leave after its first piece."""
    body = {
        "model": subject.model.name,
        "prompt": "Hello",
        "stream": True,
        "ignore_eos": True,
        "max_tokens": max(1, subject.model.max_len // 2),
    }
    stream = client.events(subject.place, client.COMPLETIONS, body)
    began = next(stream, None) is not None
    stream.close()
    return began


def crowd(subject: Subject, cancelled: int = CANCELLED) -> list[client.Said]:
    """Ask several at once, while others leave; return the answers."""
    body = subject.body(answers.QUESTION)

    def ask(leaves: bool, stopping: Event) -> client.Said | None:
        if not leaves:
            return client.streamed(subject.place, body)
        need(hang_up(subject), "a piece before it is cancelled", "none")
        return None

    kinds = [*[True] * cancelled, *[False] * TOGETHER]
    return [said for said in in_parallel(ask, kinds, len(kinds)) if said is not None]


def idle(subject: Subject, limit_s: float) -> str:
    """Wait until no request is left in the server.

    Raises:
        Unmet: some remain, or their part of the KV cache.
    """
    end = time.monotonic() + limit_s
    while True:
        metrics = Metrics.of(subject.place)
        left = {
            "running": metrics.total(behind.RUNNING),
            "waiting": metrics.total(behind.WAITING),
            "share of the KV cache": metrics.total(behind.KV_CACHE),
        }
        if not any(left.values()):
            return "running, waiting and KV cache 0"
        if time.monotonic() > end:
            got = ", ".join(f"{name} {value:g}" for name, value in left.items())
            raise Unmet(f"0 after {limit_s:.0f} s", got)
        time.sleep(_LOOK_EVERY_S)


def _gauges(subject: Subject) -> str:
    return idle(subject, IDLE_S)


def _together(subject: Subject) -> str:
    for said in crowd(subject):
        talk.whole(subject, said)
    return f"{TOGETHER} answers, {CANCELLED} cancelled"


def _unbroken(subject: Subject) -> str:
    body = subject.body("x" * _UNBROKEN, 1)

    def ask(long: bool, stopping: Event) -> int:
        if long:
            return client.post(subject.place, client.CHAT, body).status
        looks = (client.look(subject.place, "/health", _MEANWHILE_S) for _ in range(_LOOKS))
        return max(reply.status for reply in looks if not stopping.wait(_LOOK_EVERY_S))

    health, status = in_parallel(ask, (False, True), 2)
    need(health == 200, "status 200 of /health meanwhile", health)
    need(status in (200, 400), "an answer or status 400", status)
    return f"status {status}, others are answered meanwhile"


def _backends(subject: Subject) -> str:
    box, profile = subject.behind, subject.profile
    # as if layers were quantised: vLLM's log shows whether some are
    expected = profile.expectations(("--mxfp4-layers", "any"), box.options)
    if not expected:
        raise Unseen("the profile expects none")
    watch = Watch(expected)
    for line in box.text().splitlines():
        watch.feed(line)
    for kind, wanted in expected.items():
        names = watch.seen.get(kind, {wanted})
        need(names == {wanted}, f"{kind} {wanted}", "/".join(sorted(names)))
    if not watch.seen:
        raise Unseen("the log names no backend (rotated, or VLLM_LOGGING_LEVEL)")
    missing = expected.keys() - watch.seen.keys() - {"linear"}  # only of quantised layers
    need(not missing, f"a line about {', '.join(sorted(missing))}", "none in the log")
    return ", ".join(f"{kind} {'/'.join(sorted(names))}" for kind, names in watch.seen.items())


def _kernels(subject: Subject) -> str:
    found = Metrics.of(subject.place).named(behind.KERNELS)
    if not found:
        raise Unseen("/metrics names no decode kernel (a CPU, or --decode-kernels off)")
    kinds = {metric.labels.get("kind", "?"): metric.value for metric in found}
    off = [kind for kind, value in kinds.items() if not value]
    need(not off, "every kind in use", f"not used: {', '.join(off)}")
    return ", ".join(kinds)


def _memory(subject: Subject) -> str:
    for _ in range(2):  # buffers for that many users at once
        crowd(subject, 0)
    sizes = list(_sizes(subject))
    first, last = sizes[0], sizes[-1]
    need(first.whose == last.whose, f"{first.whose} to the end", last.whose)
    need(
        last.size - first.size <= GROWTH_BYTES,
        f"at most {GROWTH_BYTES >> 20} MiB more",
        f"{(last.size - first.size) >> 20} MiB more, of {first.whose}",
    )
    grown = (last.size - first.size) / (1 << 20)
    return f"{first.size >> 20} MiB, {grown:+.1f} in {_ROUNDS * TOGETHER} chats ({first.whose})"


def _sizes(subject: Subject) -> Iterator[behind.Memory]:
    yield behind.memory(subject.behind, subject.place)
    for _ in range(_ROUNDS):
        crowd(subject, 0)
    yield behind.memory(subject.behind, subject.place)


CHECKS = (
    Check(
        "eight at once",
        "eight streamed chats, while four clients go away",
        "vllm#37030 showed first with requests at once: try another --moe-backend",
        _together,
    ),
    Check(
        "unbroken text",
        f"{_UNBROKEN:,} times `x` end with an answer or 400, and `/health` answers meanwhile",
        "the patch of vLLM's Harmony renderer is missing (docs/patches.md)",
        _unbroken,
    ),
    Check(
        "gauges",
        "no request runs or waits afterwards, the KV cache is free",
        "other clients? otherwise requests leak: doctor --report",
        _gauges,
    ),
    Check(
        "backends",
        "the log names those of the profile's `expect`",
        "SPARKFORGE_EXTRA_ARGS may choose another; else the wheel lacks the kernel",
        _backends,
    ),
    Check(
        "decode kernels",
        "`/metrics`: each kind passed its self-check",
        "the log has the reason (docs/kernels.md)",
        _kernels,
    ),
    Check(
        "memory",
        "before and after 32 chats",
        "run it again; if it grows each time: doctor --report",
        _memory,
    ),
)
