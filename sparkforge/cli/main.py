"""The command line: from arguments to one call."""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sparkforge.cli import overview
from sparkforge.cli.parser import Parser, add_commands, from_namespace
from sparkforge.core import errors, gitsafe
from sparkforge.core.command import Entry
from sparkforge.core.errors import SparkforgeError, StoreError, UsageError
from sparkforge.core.log import log
from sparkforge.serving.access import IN_URL

_DEFAULT_COMMAND = "build"
_HELP = ("-h", "--help")
_MODULES: Mapping[str, str] = {
    "doctor": "inspect.doctor.command",
    "build": "cli.build",
    "model": "build.composing",
    "serve": "cli.serve",
    "smoke": "cli.build",
    "images": "build.composing",
    "rollback": "build.composing",
    "packs": "build.packs.command",
    "verify": "inspect.verify.command",
    "clean": "cli.clean",
    "patches": "cli.patches",
    "pins": "cli.pins",
    "dev": "maintain.dev",
    "rebase": "maintain.rebase.command",
    "watch": "maintain.watch",
    "docs": "cli.docs",
    "accept": "inspect.accept.command",
    "explain": "cli.build",
    "roofline": "cli.roofline",
    "bench": "cli.bench",
    "ablate": "maintain.ablate",
    "proofs": "inspect.proofs.command",
    "report": "inspect.report.command",
    "release": "release.command",
    "version": "cli.version",
    "exit-codes": "cli.version",
}
"""The module of each command, in its ``COMMANDS``; only that of the one in use is imported."""
_STARTS_A_SERVER = ("smoke", "serve", "bench", "bench quality")
_TAKES_A_COMMAND = ("dev",)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ended: list[int] = []
"""The signal that has ended this run."""
# errors of the operating system about the user's files, not bugs of ours
_ACCESS, _ROOM = "give the user access to it", "free some space"
_REFUSED = {
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "give a folder",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "remove the link that points to itself",
    errno.EFBIG: "raise the file size limit (ulimit -f), or use another file system",
    errno.EIO: "check the disk; see the kernel log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system limit of open files (fs.file-max)",
}


@cache
def _parser(command: str = "") -> Parser:
    """Return the parser of the whole command line; of one command only, if it is named.

    Args:
        command: ``--help`` stands for none.
    """
    parser = overview.Overview(prog="build.py")
    chosen = [command] if command in _MODULES else [] if command in _HELP else _MODULES
    modules = dict.fromkeys(_MODULES[name] for name in chosen)
    found = [import_module(f"sparkforge.{module}").COMMANDS for module in modules]
    add_commands(parser, itertools.chain(*found), overview.GROUPS)
    return parser


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    try:
        return _parser(arguments[0]).parse_args(arguments)
    except UsageError:
        return _parser().parse_args(arguments)  # knows which commands take an option


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the names of its command in full."""
    arguments = list(arguments)
    # two older spellings
    if arguments[:2] == ["patches", "docs"]:
        arguments[:2] = ["docs"]
    elif arguments[:1] == ["bench"] and "--quality" in arguments:
        arguments.remove("--quality")
        arguments.insert(1, "quality")
    # `build.py bench --target spark` is `build.py bench run --target spark`
    if (
        arguments[:1] == ["bench"]
        and arguments[1:]
        and arguments[1].startswith("-")
        and arguments[1] not in _HELP
    ):
        arguments.insert(1, "run")
    # `build.py --target spark` is `build.py build --target spark`
    if arguments and arguments[0].startswith("-") and arguments[0] not in _HELP:
        arguments.insert(0, _DEFAULT_COMMAND)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see ``errors``)."""
    if "_ARGCOMPLETE" in os.environ and argv is None:
        from sparkforge.cli import completion  # a shell's Tab, and nothing else, needs it

        completion.complete(_parser, spelled_out)
    arguments = list(sys.argv[1:] if argv is None else argv)
    behind: list[str] | None = None  # after --: for `vllm serve`, or a command
    if "--" in arguments:
        at = arguments.index("--")
        arguments, behind = arguments[:at], arguments[at + 1 :]
    if arguments and arguments[0] in overview.QUESTIONS:
        arguments[0] = overview.QUESTIONS[arguments[0]]
    arguments = spelled_out(arguments)
    _ended.clear()
    # a killed build must clean up like an interrupted one
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and `&` of a script
            signal.signal(number, _interrupt)
    gitsafe.unbind()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
    start = time.monotonic()
    # until the options are parsed
    log.configure(to_stderr="--json" in arguments, verbose=False, mask=IN_URL)
    log.answered = False
    if not arguments:
        log.usage(overview.short())
        return UsageError.exit_code
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # build.py has held them back
        parsed = _parsed(arguments)
        log.configure(to_stderr=parsed.json, verbose=parsed.verbose)
        if behind == [] and parsed.command in _TAKES_A_COMMAND:
            raise UsageError("no command after --", "give a command, or omit --")
        if behind and "arguments" not in parsed:
            msg = f"{parsed.command} takes no arguments after --: {behind[0]}"
            raise UsageError(msg, f"{', '.join(_STARTS_A_SERVER)} pass them to vllm serve")
        if behind:
            parsed.arguments = behind
        command: Entry = parsed.entry
        code = command.run(from_namespace(command.options, parsed))
    except SparkforgeError as error:
        return _fail(error)
    except BaseException as error:
        # compiled modules answer an interrupt during their import with errors of their own
        if _ended or isinstance(error, KeyboardInterrupt):
            return _interrupted(time.monotonic() - start)
        if not isinstance(error, Exception):
            raise
        if refused := _refused(error):
            return _fail(refused)
        log.error(f"a bug in sparkforge ({platform.python_version()}), please report it:")
        log.traceback()
        bug = SparkforgeError(f"{type(error).__name__}: {error}", "please report it")
        _answer(bug, 1)
        return 1
    return code


def _interrupted(seconds: float) -> int:
    # CPython ends by SIGINT, whatever the exit code, where an interrupt has passed through an exec
    # of a text (dataclasses and namedtuples are made by one); another exec takes it back
    exec("")
    what = f"interrupted after {seconds:.0f} s"
    log.error(f"{what}; the next run continues from here")
    code = errors.INTERRUPTED_EXIT_CODE
    _answer(SparkforgeError(what, "run it again"), code)
    return code


def _refused(error: Exception) -> StoreError | None:
    """Return the operating system's error, if it is about the user's files."""
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):  # of Path.resolve()
        return StoreError(str(error), _REFUSED[errno.ELOOP])
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return None
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    return StoreError(f"{where}{error.strerror}", _REFUSED[error.errno])


def _fail(error: SparkforgeError) -> int:
    code = log.failure(error)
    _answer(error, code)
    return code


def _answer(error: SparkforgeError, code: int) -> None:
    """Print the document of a failure, unless one was printed already."""
    if not log.answered:
        log.document({"error": {**error.as_json(), "exit_code": code}})


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # a second one must not stop the cleaning up that this one begins
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    _ended.append(number)
    raise KeyboardInterrupt
