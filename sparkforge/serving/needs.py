"""The end of a bake: is everything in the image that the target needs?

    needs.py FILE    JSON: a list of {"program", "file" or "module": …, "package": …}

What is missing would show on the user's machine otherwise, after a download of 65 GB. The
Dockerfile runs this file alone, so it imports nothing of ours. The GPU's driver is not there, and
none of the imports asks for it. Exit code 1, and a line for everything that is missing.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def missing(
    needs: Iterable[Mapping[str, str]],
    root: Path = Path("/"),
    load: Callable[[str], object] = importlib.import_module,
) -> list[str]:
    """Return a line for each thing that is not there. Imports come last: they take seconds.

    Args:
        needs: as pins.yaml has them.
        root: folder that paths start from.
        load: imports a module.
    """
    found = []
    for need in sorted(needs, key=lambda one: "module" in one):
        package = need["package"]
        if (name := need.get("program")) is not None:
            if shutil.which(name) is None:
                found.append(f"the image lacks the program {name}, of the package {package}")
        elif (name := need.get("file")) is not None:
            if not (root / name.lstrip("/")).is_file():
                found.append(f"the image lacks the file {name}, of the package {package}")
        else:
            name = need["module"]
            try:
                load(name)
            except Exception as error:  # whatever an import does, it is what a server would meet
                words = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                found.append(f"the image cannot import {name}, of the package {package}: {words}")
    return found


if __name__ == "__main__":
    faulthandler.enable()  # of an import that ends by a signal one sees where
    sys.exit("\n".join(missing(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) or 0)
