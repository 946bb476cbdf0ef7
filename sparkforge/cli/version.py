"""Output of `--version` and `--exit-codes`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from sparkforge import __version__
from sparkforge.build.context import release_name
from sparkforge.build.options import OutputOptions
from sparkforge.core import errors
from sparkforge.core.command import Entry
from sparkforge.core.hashing import sha256_file
from sparkforge.core.log import log
from sparkforge.sources.project import checkout, pins_option


@dataclass(frozen=True, kw_only=True)
class VersionOptions:
    """Options of ``--version``."""

    pins: Path | None = pins_option()
    output: OutputOptions


@dataclass(frozen=True, kw_only=True)
class ExitCodesOptions:
    """Options of ``--exit-codes``."""

    output: OutputOptions


def _version(options: VersionOptions) -> int:
    here = checkout(options.pins)
    python, sha256 = platform.python_version(), sha256_file(here.pins_path)
    releases = {
        name: release_name(here.pins, target) for name, target in sorted(here.pins.targets.items())
    }
    if options.output.json:
        log.json(
            {
                "sparkforge": __version__,
                "python": python,
                "pins_sha256": sha256,
                "releases": releases,
            }
        )
    else:
        log.heading(f"sparkforge {__version__} (Python {python})")
        rows = [(f"target {name}", release) for name, release in releases.items()]
        log.table([*rows, (here.pins_path.name, f"sha256 {sha256[:12]}")])
    return 0


def _exit_codes(options: ExitCodesOptions) -> int:
    rows = errors.exit_codes()
    if options.output.json:
        log.json({"exit_codes": {str(code): meaning for code, meaning in rows}})
    else:
        log.table([(f"{code:3}", meaning) for code, meaning in rows])
    return 0


COMMANDS = (
    Entry("version", VersionOptions, _version),
    Entry("exit-codes", ExitCodesOptions, _exit_codes),
)
