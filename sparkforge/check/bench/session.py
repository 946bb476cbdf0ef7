"""A run: servers in rounds, tests one by one, and the result, written after each test."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.check.bench import benchy, result
from sparkforge.check.bench.benchy import Test
from sparkforge.check.bench.result import Identity, Result, Samples
from sparkforge.check.bench.sides import Side
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import glimpse
from sparkforge.runtime import client
from sparkforge.runtime.client import Place
from sparkforge.serving.options import redacted

_ATTEMPTS = 5
"""Of a test; on two cores with five busy processes about one in ten gave no speed of decode."""
_SLOWED = "clocks_event_reasons.hw_slowdown,clocks_event_reasons.sw_thermal_slowdown"


def measure(runs: Sequence[Measurement], rounds: int, *, together: bool) -> None:
    """Measure servers in rounds.

    Args:
        together: they run at the same time; else each starts for its round.

    Raises:
        ServerError: a server does not answer as expected.
        ServerError: a server does not start.
    """
    with ExitStack() as stack:
        places = [stack.enter_context(run.side.start()) for run in runs] if together else []
        for number in range(rounds):
            # A B, B A, …: drift over time affects both
            for at in range(len(runs)) if number % 2 == 0 else reversed(range(len(runs))):
                if together:
                    runs[at].round(places[at], number)
                elif runs[at].missing(number):
                    with runs[at].side.start() as place:
                        runs[at].round(place, number)
    for run in runs:
        run.write(complete=True)


@dataclass
class Measurement:
    """One side. State: its result so far, and what disturbed it, by kind."""

    side: Side
    tests: Sequence[Test]
    call: benchy.Call
    rounds: int
    folder: Path
    result: Result
    disturbed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        side: Side,
        common: Identity,
        tests: Sequence[Test],
        call: benchy.Call,
        rounds: int,
        out: Path,
    ) -> Measurement:
        """Begin, or continue the part of the same run that the folder has.

        Raises:
            UsageError: it has another run, or a complete one.
        """
        folder = out / side.name
        ours = {name: value for name, value in vars(side.identity).items() if value}
        identity = replace(common, **ours)
        # results are also for others
        identity = replace(identity, options=tuple(redacted(identity.options)))
        started = datetime.now(UTC).isoformat(timespec="seconds")
        kept = Result(started, complete=False, disturbed=(), identity=identity, samples=())
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            kept = result.load(folder)
            if kept.complete or replace(kept.identity, model="") != identity:
                msg = f"--out {folder}: exists already, with another run or a complete one"
                raise UsageError(msg, "name a new folder")
        return cls(side, tests, call, rounds, folder, kept, {text: text for text in kept.disturbed})

    def _files(self, number: int) -> Iterator[tuple[Test, Path]]:
        for test in self.tests:
            name = re.sub(r"\W+", "-", test.name).strip("-")
            yield test, self.folder / "llama-benchy" / f"round-{number + 1}" / f"{name}.json"

    def missing(self, number: int) -> list[tuple[Test, Path]]:
        """Return the tests of a round that have no result yet."""
        return [(test, file) for test, file in self._files(number) if not file.exists()]

    def write(self, **changes: Any) -> None:
        """Store the result, with the samples of all files of llama-benchy."""
        joined: dict[tuple[str, result.Metric], list[float]] = {}
        for number in range(self.rounds):
            for test, file in self._files(number):
                for one in benchy.read(file, test) if file.exists() else ():
                    joined.setdefault((one.test, one.metric), []).extend(one.values)
        samples = tuple(Samples(*key, tuple(values)) for key, values in joined.items())
        disturbed = tuple(self.disturbed.values())
        self.result = replace(self.result, samples=samples, disturbed=disturbed, **changes)
        result.save(self.result, self.folder)

    def round(self, place: Place, number: int) -> None:
        """Measure the missing tests of one round."""
        model = client.served_model(place)
        identity = replace(self.result.identity, model=model.name)
        call = self.call
        with log.step(f"{self.side.name or 'server'}, round {number + 1} of {self.rounds}"):
            for test, file in self.missing(number):
                file.parent.mkdir(parents=True, exist_ok=True)
                self._look()
                found = self._measured(call, place, model.name, test, file)
                # the question is about the model: the first test is enough
                call = replace(call, coherent=False)
                self.write(identity=identity)
                speeds = [f"{result.METRICS[one.metric]} {one.mean:.1f}" for one in found]
                log.info(f"{test.name}: {', '.join(speeds)}")

    def _look(self) -> None:
        """Note other programs' use of the CPU, and a hot GPU, while the server is idle."""
        cores, busy = os.cpu_count() or 1, busy_cores()
        if busy > max(0.5, 0.05 * cores):
            self._note("CPU", f"other programs used {busy:.1f} of {cores} cores")
        if "Active" in smi(_SLOWED).replace("Not Active", ""):
            self._note("GPU", "heat or power supply slowed the GPU down (nvidia-smi -q)")

    def _note(self, kind: str, text: str) -> None:
        if kind not in self.disturbed:
            self.disturbed[kind] = f"{text}: results are unreliable"
            log.warning(self.disturbed[kind])

    def _measured(
        self, call: benchy.Call, place: Place, model: str, test: Test, file: Path
    ) -> list[Samples]:
        """Run a test until it has a speed of decode; return its samples.

        vLLM joins the tokens that wait for its front end. On a busy machine a short answer of a
        small model can be one piece, which has no speed.
        """
        for _ in range(_ATTEMPTS):
            benchy.measure(call, place, model, test, file)
            found = benchy.read(file, test)
            if any(one.metric == "decode" for one in found):
                tokens = benchy.received(file, test, prefix_caching=call.prefix_caching)
                if tokens < test.generated / 2:
                    text = f"{test.name}: answers had {tokens:.1f} of {test.generated} tokens"
                    self._note(test.name, text)
                return found
            file.unlink()
            log.info(f"{test.name}: no answer came in more than one piece")
        msg = f"{test.name}: no decode speed after {_ATTEMPTS} attempts"
        raise ServerError(msg, f"see {file.with_suffix('.log')}, and the server's")


def busy_cores(seconds: float = 1.0) -> float:
    """Return the cores that are busy, over some time; 0 where Linux does not say."""

    def ticks() -> int:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(int(fields[at]) for at in (0, 1, 2, 5, 6, 7))  # all but idle and iowait

    try:
        before = ticks()
        time.sleep(seconds)
        return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds
    except (OSError, IndexError, ValueError):
        return 0.0


def smi(fields: str) -> str:
    """Return what nvidia-smi says of each GPU, one a line; "" without one."""
    words = ("--format=csv,noheader", f"--query-gpu={fields}")
    return glimpse("nvidia-smi", *words, timeout_s=20).out.strip()


def machine() -> str:
    """Return this machine in words: CPU, cores, and GPUs with their driver."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    cpu = re.search(r"(?m)^model name\s*: (.+)$", text)  # arm64 has none
    gpus = smi("name,driver_version").splitlines()
    words = [platform.machine(), cpu[1] if cpu else "", f"{os.cpu_count()} cores", *gpus]
    return "; ".join(filter(None, words))
