"""Check at the end of an image's build that it has everything the target needs, and no compiler.

    needs.py FILE    JSON: a list of {"program", "file", "library" or "module": …, "package": …},
                     and of {"absent": PROGRAM}

Otherwise a missing file would show on the user's machine, after a download of 65 GB. The Dockerfile
runs this file alone, so it imports no other module of sparkforge. There is no GPU driver during the
build, and none of the imports needs it. Exit code 1, and a line for each thing that is wrong.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

CUDA = "/usr/local/cuda/bin"
"""Place where FlashInfer looks for nvcc, on the PATH or not."""


def missing(
    needs: Iterable[Mapping[str, str]],
    root: Path = Path("/"),
    load: Callable[[str], object] = importlib.import_module,
) -> list[str]:
    """Return a line for each thing that is wrong. Imports come last, since they take seconds.

    Args:
        needs: as in pins.yaml.
        root: of the paths.
        load: imports a module.
    """
    lines, excluded = [], []
    for need in sorted(needs, key=lambda need: "module" in need):
        if (name := need.get("absent")) is not None:
            if (program := shutil.which(name, path=f"{os.environ['PATH']}:{CUDA}")) is not None:
                excluded.append(program)
            continue
        package = need["package"]
        if (name := need.get("program")) is not None:
            if shutil.which(name) is None:
                lines.append(f"the image lacks the program {name}, of the package {package}")
        elif (name := need.get("file")) is not None:
            if not (root / name.lstrip("/")).is_file():
                lines.append(f"the image lacks the file {name}, of the package {package}")
        elif (name := need.get("library")) is not None:
            try:
                ctypes.CDLL(name)
            except OSError as error:
                lines.append(
                    f"the image lacks the library {name}, of the package {package}: {error}"
                )
        else:
            name = need["module"]
            try:
                load(name)
            except Exception as error:  # a server would meet the same
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                lines.append(f"the image cannot import {name}, of the package {package}: {reason}")
    if excluded:
        lines.append(f"the image has {', '.join(excluded)}, which the target excludes")
    return lines


if __name__ == "__main__":
    faulthandler.enable()  # shows where an import ends by a signal
    sys.exit("\n".join(missing(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) or 0)
