"""Doctor's readings of real machines, kept from reports that their owners sent.

    .venv-dev/bin/python -m tests.readings REPORT.zip NAME

adds tests/data/readings/NAME.json, of an archive by `doctor --report` or `report --all`. Look into
it before it is committed: what is masked is masked by patterns. tests/unit/check/test_doctor.py
judges each of these machines anew, and compares with what doctor found there.
"""

import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkforge.check.doctor.checks import Machine
from sparkforge.pins import pins
from tests.support import ROOT

FOLDER = ROOT / "tests/data/readings"
HERE = {"root": "/sf", "store": "/store"}  # the folders of every recorded machine


class Recorded(Machine):
    """A machine whose readings are known; others are missing."""

    def __init__(self, readings: Mapping[str, Any]) -> None:
        self.readings = readings
        super().__init__(Path(HERE["root"]), Path(HERE["store"]))

    def value(self, name: str, read: Any) -> Any:
        name = name.replace(str(Path.home()), "~")  # as it is masked
        found = self.readings.get(name)
        return tuple(found) if name.startswith("disk ") and found else found


def pinned() -> dict[str, str]:
    """Return the commits of models that pins.yaml has now, by their placeholders."""
    models = pins.load(ROOT / "pins.yaml").models
    return {f"REVISION-OF-{name}": model.revision for name, model in models.items()}


def load(path: Path) -> Any:
    """Return a machine's readings, and what doctor found, by the models of today."""
    text = path.read_text()
    for placeholder, revision in pinned().items():
        text = text.replace(placeholder, revision)
    return json.loads(text)


def keep(report: Path, folder: Path, name: str) -> Path:
    """Add the readings of a report to a folder; returns their file."""
    with zipfile.ZipFile(report) as archive:
        readings = json.loads(archive.read("readings.json"))
        findings = json.loads(archive.read("findings.json"))
    places = {readings[name]: HERE[name] for name in HERE}
    states = [[one["name"], one["state"]] for one in findings["findings"]]
    kept = {"target": findings["target"], "findings": states, "readings": readings}
    text = json.dumps(kept, indent=1, sort_keys=True)
    # the longer first: one may be in the other
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    for placeholder, revision in pinned().items():
        text = text.replace(revision, placeholder)
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(f"{text}\n")
    return path


if __name__ == "__main__":
    print(keep(Path(sys.argv[1]), FOLDER, sys.argv[2]))
