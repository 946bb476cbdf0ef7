"""sparkforge in processes of its own that are forked from one that has imported it.

A start of Python that imports sparkforge takes half a second of CPU time, and tests of whole
commands make hundreds. Each process here has nothing but the imports in common with the others.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.cli import main
from sparkforge.core import index
from sparkforge.core import run as processes
from sparkforge.store.store import code_of
from tests.support import PATIENCE_S, ROOT, pip_variables

if TYPE_CHECKING:
    from pytest import MonkeyPatch


_FUNCTIONS = {name for rows in main.COMMANDS.values() for name, _ in rows.values()}
# with what commands, and a build, import late: a second of CPU time for each
_IMPORTED = (
    *sorted({f"sparkforge.{name.partition(':')[0]}" for name in _FUNCTIONS if name}),
    "sparkforge.build.sbom",
    "cyclonedx.output.json",
    "filelock",
    "git",
    "httpcore2",  # by unearth, at its first request
    "jinja2",
    "requests",
    "unearth",
)

# read once by a process, and by every build for its keys
code_of("sparkforge.build")


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, "tests.forked"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # where the server imports from
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def run(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_s: float = PATIENCE_S
) -> tuple[int, str, str]:
    """Run one command as ``python -m sparkforge`` does; returns (exit code, stdout, stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        child = _context().Process(target=_child, args=(list(words), cwd, dict(env), out, err))
        child.start()
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
            child.join()
            msg = f"no end within {timeout_s} s\n{out.read_text()}\n{err.read_text()}"
            raise AssertionError(msg)
        return child.exitcode, out.read_text(), err.read_text()


def _child(words: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, (place, flags) in enumerate(
        (
            (Path(os.devnull), os.O_RDONLY),
            (out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        )
    ):
        opened = os.open(place, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [str(ROOT / "sparkforge" / "__main__.py"), *words]
    if env.get("PIP_CONFIG_FILE") == os.devnull:
        index.pip_config = pip_variables
    try:
        code = main.main()
    finally:
        processes._end_all()  # as at the end of Python
    sys.exit(code)


def killed(work: Callable[[], object], install: Callable[[MonkeyPatch], None]) -> bool:
    """Do some work in a process of its own that kills itself; False: it was done before."""
    from pytest import MonkeyPatch

    child = os.fork()
    if child == 0:
        try:  # nothing leaves here: the child would go on as a second pytest
            with MonkeyPatch.context() as patch:
                install(patch)
                work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)
