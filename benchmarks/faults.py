"""Builds under faults: after each, the next build has to give what an undisturbed one gives.

    python3 benchmarks/faults.py small                  # the tests' small project, all faults
    python3 benchmarks/faults.py wheels environment     # the cpu target
    python3 benchmarks/faults.py image --base NAME      # a small image, in DOCKER_HOST's engine
    python3 benchmarks/faults.py small --count kill=10 --seed 7

A trial disturbs one build, then runs the same build undisturbed, and compares: every byte of dist/
(of the receipt all but times), of an environment's files, the id of an image. No process, mount,
container or temporary file may be left, and no output may have a traceback. Trial N of a fault
depends on the seed and on N only, but not to the millisecond: the machine's speed takes part. A
kill that comes before or after the build's work is no trial of the number: another one follows.

Full disks and power cuts need root (mount). A power cut is simulated by FS_IOC_SHUTDOWN on an ext4
file system of the trial's own: what was not written to its disk by then is lost.

Exit code: 0; 1 where a trial found something; 2 for wrong use; 130 if interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build import ensure_environment  # noqa: E402

if __name__ == "__main__" and Path(sys.prefix) != ROOT / ".venv":
    python = ensure_environment(ROOT / ".venv", ROOT / "requirements" / "driver.txt")
    os.execv(python, [str(python), __file__, *sys.argv[1:]])

import fault_subjects  # noqa: E402
from fault_kinds import FAULTS, run  # noqa: E402
from fault_subjects import Subject  # noqa: E402

from tests.disks import can_mount  # noqa: E402

_NEEDS_MOUNTS = ("full disk", "power cut")
COUNTS: Mapping[str, Mapping[str, int]] = {
    "small": {
        "kill": 100,
        "damage": 60,
        "download": 40,
        "at once": 15,
        "full disk": 20,
        "power cut": 20,
    },
    "small-environment": {"kill": 20, "damage": 30, "at once": 5, "power cut": 10},
    "wheels": {"kill": 100, "damage": 10, "at once": 3, "power cut": 3},
    "environment": {"kill": 20, "damage": 6, "at once": 1, "power cut": 2},
    "image": {"kill": 5},
}
"""Trials of each fault that hit, by subject."""
_TRIES = 10  # for each trial that hits
QUICK: Mapping[str, int] = {
    "kill": 6,
    "damage": 6,
    "download": 4,
    "at once": 2,
    "full disk": 3,
    "power cut": 3,
}


@dataclass(frozen=True)
class Trial:
    """One disturbed build and the one after it.

    Attributes:
        words: what was done.
        seconds: of both builds.
        hit: whether the build was at work when it was disturbed.
        problems: what was wrong; empty if nothing was.
    """

    subject: str
    fault: str
    number: int
    words: str
    seconds: float
    hit: bool
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Reference:
    """What an undisturbed build leaves."""

    outcome: Mapping[str, str]
    files: frozenset[str]
    seconds: float


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the first few names whose hashes differ."""
    names = sorted(expected.keys() | found.keys())
    wrong = [name for name in names if expected.get(name) != found.get(name)]
    return [f"{len(wrong)} results differ: {', '.join(wrong[:5])}"] if wrong else []


def undisturbed(subject: Subject) -> Reference:
    """Build twice from nothing; the results have to agree.

    Raises:
        SystemExit: the build fails, or does not give the same bytes.
    """
    outcomes, files, seconds = [], set[str](), 0.0
    for _ in range(2):
        start = time.monotonic()
        if problems := run(subject).problems(0):
            sys.exit(f"error: {subject.name}: the undisturbed build fails: {problems[0]}")
        seconds = time.monotonic() - start
        outcomes.append(subject.outcome())
        files |= subject.files()
        if len(outcomes) == 1:
            subject.forget(random.Random(0), 1.0)
    if wrong := differences(*outcomes):
        sys.exit(f"error: {subject.name}: two undisturbed builds differ: {wrong[0]}")
    return Reference(outcomes[0], frozenset(files), seconds)


def trial(subject: Subject, fault: str, number: int, seed: int, reference: Reference) -> Trial:
    """Disturb a build, run the next one, compare."""
    dice = random.Random(f"{seed} {subject.name} {fault} {number}")
    start = time.monotonic()
    with FAULTS[fault](subject, dice, reference.seconds) as disturbed:
        problems = [f"disturbed: {one}" for one in disturbed.problems]
        problems += [f"next build: {one}" for one in run(subject).problems(0)]
        if not problems:
            problems += differences(reference.outcome, subject.outcome())
        if not subject.all_ended():
            problems.append(f"processes are left: {subject.processes()}")
            subject.end_all()
        if left := sorted(subject.files() - reference.files):
            problems.append(f"{len(left)} files are left: {', '.join(left[:5])}")
    if more := subject.mounts():
        problems.append(f"mounts are left: {', '.join(more)}")
    took = round(time.monotonic() - start, 2)
    return Trial(subject.name, fault, number, disturbed.words, took, disturbed.hit, tuple(problems))


