"""What `build.py`, `--help`, `--version` and `--exit-codes` print."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge import __version__
from sparkforge.build.context import release_name
from sparkforge.build.options import OutputOptions
from sparkforge.cli.parser import Parents, Parser, Subparsers, Unrecognized, here
from sparkforge.core import errors
from sparkforge.core.errors import UsageError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.log import log
from sparkforge.pins import pins
from sparkforge.sources.project import recover_checkout

GROUPS: Mapping[str, tuple[str, ...]] = {
    "use": ("doctor", "build", "model", "serve", "smoke", "images", "rollback", "verify", "clean"),
    "change": ("patches", "pins", "dev", "rebase", "watch", "docs"),
    "judge": ("explain", "roofline", "bench", "ablate", "proofs", "sign"),
}
"""Every command, by what it is for."""
QUESTIONS: Mapping[str, str] = {"--version": "version", "--exit-codes": "exit-codes"}
"""Options that stand in place of a command, and the command that answers them."""
_EXAMPLES = (
    ("doctor --target spark", "check this machine, print a hint for each problem"),
    ("--target cpu", "fetch, patch, build and test; needs no GPU"),
    ("serve --target cpu", "start an OpenAI server from that build"),
)
_MOVED: Mapping[str, str] = {"--docs": "docs"}
"""Options of earlier versions, and the command in place of each."""
_MANY = 7
_MORE = """\
`build.py COMMAND --help` lists a command's options. `build.py --target NAME` is short for
`build.py build --target NAME`. smoke, serve and bench pass arguments after -- to `vllm serve`:
  build.py serve --target cpu -- --mxfp4-layers qkv,o,lm_head
"""


@dataclass(frozen=True)
class VersionOptions:
    """Options of ``--version``."""

    pins: Path | None
    output: OutputOptions


@dataclass(frozen=True)
class ExitCodesOptions:
    """Options of ``--exit-codes``."""

    output: OutputOptions


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands behind ``--version`` and ``--exit-codes``; no help lists them."""
    version = subparsers.add_parser("version", parents=[groups.pins, groups.output])
    version.set_defaults(entry=here(VersionOptions, _version))
    codes = subparsers.add_parser("exit-codes", parents=[groups.output])
    codes.set_defaults(entry=here(ExitCodesOptions, _exit_codes))


def short() -> str:
    """Return what `build.py` alone prints: three examples, and where to read on."""
    return (
        f"usage: build.py COMMAND [OPTIONS]\n\n{_examples()}\nbuild.py --help lists all commands\n"
    )


def long(commands: Mapping[str, str]) -> str:
    """Return what `build.py --help` prints.

    Args:
        commands: what each command is for, by its name.
    """
    blocks = [f"usage: build.py COMMAND [OPTIONS]\n\n{_examples()}"]
    for group, names in GROUPS.items():
        rows = "".join(f"  {name:9} {commands[name]}\n" for name in names)
        blocks.append(f"{group}:\n{rows}")
    blocks.append(
        "options:\n"
        "  -h, --help    print this help\n"
        "  --version     print the versions of sparkforge and of its targets\n"
        "  --exit-codes  explain the exit codes\n"
    )
    blocks.append(_MORE)
    return "\n".join(blocks)


class Overview(Parser):
    """The parser of the whole command line: its help lists the commands in groups."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As Parser's, but the hint names the commands that an option belongs to."""
        try:
            return super().parse_known_args(args, namespace)
        except Unrecognized as error:
            for option in error.options:
                if option in _MOVED:
                    hint = f"use build.py {_MOVED[option]}"
                elif homes := self._homes(option):
                    hint = f"{option} belongs to {_listed(homes)}"
                else:
                    continue
                msg = f"{error.parser.prog} has no option {option}"
                raise UsageError(msg, hint) from None
            raise

    def _homes(self, option: str) -> list[str]:
        """Return the commands that have an option."""
        every = self.commands()
        found = [parser.prog for parser in every if option in parser.options()]
        return [name.removeprefix(f"{self.prog} ") for name in found]

    def format_help(self) -> str:
        listed = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                listed = {one.dest: str(one.help) for one in action._get_subactions()}
        return long(listed)


def _listed(names: Sequence[str]) -> str:
    """Return names as a phrase, of many the first."""
    *most, last = names if len(names) <= _MANY else (*names[: _MANY - 1], "other commands")
    return f"{', '.join(most)} and {last}" if most else last


def _examples() -> str:
    rows = "".join(f"  python3 build.py {words:22}  # {what}\n" for words, what in _EXAMPLES)
    return f"examples:\n{rows}"


def _version(options: VersionOptions) -> int:
    path = recover_checkout(options.pins)
    all_pins = pins.load(path)
    python, sha256 = platform.python_version(), sha256_file(path)
    releases = {
        name: release_name(all_pins, target) for name, target in sorted(all_pins.targets.items())
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
        log.table([*rows, (path.name, f"sha256 {sha256[:12]}")])
    return 0


def _exit_codes(options: ExitCodesOptions) -> int:
    rows = errors.exit_codes()
    if options.output.json:
        log.json({"exit_codes": {str(code): meaning for code, meaning in rows}})
    else:
        log.table([(f"{code:3}", meaning) for code, meaning in rows])
    return 0
