"""Check at the end of an image's build that it has everything the target needs.

    needs.py FILE    JSON: a list of {"program", "file" or "module": …, "package": …}

Otherwise a missing file would show on the user's machine, after a download of 65 GB. The Dockerfile
runs this file alone, so it imports no other module of sparkforge. There is no GPU driver during the
build, and none of the imports needs it. Exit code 1, and a line for each missing thing.
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
    """Return a line for each missing thing. Imports come last, since they take seconds.

    Args:
        needs: as in pins.yaml.
        root: of the paths.
        load: imports a module.
    """
    lines = []
    for need in sorted(needs, key=lambda need: "module" in need):
        package = need["package"]
        if (name := need.get("program")) is not None:
            if shutil.which(name) is None:
                lines.append(f"the image lacks the program {name}, of the package {package}")
        elif (name := need.get("file")) is not None:
            if not (root / name.lstrip("/")).is_file():
                lines.append(f"the image lacks the file {name}, of the package {package}")
        else:
            name = need["module"]
            try:
                load(name)
            except Exception as error:  # a server would meet the same
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                lines.append(f"the image cannot import {name}, of the package {package}: {reason}")
    return lines


if __name__ == "__main__":
    faulthandler.enable()  # shows where an import ends by a signal
    sys.exit("\n".join(missing(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) or 0)
