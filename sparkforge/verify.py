"""`build.py verify`: a second, cold build is the same to the byte, or what differs is named."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from sparkforge import bytediff, commands, options, pins, pipeline
from sparkforge.bytediff import Difference
from sparkforge.context import Context, wheel_path
from sparkforge.errors import VerifyError
from sparkforge.log import log
from sparkforge.receipt import Line
from sparkforge.run import call, have
from sparkforge.stages import items
from sparkforge.store import sha256_file

# what a build reads of the checkout
_INPUTS = ("pins.yaml", "patches", "requirements", "scripts", "Dockerfile")
_SHOWN = 20
_DIFFOSCOPE_LINES = 80


def run(opts: argparse.Namespace) -> int:
    """Build a target a second time, cold, and compare it with what the store holds.

    Returns 20 where they differ; the message names files and bytes.
    """
    target = pins.load(options.pins_path(opts)).target(opts.target)
    if options.MACHINES.get(platform.machine()) != options.platform_of(target):
        until = "wheels"  # what follows needs a machine of its own kind
    else:
        until = opts.until
    context = commands._context(opts, until)
    if context.engine is None:
        until = "wheels"  # an environment names its own folder: it never repeats to the byte
    log.heading(f"{context.target_name} on {context.platform}: the build to compare with")
    first = pipeline.run(context, items(context, until))
    with _cold(context) as again:
        log.heading("a second build: another folder, no result of the first, another umask")
        before = os.umask(0o077)
        try:
            second = pipeline.run(again, items(again, until))
        finally:
            os.umask(before)
        document, found = _compare(first, second)
    if opts.json:
        log.json({"target": context.target_name, "same": not found, "results": document,
                  "differences": [asdict(one) for one in found]})  # fmt: skip
    if found:
        shown = "\n".join(f"  {one}" for one in found[:_SHOWN])
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        msg = f"two builds of {context.target_name} differ:\n{shown}{more}"
        remedy = "make the step that wrote these bytes independent of when and where it runs"
        log.error(str(VerifyError(msg, remedy)))
        return VerifyError.exit_code
    for one in document:
        log.info(f"the same: {one['name']}  sha256 {one['second']}")
    return 0


@contextmanager
def _cold(context: Context) -> Iterator[Context]:
    """Give the same build in another folder, with a store that has nothing but the downloads."""
    with context.store.temporary("verify") as work:
        root = work / "checkout"
        root.mkdir()
        for name in _INPUTS:
            path = context.root / name
            if path.is_dir():
                shutil.copytree(path, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.exists():
                shutil.copyfile(path, root / name)
        store = context.store.borrowed(work / "store", ("downloads", "partial"))
        yield replace(
            context, root=root, pins_path=root / context.pins_path.name, store=store,
            force=frozenset(),
        )  # fmt: skip


def _compare(
    first: Sequence[Line], second: Sequence[Line]
) -> tuple[list[dict[str, str]], list[Difference]]:
    """Return each result with both hashes, and what differs."""
    document = []
    found: list[Difference] = []
    for old, new in zip(first, second, strict=True):
        if old.artefact.stage != "wheels":
            continue
        one, two = wheel_path(old.artefact), wheel_path(new.artefact)
        # read again: what the store says of its files is not what is asked
        hashes = sha256_file(one), sha256_file(two)
        document.append({"name": two.name, "first": hashes[0], "second": hashes[1]})
        if hashes[0] != hashes[1] or one.name != two.name:
            found += bytediff.wheels(one, two)
            _diffoscope(one, two)
    return document, found


def _diffoscope(one: Path, two: Path) -> None:
    """Show what diffoscope makes of a difference, where it is installed."""
    if not have("diffoscope"):
        return
    said = call("diffoscope", "--text", "-", one, two, check=False).stdout.decode(errors="replace")
    for line in said.splitlines()[:_DIFFOSCOPE_LINES]:
        log.info(line)
