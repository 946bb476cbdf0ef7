"""The faults of benchmarks/faults.py: each disturbs one build of a subject, and says how."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from fault_subjects import PATIENCE_S, Subject

from sparkforge.core.run import call
from tests.disks import MIB, cut_power, mounted, new_disk, renew
from tests.support import Page

# codes that a disturbed build may end with: see build.py --exit-codes
FETCH, INTEGRITY, STORE, INTERRUPTED = 4, 5, 11, 130
_SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Run:
    """A build that has ended.

    Attributes:
        code: exit code; negative: the signal that ended it.
    """

    code: int
    output: str

    def problems(self, *codes: int) -> list[str]:
        """Return what is wrong with its end."""
        found = []
        if self.code not in codes:
            found.append(f"exit code {self.code}: {self.output[-1500:]}")
        if "Traceback (most recent call last)" in self.output:
            found.append(f"a traceback: {self.output[-3000:]}")
        return found

    @property
    def unstarted(self) -> bool:
        """Whether Ctrl-C ended Python before it had read the first module of ours."""
        own = re.search(r"/sparkforge/[a-z]+/[a-z_]+\.py", self.output)
        return "KeyboardInterrupt" in self.output and own is None


@dataclass(frozen=True)
class Disturbed:
    """What a fault did: in words, and what was wrong already then.

    Attributes:
        hit: whether it met a build at work; else it is tried again.
    """

    words: str
    problems: list[str]
    hit: bool = True


Fault = Callable[[Subject, random.Random, float], AbstractContextManager[Disturbed]]
"""Called with the subject, dice, and the seconds of an undisturbed build.

The next build runs inside of the context: a disk of the fault's own is still mounted there.
"""


def run(subject: Subject) -> Run:
    """Run the build to its end."""
    return ended(subject.start())


def ended(child: subprocess.Popen[str]) -> Run:
    """Wait for a build."""
    out, _ = child.communicate(timeout=PATIENCE_S)
    return Run(child.returncode, out)


def _signalled(
    child: subprocess.Popen[str], number: signal.Signals, after_s: float
) -> tuple[Run, bool]:
    """Send a signal to a build's whole group after some time; returns whether it still ran."""
    try:
        out, _ = child.communicate(timeout=after_s)
        return Run(child.returncode, out), False
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, number)
    return ended(child), True


@contextmanager
def kill(subject: Subject, dice: random.Random, seconds: float) -> Iterator[Disturbed]:
    """End the build by a signal at a random moment of what is left to do."""
    number, share = dice.choice(_SIGNALS), dice.random()
    gone = subject.forget(dice)
    # who has less to do takes no longer, and each kill that came late says how long
    known = (took for without, took in subject.left.items() if without >= set(gone))
    after_s = share * min([seconds, *known])
    start = time.monotonic()
    done, hit = _signalled(subject.start(), number, after_s)
    words = f"{number.name} after {after_s:.2f} s without {', '.join(gone)}"
    if not hit or done.code == 0:  # 0: the signal came after the work
        subject.left[frozenset(gone)] = time.monotonic() - start
        yield Disturbed(f"{words}: it had finished", done.problems(0), hit=False)
    elif done.unstarted:
        yield Disturbed(f"{words}: Python had not started", [], hit=False)
    else:
        # -SIGINT: before Python could take it
        yield Disturbed(words, done.problems(-number, INTERRUPTED))