def trials(subject: Subject, counts: Mapping[str, int], seed: int) -> Iterator[Trial]:
    """Yield the trials of a subject, each fault's in turn.

    Raises:
        SystemExit: a fault hardly ever hits.
    """
    reference = undisturbed(subject)
    names = len(reference.outcome)
    print(f"{subject.name}: {names} results, {reference.seconds:.1f} s undisturbed", flush=True)
    for fault, count in counts.items():
        hits = number = 0
        while hits < count:
            number += 1
            if number > _TRIES * count:
                sys.exit(f"error: {subject.name}: {fault}: only {hits} of {number - 1} trials hit")
            done = trial(subject, fault, number, seed, reference)
            hits += done.hit
            state = "FAILED" if done.problems else "ok"
            print(
                f"{subject.name}: {fault} {hits}/{count}: {done.words}: {state}",
                *(f"    {problem}" for problem in done.problems),
                sep="\n",
                flush=True,
            )
            yield done
            if done.problems:
                _mend(subject, reference)


def _mend(subject: Subject, reference: Reference) -> None:
    """Let the trials after a failed one begin as the others did."""
    subject.forget(random.Random(0), 1.0)
    for name in subject.files() - reference.files:
        (subject.folder / name).unlink(missing_ok=True)
    run(subject)


def table(done: Sequence[Trial]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| build | fault | trials | hit | wrong afterwards | seconds |", "|---" * 6 + "|"]
    for subject, fault in dict.fromkeys((one.subject, one.fault) for one in done):
        ours = [one for one in done if (one.subject, one.fault) == (subject, fault)]
        wrong = sum(1 for one in ours if one.problems)
        hits, seconds = sum(one.hit for one in ours), sum(one.seconds for one in ours)
        lines.append(f"| {subject} | {fault} | {len(ours)} | {hits} | {wrong} | {seconds:.0f} |")
    return "\n".join(lines)


@contextmanager
def _subject(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Subject]:
    folder.mkdir()
    if name.startswith("small"):
        with fault_subjects.small(folder, name) as subject:
            yield subject
    elif name == "image":
        yield fault_subjects.baked(folder, options.base, options.downloads)
    else:
        until = "image" if name == "environment" else "wheels"
        yield fault_subjects.target(folder, until, options.downloads)


def _count(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in FAULTS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not FAULT=NUMBER; {', '.join(FAULTS)}")
    return name, int(number)


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", nargs="+", choices=COUNTS, metavar="|".join(COUNTS))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--count", type=_count, action="append", help="FAULT=NUMBER; only these")
    parser.add_argument("--quick", action="store_true", help="few trials, for CI")
    parser.add_argument("--base", help="base image of the cpu target's image")
    default = os.environ.get("SPARKFORGE_STORE", "~/.cache/sparkforge")
    parser.add_argument("--downloads", type=Path, default=default, help="a store to copy from")
    parser.add_argument("--folder", type=Path, help="where to work; default: TMPDIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all trials")
    options = parser.parse_args(words)
    options.downloads = options.downloads.expanduser()
    if "image" in options.subjects and options.base is None:
        parser.error("image needs --base IMAGE and an engine (DOCKER_HOST)")
    for name in ("folder", "json"):
        path: Path | None = getattr(options, name)
        if path is not None and not (path if name == "folder" else path.absolute().parent).is_dir():
            parser.error(f"--{name} {path}: there is no such folder")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the trials; returns the exit code."""
    options = _options(words)
    # a shell's background jobs ignore Ctrl-C, and the builds would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"seed {options.seed}", flush=True)
    done: list[Trial] = []
    skipped: list[str] = []
    # not ignored by its errors: what cannot be removed is a finding
    with tempfile.TemporaryDirectory(prefix="faults-", dir=options.folder) as holder:
        folder = Path(holder).resolve()
        if not can_mount(folder):
            skipped = list(_NEEDS_MOUNTS)
            print(f"not run: {', '.join(skipped)}: mounting needs root and loop devices")
        for name in options.subjects:
            counts = dict(options.count or (QUICK if options.quick else COUNTS[name]))
            if not name.startswith("small"):  # nobody's index but our own is disturbed
                counts.pop("download", None)
                counts.pop("full disk", None)  # sized for a small store
            counts = {one: count for one, count in counts.items() if one not in skipped}
            with _subject(name, folder / name, options) as subject:
                try:
                    done += trials(subject, counts, options.seed)
                except KeyboardInterrupt:
                    print("interrupted", file=sys.stderr)
                    return 130
                finally:
                    subject.end_all()
                    if options.json is not None:
                        _write(options.json, options.seed, done, skipped)
    print(table(done))
    return 1 if any(one.problems for one in done) else 0


def _write(path: Path, seed: int, done: Sequence[Trial], skipped: Sequence[str]) -> None:
    document = {
        "seed": seed,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.release()}",
        "not_run": list(skipped),
        "trials": [asdict(one) for one in done],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
