"""The commands in groups, and the text of `build.py` and `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkforge.cli.parser import Parser, Unrecognized
from sparkforge.core.errors import UsageError

GROUPS: Mapping[str, Mapping[str, str]] = {
    "use": {
        "doctor": "check that this machine can build and serve a target",
        "build": "fetch, patch, build and test (default)",
        "model": "download a target's model in advance",
        "serve": "serve the last build on loopback until Ctrl-C",
        "accept": "check a running server: chats, tools, limits, users at once, memory",
        "smoke": "repeat the smoke test on the last build",
        "images": "list built images and the one that Compose uses",
        "rollback": "switch Compose to the previous image, or to another",
        "packs": "compile FlashInfer's modules ahead of time, into a wheel",
        "verify": "rebuild from scratch and compare every byte; or check an image",
        "clean": "delete build results from the store",
    },
    "change": {
        "patches": "list, check, apply or edit patches",
        "pins": "check pins.yaml and record the patched trees",
        "dev": "run a shell, or -- COMMAND, against editable patched work trees",
        "rebase": "move a series to another release; without options: show progress",
        "watch": "look for newer upstream releases and try the series on them",
        "docs": "write the pages that the checkout generates",
        "release": "check a build, collect its files, sign them, push its image",
    },
    "judge": {
        "explain": "show what would be rebuilt, and which input changed",
        "roofline": "compute the decode speed that memory bandwidth allows",
        "bench": "measure speed and answers of the last build; compare two results",
        "ablate": "check that tests notice a missing patch; find the patch that breaks something",
        "proofs": "check the machine code in a target's wheels",
        "report": "write one HTML page about the last build and its checks",
    },
}
"""Every command by purpose, with its description."""
QUESTIONS: Mapping[str, str] = {"--version": "version", "--exit-codes": "exit-codes"}
"""Options in place of a command, and the command that answers them."""
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


def short() -> str:
    """Return the text of `build.py` alone: three examples, and pages to read."""
    return (
        f"usage: build.py COMMAND [OPTIONS]\n\n{_examples()}\nbuild.py --help lists all commands\n"
    )


def long() -> str:
    """Return the text of `build.py --help`."""
    blocks = [f"usage: build.py COMMAND [OPTIONS]\n\n{_examples()}"]
    for group, commands in GROUPS.items():
        rows = "".join(f"  {name:9} {what}\n" for name, what in commands.items())
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
                raise UsageError(f"{error.parser.prog} has no option {option}", hint) from None
            raise

    def _homes(self, option: str) -> list[str]:
        """Return the commands that have an option."""
        every = self.commands()
        found = [parser.prog for parser in every if option in parser.options()]
        return [name.removeprefix(f"{self.prog} ") for name in found]

    def format_help(self) -> str:
        return long()


def _listed(names: Sequence[str]) -> str:
    """Return names as a phrase, of many the first."""
    *most, last = names if len(names) <= _MANY else (*names[: _MANY - 1], "other commands")
    return f"{', '.join(most)} and {last}" if most else last


def _examples() -> str:
    rows = "".join(f"  python3 build.py {words:22}  # {what}\n" for words, what in _EXAMPLES)
    return f"examples:\n{rows}"
