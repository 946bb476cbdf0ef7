"""``accept --load``: many clients for minutes, some of them rude; nothing may leak or break.

Each client sends one request of each kind, then random ones by its own seed. The correct answer to
each kind is known, so any other is unexpected.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from sparkforge.core.log import log
from sparkforge.core.parallel import in_parallel
from sparkforge.inspect.accept import behind, together
from sparkforge.inspect.accept.behind import Unseen
from sparkforge.inspect.accept.row import LOAD, Check, Row, Subject, Unmet, judged, need, shown
from sparkforge.runtime import client
from sparkforge.serving import warmup as answers

CLIENTS = 32
MEMORY_EVERY_S = 5.0
GROWTH_MIB = 64
"""Limit in a quarter of the time; an estimate."""
_SLOW_S, _SLOW_PIECES = 0.5, 6  # between two pieces of an answer, and how often
_HUGE_BYTES = 16 << 20
_REFUSED = (400, 404, 413, 422)
_BUSY = 503  # of the memory guard, with Retry-After
_EXAMPLES = 5


@dataclass
class Tally:
    """Results of the requests.

    State: counts, examples, seconds to the first piece of each stream, readings of memory.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    done: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    sizes: list[behind.Memory] = field(default_factory=list)
    unseen: str = ""

    def count(self, kind: str, problem: str = "") -> None:
        with self.lock:
            self.done[kind] += 1
            if problem:
                self.unexpected[kind] += 1
                if len(self.examples) < _EXAMPLES:
                    self.examples.append(f"{kind}: {problem}")


def _asked(subject: Subject, dice: random.Random) -> float:
    body = subject.body(f"{answers.QUESTION} {dice.random()}", tokens=128)
    said = client.streamed(subject.place, body)
    need(not said.empty, "an answer", "an empty one")
    need(said.complete, "[DONE]", "the end of the stream")
    return said.moments[0]


def _whole(subject: Subject, dice: random.Random) -> None:
    body = subject.body(f"{answers.QUESTION} {dice.random()}", tokens=128)
    need(not client.chat(subject.place, body).empty, "an answer", "an empty one")


def _cancelled(subject: Subject, dice: random.Random) -> None:
    need(together.hang_up(subject), "a piece", "none")


