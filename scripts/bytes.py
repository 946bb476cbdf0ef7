#!/usr/bin/env python3
"""Compare the wheels of all targets, and an image's environment, with their recorded sha256.

    python3 scripts/bytes.py                     # the wheels; builds those that are not cached
    python3 scripts/bytes.py --image TAG         # an image's /opt/sparkforge but bin and share
    python3 scripts/bytes.py [--image TAG] --record

While the code is rewritten, what it makes stays the same. The record is bytes.txt beside this file:
what a change of pins.yaml, patches/, kernels/ or requirements/ makes different is recorded again.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_suffix(".txt")
TARGETS = ("cpu", "spark", "rtx")
_ENVIRONMENT = "opt/sparkforge/"
_OURS = (f"{_ENVIRONMENT}bin/", f"{_ENVIRONMENT}share/")


def wheels() -> dict[str, str]:
    """Return the sha256 of each wheel that a build makes, by ``TARGET/FILE``."""
    found = {}
    for target in TARGETS:
        words = ["--target", target, "--until", "wheels", "--json"]
        done = subprocess.run(
            [sys.executable, "build.py", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        for item in json.loads(done.stdout)["items"]:
            outputs = item["outputs"]
            if str(outputs.get("file", "")).endswith(".whl") and "sha256" in outputs:
                found[f"{target}/{outputs['file']}"] = outputs["sha256"]
    return found


def environment(image: str) -> str:
    """Return a sha256 of the names, modes and bytes in an image's environment."""
    container = subprocess.run(
        ["docker", "create", image], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:
            assert export.stdout is not None
            lines = sorted(_lines(export.stdout))
        if export.returncode:
            raise subprocess.CalledProcessError(export.returncode, "docker export")
    finally:
        subprocess.run(["docker", "rm", container], stdout=subprocess.DEVNULL, check=True)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield a line for each member of the environment."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.name.startswith(_ENVIRONMENT) and not member.name.startswith(_OURS):
                file = archive.extractfile(member) if member.isreg() else None
                content = hashlib.sha256(file.read()).hexdigest() if file else member.linkname
                yield f"{member.name} {member.mode:o} {content}\n"


def main() -> int:
    """Compare or record; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--image", metavar="TAG")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    known = dict(line.split()[::-1] for line in RECORD.read_text().splitlines())
    if options.image:
        seen = {"cpu/image": environment(options.image)}
        wanted = {"cpu/image": known.get("cpu/image", "")}
    else:
        seen = wheels()
        wanted = {name: one for name, one in known.items() if name != "cpu/image"}
    if options.record:
        kept = {name: one for name, one in known.items() if name not in wanted} | seen
        RECORD.write_text("".join(f"{kept[name]}  {name}\n" for name in sorted(kept)))
        return 0
    for name in sorted(wanted.keys() | seen.keys()):
        if wanted.get(name) != seen.get(name):
            print(f"differs: {name}: {wanted.get(name)} -> {seen.get(name)}", file=sys.stderr)
    return int(wanted != seen)


if __name__ == "__main__":
    sys.exit(main())
