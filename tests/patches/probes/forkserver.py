"""Runs inside the interpreter under test: forks a process for each probe from one that has imported
what takes longest, which is not vLLM.

usage: forkserver.py MODULE...

Asked by tests/patches/forks.py, a line of JSON on standard input for each probe; answers the
process id, then the exit code. A probe has nothing but imported modules in common with another:
its process is a child of this one, which never runs any of a probe's code.
"""

import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def serve() -> dict[str, Any]:
    """Fork a process for each request; returns in those processes alone, with the request."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    for line in asked:
        child = os.fork()
        if child == 0:
            asked.close()
            answers.close()
            request: dict[str, Any] = json.loads(line)
            return request
        print(child, file=answers)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Make this process as one that was started with the request's words in its folder."""
    os.setsid()  # with all that it starts it can be ended at once
    os.chdir(request["folder"])
    for number, (path, flags) in enumerate(
        (
            (os.devnull, os.O_RDONLY),
            (request["log"], os.O_WRONLY | os.O_APPEND),
            (request["log"], os.O_WRONLY | os.O_APPEND),
        )
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = request["words"]
    sys.path[0] = request["folder"]


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # a thread would be missing in the children, with whatever lock it holds
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads"
    gc.freeze()  # no collection in a child looks at what is here, or copies its pages
    request = serve()
    become(request)
    runpy.run_module(request["words"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
