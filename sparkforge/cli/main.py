"""The command line: the table of all commands, and the way from arguments to one call.

A command is a function that takes a frozen dataclass of its options and returns the exit code.
"""

import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from sparkforge.core import git
from sparkforge.core.disk import read_yaml
from sparkforge.core.errors import Interrupted, SparkforgeError, StoreError, UsageError
from sparkforge.core.log import log

_TEXTS = read_yaml(Path(__file__).with_name("commands.yaml"))
COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = _TEXTS["commands"]
"""Every command by purpose; only the module of the command in use is imported."""
_HELP = ("-h", "--help")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ended: list[int] = []
"""The signal that has ended this run."""


def app() -> App:
    """Return the parser of the whole command line."""
    given = Parameter(negative=(), show_default=False, json_list=False, json_dict=False)
    top = App(
        "build.py",
        usage=_TEXTS["usage"],
        version_flags=(),
        help_format="markdown",
        default_parameter=given,
    )
    for place, (purpose, commands) in enumerate(COMMANDS.items()):
        group = Group(purpose, sort_key=place)
        for at, (words, (function, what)) in enumerate(commands.items()):
            *parent, name = words.split()
            listed: dict[str, Any] = {"name": name, "help": what, "sort_key": at}
            if not function:
                top.command(App(**listed, group=group, default_parameter=given))
            elif parent:
                top[parent[0]].command(f"sparkforge.{function}", **listed)
            else:
                top.command(f"sparkforge.{function}", **listed, group=group)
    top["--help"].group = (group,)
    return top


def spelled_out(words: Sequence[str]) -> list[str]:
    """Return a command line with the names of its command in full."""
    at = 1 if words[:1] == ["bench"] else 0
    first = words[at] if len(words) > at else ""
    if not first.startswith("-") or first in _HELP or first in COMMANDS["questions"]:
        return list(words)
    return [*words[:at], "run" if at else "build", *words[at:]]


def parsed(words: Sequence[str]) -> tuple[Any, Any]:
    """Return the function of a command line, and its options; None: it prints a help."""
    at = words.index("--") if "--" in words else len(words)
    # what is after -- is for `vllm serve`, or a command
    before, after = spelled_out(words[:at]), tuple(words[at + 1 :])
    try:
        function, bound, _ = app().parse_args(before, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        hint = " ".join(("build.py", *(error.command_chain or ()), "--help"))
        raise UsageError(str(error), hint) from None
    bound.apply_defaults()
    options = bound.arguments.get("options")
    if options is None:
        return lambda _: function(*bound.args, **bound.kwargs), None
    if after and not hasattr(options, "arguments"):
        msg = f"{before[0]} takes no arguments after --: {after[0]}"
        raise UsageError(msg, "build, serve and bench pass them to vllm serve; dev runs them")
    return function, replace(options, arguments=after) if after else options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see ``errors``)."""
    words = list(sys.argv[1:] if argv is None else argv)
    _ended.clear()
    # a killed build must clean up like an interrupted one
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and `&` of a script
            signal.signal(number, _interrupt)
    git.unbind()
    start = time.monotonic()
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    log.configure(to_stderr=as_json, verbose=False)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # build.py has held them back
        function, options = parsed(words)
        if options is not None:
            log.configure(to_stderr=options.output.json, verbose=options.output.verbose)
            return int(function(options))
        function(None)
        return 0 if set(words) & set(_HELP) else UsageError.exit_code
    except SparkforgeError as error:
        return log.failure(error)
    except BaseException as error:
        # compiled modules answer an interrupt during their import with errors of their own
        if _ended or isinstance(error, KeyboardInterrupt):
            # CPython ends by SIGINT, whatever the exit code, where an interrupt has passed through
            # an exec of a text (dataclasses are made by one); another exec takes it back
            exec("")
            what = f"interrupted after {time.monotonic() - start:.0f} s"
            return log.failure(Interrupted(what, "run it again: the next run continues from here"))
        if not isinstance(error, Exception):
            raise
        if isinstance(error, OSError) and (error.filename or isinstance(error, PermissionError)):
            where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
            hint = "check that path: access, free space, limits"
            return log.failure(StoreError(f"{where}{error.strerror}", hint))
        log.traceback()
        hint = f"this is a bug in sparkforge (Python {platform.python_version()}): report it"
        return log.failure(SparkforgeError(f"{type(error).__name__}: {error}", hint))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # a second one must not stop the cleaning up that this one begins
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    _ended.append(number)
    raise KeyboardInterrupt