@contextmanager
def damage(subject: Subject, dice: random.Random, seconds: float) -> Iterator[Disturbed]:
    """Flip a bit of a file in the store or in dist/, or cut it off; the build reads it."""
    del seconds
    gone = subject.forget(dice, 0.0) if dice.random() < 0.7 else []  # one, or none
    # the mark of a store is not among them: without it a folder is refused (docs/reliability.md)
    left_out = {"CACHEDIR.TAG", ".lock"}
    places = [path for path in sorted(subject.store.iterdir()) if path.name != "locks"]
    files = sorted(
        path
        for place in dice.sample([*places, subject.dist], len(places) + 1)
        if place.is_dir()
        for path in place.rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and path.stat().st_size
        and "__pycache__" not in path.parts
        and path.name not in left_out
    )
    if not files:
        yield Disturbed("nothing to damage", run(subject).problems(0))
        return
    # a folder first: git's many small files must not be all that is ever hit
    kinds = sorted({path.relative_to(subject.folder).parts[:3] for path in files})
    kind = dice.choice(kinds)
    path = dice.choice([one for one in files if one.relative_to(subject.folder).parts[:3] == kind])
    before = path.stat()
    name, size = path.relative_to(subject.folder), before.st_size
    path.chmod(before.st_mode | 0o200)
    if dice.random() < 0.5:
        at = dice.randrange(size * 8)
        with path.open("r+b") as file:
            file.seek(at // 8)
            byte = file.read(1)[0] ^ (1 << at % 8)
            file.seek(at // 8)
            file.write(bytes([byte]))
        # a disk changes no date; but of environments, and of what they are linked to, dates are
        # all that each build compares
        if not {"venv", "unpacked"} & set(path.parts):
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        words = f"bit {at} of {name} flipped"
    else:
        keep = dice.randrange(size)
        os.truncate(path, keep)
        words = f"{name} cut to {keep} of {size} bytes"
    done = run(subject)
    yield Disturbed(f"{words}, without {', '.join(gone) or 'nothing'}", done.problems(0))


@contextmanager
def download(subject: Subject, dice: random.Random, seconds: float) -> Iterator[Disturbed]:
    """Have the index damage, cut, delay or refuse what the build downloads."""
    del seconds
    server = subject.server
    assert server is not None
    subject.forget(dice, 1.0)
    name = dice.choice(sorted(server.pages))
    before = server.pages[name]
    body = before.body
    page = Page(body, headers=dict(before.headers))
    at = dice.randrange(len(body))
    match dice.choice(("flip", "cut", "stall", "status", "longer", "no ranges")):
        case "flip":
            page.body = body[:at] + bytes([body[at] ^ (1 << dice.randrange(8))]) + body[at + 1 :]
            words = f"byte {at} flipped"
        case "cut":
            page.cut, page.cut_at = dice.randrange(1, 4), at
            words = f"cut at byte {at}, {page.cut} times"
        case "stall":
            page.piece, page.pause_s = max(1, len(body) // 4), dice.uniform(0.2, 2)
            words = f"{page.pause_s:.1f} s between pieces"
        case "status":
            page.statuses = [dice.choice((429, 500, 502, 503, 504, 404))]
            words = f"status {page.statuses[0]}"
        case "longer":
            page.body, page.length = body + bytes(at), False
            words = f"{at} bytes more, and no length"
        case _:
            page.ranges, page.cut, page.cut_at = False, 1, at
            words = f"cut at byte {at}, and no ranges"
    server.pages[name] = page
    try:
        done = run(subject)
    finally:
        server.pages[name] = before
    yield Disturbed(f"{name}: {words}; exit code {done.code}", done.problems(0, FETCH, INTEGRITY))


@contextmanager
def at_once(subject: Subject, dice: random.Random, seconds: float) -> Iterator[Disturbed]:
    """Run several builds in one store, and kill some of them."""
    subject.forget(dice)
    children = [subject.start() for _ in range(dice.randrange(2, 5))]
    doomed = dice.randrange(len(children))
    number, after_s = dice.choice(_SIGNALS), dice.uniform(0, 1.5 * seconds)
    problems: list[str] = []
    for at, child in enumerate(children):
        if at < doomed:
            done, hit = _signalled(child, number, after_s)
            if not done.unstarted:
                problems += done.problems(*((-number, 0, INTERRUPTED) if hit else (0,)))
    for child in children[doomed:]:
        problems += ended(child).problems(0)
    killed = f"{doomed} of them with {number.name} after {after_s:.2f} s" if doomed else "none"
    yield Disturbed(f"{len(children)} builds, {killed} killed", problems)


# -- disks ----------------------------------------------------------------------------------


@contextmanager
def full(subject: Subject, dice: random.Random, seconds: float) -> Iterator[Disturbed]:
    """Fill the disk of an empty store to a random level, then make room."""
    del seconds
    subject.forget(dice, 1.0)
    free = dice.randrange(1, 60) * 4096
    with mounted(subject.disk, "-t", "tmpfs", "-o", f"size={MIB}", "tmpfs"):
        (subject.disk / "dist").mkdir()
        filler = subject.disk / "filler"
        filler.write_bytes(bytes(MIB - free))
        done = run(subject)
        filler.unlink()
        yield Disturbed(f"{free >> 10} KiB free; exit code {done.code}", done.problems(0, STORE))


@contextmanager
def power(subject: Subject, dice: random.Random, seconds: float) -> Iterator[Disturbed]:
    """Cut the power of the store's disk at a random moment: what was not synced is lost."""
    subject.forget(dice, 1.0)
    commit_s = dice.choice((1, 5))  # how long ext4 may wait with its journal
    if subject.server is not None:  # a build of a second would have synced next to nothing
        seconds += 10
        for page in subject.server.pages.values():
            page.piece, page.pause_s = max(1, len(page.body) // 3), dice.uniform(0, 1)
    after_s = dice.uniform(0, 1.1 * seconds)
    with new_disk(subject.folder / "disk.ext4", subject.mebibytes) as disk:
        options = ("-o", f"loop,commit={commit_s}", str(disk))
        with mounted(subject.folder / "fresh", *options):
            call("cp", "-a", f"{subject.disk}/.", subject.folder / "fresh")
        with mounted(subject.disk, *options):
            child = subject.start()
            time.sleep(after_s)
            cut_power(subject.disk)
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            # its output may end in a traceback: a disk that returns errors for all is another fault
            ended(child)
            problems = [] if subject.all_ended() else [f"still there: {subject.processes()}"]
        if subject.server is not None:
            for page in subject.server.pages.values():
                page.pause_s = 0
        renew(disk)
        with mounted(subject.disk, *options):
            left = sum(1 for path in subject.store.rglob("*") if path.is_file())
            yield Disturbed(f"power cut after {after_s:.2f} s, {left} files left", problems)


FAULTS: Mapping[str, Fault] = {
    "kill": kill,
    "damage": damage,
    "download": download,
    "at once": at_once,
    "full disk": full,
    "power cut": power,
}
"""The faults by name."""