def _slow(subject: Subject, dice: random.Random) -> None:
    """Read a long answer with pauses, and leave before its end."""
    body = {
        "model": subject.model.name,
        "prompt": f"Hello {dice.random()}",
        "stream": True,
        "ignore_eos": True,
        "max_tokens": min(2000, max(1, subject.model.max_len // 2)),
    }
    stream = client.events(subject.place, client.COMPLETIONS, body)
    try:
        for _, event in zip(range(_SLOW_PIECES), stream, strict=False):
            need(event is not None, "more pieces", "the end")
            time.sleep(_SLOW_S)
    finally:
        stream.close()


def _malformed(subject: Subject, dice: random.Random) -> None:
    good = subject.body("Hello", tokens=1)
    wrong: Sequence[bytes] = (
        b"",
        b"\x00\xff\xfe",
        b"[" * 10_000,
        json.dumps(good).encode()[:-3],
        json.dumps([good]).encode(),
        json.dumps({**good, "messages": "Hello"}).encode(),
        json.dumps({**good, "messages": [{"role": "nobody", "content": 7}]}).encode(),
        json.dumps({**good, "max_tokens": -5}).encode(),
        json.dumps({**good, "temperature": "warm"}).encode(),
        json.dumps({**good, "model": "no-such-model"}).encode(),
        json.dumps({**good, "stop": [[]]}).encode(),
        json.dumps({**good, "tools": [{"type": "function"}]}).encode(),
    )
    for body in wrong:
        _refused(subject, body, shown(body[:60]))


def _huge(subject: Subject, dice: random.Random) -> None:
    """Send a prompt longer than any context."""
    words = "spark " * (_HUGE_BYTES // 6 if dice.random() < 0.2 else subject.model.max_len + 100)
    _refused(subject, json.dumps(subject.body(words, tokens=1)).encode(), "a huge prompt")


def _refused(subject: Subject, body: bytes, what: str) -> None:
    reply = client.post(subject.place, client.CHAT, body)
    if reply.status == _BUSY:  # the guard does not read the body
        raise ValueError(f"status {_BUSY}: {reply.text}")
    expected = f"status {_REFUSED[0]} for {what}"
    need(reply.status in _REFUSED, expected, f"{reply.status} {reply.text}")


Kind = Callable[[Subject, random.Random], float | None]
KINDS: Mapping[str, tuple[Kind, int]] = {
    "streamed": (_asked, 50),
    "whole": (_whole, 10),
    "cancelled": (_cancelled, 20),
    "slow reader": (_slow, 8),
    "malformed": (_malformed, 10),
    "huge": (_huge, 2),
}
"""Requests by kind, and the weight of each; a stream gives the seconds to its first piece."""


def _one(subject: Subject, kind: str, dice: random.Random, tally: Tally) -> None:
    try:
        first = KINDS[kind][0](subject, dice)
    except Unmet as error:
        tally.count(kind, f"expected {error.expected}, got {error.got}")
    except (OSError, ValueError) as error:
        if f"status {_BUSY}" in str(error):
            tally.count(f"{kind} (503, refused by the memory guard)")
        else:
            tally.count(kind, f"{type(error).__name__}: {shown(str(error))}")
    else:
        tally.count(kind)
        if first is not None:
            tally.firsts.append(first)


def run(subject: Subject, seconds: float, clients: int = CLIENTS, seed: int = 1) -> list[Row]:
    """Put a server under load; return the rows of the report.

    Args:
        seconds: time during which new requests start.
        seed: of the kinds' order.
    """
    tally, began = Tally(), time.monotonic()
    end = began + seconds
    names, weights = list(KINDS), [weight for _, weight in KINDS.values()]

    def work(number: int, stopping: Event) -> None:
        dice = random.Random(f"{seed} {number}")
        kinds = dice.sample(names, len(names))  # also in a short time
        while (kinds or time.monotonic() < end) and not stopping.is_set():
            kind = kinds.pop(0) if kinds else dice.choices(names, weights)[0]
            _one(subject, kind, dice, tally)

    def watch(stopping: Event) -> None:
        while (left := end - time.monotonic()) > 0 and not stopping.is_set():
            _measure(subject, tally)
            passed = seconds - left
            log.progress("load", passed, seconds, "s", note=f"{sum(tally.done.values())} requests")
            stopping.wait(min(MEMORY_EVERY_S, left))

    jobs: list[Callable[[Event], None]] = [
        watch,
        *(partial(work, number) for number in range(clients)),
    ]
    list(in_parallel(lambda job, stopping: job(stopping), jobs, len(jobs)))
    _measure(subject, tally)
    took = time.monotonic() - began
    return [
        _answers(tally, took, clients),
        *(judged(check, subject) for check in (_LEFT, _memory(tally), _AFTER)),
    ]


def _measure(subject: Subject, tally: Tally) -> None:
    try:
        tally.sizes.append(behind.memory(subject.behind, subject.place))
    except Unseen as reason:
        tally.unseen = str(reason)


def _answers(tally: Tally, took: float, clients: int) -> Row:
    name, total = f"{LOAD}answers", sum(tally.done.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.done.items()))
    if wrong := sum(tally.unexpected.values()):
        got = f"{wrong} unexpected of {total} ({kinds}): {'; '.join(tally.examples)}"
        hint = "the server's log has the reason"
        return Row(name, "fail", round(took, 1), "", "what each kind gets", got, hint)
    times = sorted(tally.firsts)
    said = "no stream was answered"
    if times:
        half, most = statistics.median(times), times[int(0.99 * len(times))]
        said = f"first piece after {half:.2f} s in the median, {most:.1f} s for 99 %"
    seen = f"{total} requests of {clients} clients: {kinds}; {said}"
    return Row(name, "ok", round(took, 1), seen)


def _flat(tally: Tally) -> str:
    """Judge whether memory grows steadily; return the readings.

    The first quarter of the time does not count: caches fill, threads and compilers start. The
    medians of the other quarters are compared. A leak continues: memory grows from the second to
    the third quarter and from the third to the last. A step, such as a larger buffer or one more
    thread, may have any size and time, but it is only in one of the two. So the smaller growth
    counts. Two steps, one in each, look like a leak; more minutes distinguish them.
    """
    if len(tally.sizes) < 4:
        raise Unseen(tally.unseen or "too few readings: more minutes are needed")
    whose = {memory.whose for memory in tally.sizes}
    need(len(whose) == 1, "the same processes to the end", ", ".join(sorted(whose)))
    sizes = [memory.size / (1 << 20) for memory in tally.sizes]
    quarter = len(sizes) // 4
    starts = (len(sizes) - quarter * left for left in (3, 2, 1))
    # a reading, not a mean of two: a step in the middle of a quarter would be half in each growth
    second, third, last = (statistics.median_low(sizes[at : at + quarter]) for at in starts)
    grown = (third - second, last - third)
    changes = " and ".join(f"{growth:+.0f}" for growth in grown)
    reading = f"{second:.0f} MiB, then {changes} MiB, of {whose.pop()}"
    wanted = f"at most {GROWTH_MIB} MiB more in one of the last two quarters of the time"
    need(min(grown) <= GROWTH_MIB, wanted, reading)
    return f"{reading}; most {max(sizes):.0f} MiB"


def _memory(tally: Tally) -> Check:
    return Check(f"{LOAD}memory", "", "see the server's log", lambda _: _flat(tally))


def _after(subject: Subject) -> str:
    said = client.chat(subject.place, subject.body(answers.QUESTION))
    need(said.content.strip(), "content", said.reasoning or "nothing")
    return shown(said.content)


_LEFT = Check(
    f"{LOAD}requests left",
    "",
    "other clients? otherwise requests leak: doctor --report",
    lambda subject: together.idle(subject, together.IDLE_S),
)
_AFTER = Check(f"{LOAD}a chat after it", "", "see the server's log", _after)
