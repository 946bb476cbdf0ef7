#!/usr/bin/env python3
"""Make sure sparkforge's own environment is there, then hand over to it.

Needs Python 3.11 or newer and nothing else: the packages that sparkforge uses are installed,
with their hashes checked, into .venv beside this file. Every command waits for the imports here
at the top; what only the set-up needs is imported there.
"""

from __future__ import annotations

import signal

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
if __name__ == "__main__":
    # Ctrl-C while modules are imported would end in Python's traceback: it waits until it can be
    # answered, here or in sparkforge
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

import hashlib  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

TYPE_CHECKING = False  # typing's own takes 15 ms
if TYPE_CHECKING:
    from typing import NoReturn

ROOT = Path(__file__).resolve().parent
STAMP = "sparkforge.stamp"
MACHINE_ERROR = 8  # sparkforge.errors.MachineError; nothing of the package is importable yet
INTERRUPTED = 130


def ensure_environment(venv: Path, lock: Path) -> Path:
    """Return the interpreter of an environment that has exactly what the lock names."""
    python, stamp = venv / "bin" / "python", venv / STAMP
    wanted = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()

    def stands() -> bool:
        # the interpreter too: it is a link, and the system's Python may have gone
        return stamp.is_file() and stamp.read_text() == wanted and python.exists()

    if not stands():
        import fcntl
        import subprocess

        try:
            with venv.with_name(f"{venv.name}.lock").open("w") as taken:
                fcntl.flock(taken, fcntl.LOCK_EX)  # gone with its holder; two builds take turns
                if not stands():
                    make_environment(venv, lock, wanted)
        except (subprocess.CalledProcessError, OSError) as error:
            fail(
                f"{venv}: could not be set up: {error}",
                "install the package python3-venv, check the network and pip's configuration, or"
                " delete that folder, and run again",
            )
    return python


def make_environment(venv: Path, lock: Path, wanted: str) -> None:
    """Build the environment beside its place and move it there when it is complete."""
    import shutil
    import subprocess

    note = f"build.py: setting up {venv.name} from {lock.name} (once, hashes checked)"
    print(note, file=sys.stderr)
    for left in venv.parent.glob(f"{venv.name}.new-*"):  # of runs that were killed
        shutil.rmtree(left, ignore_errors=True)
    fresh = venv.with_name(f"{venv.name}.new-{os.getpid()}")
    pip = "-m pip install -qq --no-deps --disable-pip-version-check --require-hashes"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", fresh], check=True)
        # -I: neither the user's site packages nor PYTHONPATH take part
        words = ("-I", *pip.split(), "--only-binary=:all:", "-r", str(lock))
        subprocess.run([fresh / "bin" / "python", *words], check=True)
        # a venv names its own folder in a few scripts; sparkforge only runs bin/python of it
        (fresh / STAMP).write_text(wanted)
        shutil.rmtree(venv, ignore_errors=True)
        fresh.rename(venv)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def fail(what: str, remedy: str) -> NoReturn:
    """Print one clear error and end."""
    print(f"error: {what}\n  hint: {remedy}", file=sys.stderr)
    sys.exit(MACHINE_ERROR)


def main() -> None:
    """Run ``python -m sparkforge`` with this command line in sparkforge's environment."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this is the check that says so
        fail(f"Python {sys.version.split()[0]} is too old", "use Python 3.11 or newer")
    venv, lock = ROOT / ".venv", ROOT / "requirements" / "driver.txt"
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        python = ensure_environment(venv, lock)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    os.environ["PYTHONPATH"] = str(ROOT)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    # -P: a module in the folder that the user is in must not stand in for one of ours
    os.execv(python, [str(python), "-P", "-m", "sparkforge", *sys.argv[1:]])


if __name__ == "__main__":
    main()
