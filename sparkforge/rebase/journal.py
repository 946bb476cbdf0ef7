"""Several files of the checkout changed together, or none of them.

The new contents are written aside first; a journal that names them appears with one rename, and
from then on they count: whoever comes next writes the rest (``finish``). Until then, pins.yaml is
refused, so that nobody builds from half of it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sparkforge.disk import disk_errors
from sparkforge.pins import LANDING
from sparkforge.rebase.state import write


def commit(root: Path, files: Mapping[Path, bytes | None], done: Path) -> None:
    """Write files of the checkout, all or none; None removes one.

    Args:
        files: by path, below ``root``.
        done: a folder below ``root`` that goes when all are written.
    """
    journal = root / LANDING
    with disk_errors(journal):
        folder = Path(tempfile.mkdtemp(prefix=".landing-", dir=journal.parent))
    entries = []
    for number, (path, data) in enumerate(files.items()):
        if data is not None:
            write(folder / str(number), data)
        entries.append({"path": str(path.relative_to(root)),
                        "data": None if data is None else str(number)})  # fmt: skip
    document = {"folder": folder.name, "done": str(done.relative_to(root)), "files": entries}
    write(journal, json.dumps(document, indent=1).encode())
    finish(root)


def finish(root: Path) -> bool:
    """Write what a journal names; returns whether there was one."""
    journal = root / LANDING
    for left in journal.parent.glob(".landing-*") if not journal.exists() else ():
        shutil.rmtree(left, ignore_errors=True)  # of a run that was killed before it counted
    try:
        document = json.loads(journal.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    folder = journal.parent / document["folder"]
    with disk_errors(root):
        for entry in document["files"]:
            path = root / entry["path"]
            if entry["data"] is None:
                path.unlink(missing_ok=True)
            else:
                write(path, (folder / entry["data"]).read_bytes())
        shutil.rmtree(root / document["done"], ignore_errors=True)
        journal.unlink()
        shutil.rmtree(folder, ignore_errors=True)
    return True
