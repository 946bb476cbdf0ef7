"""Words on the command line → one call."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sparkforge import commands, errors, git, patchcommands
from sparkforge.context import STAGES
from sparkforge.errors import SparkforgeError, StoreError, UsageError
from sparkforge.log import log

_DEFAULT_COMMAND = "build"
_STARTS_A_SERVER = ("smoke", "serve", "bench")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# the operating system's answers that are about the user's files, and no bug of ours
_REFUSED = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR,
    errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints look like all our errors, and whose options are written out."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"{self.prog} --help shows what is possible")


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        msg = f"{text!r} is no port: use 0 to 65535"
        raise argparse.ArgumentTypeError(msg)
    return port


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        msg = f"{text!r} is no number from 0"
        raise argparse.ArgumentTypeError(msg)
    return number


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 0 < number <= 10**9:
        msg = f"{text!r} is no number from 1 to 10^9"
        raise argparse.ArgumentTypeError(msg)
    return number


def _generated(parser: argparse.ArgumentParser, what: str) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--docs", action="store_true", help=f"write {what}")
    how.add_argument("--check", action="store_true", help=f"fail where {what} are stale")


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-6 <= number <= 1e9:  # what is beyond divides to nothing, or to infinity
        msg = f"{text!r} is no number from 10^-6 to 10^9"
        raise argparse.ArgumentTypeError(msg)
    return number


def _bench_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--quality", action="store_true", required=True,
                       help="what --mxfp4-layers changes in the model's answers")  # fmt: skip
    bench.add_argument("--model", type=Path, metavar="DIR",
                       help="checkpoint to measure (default: the tiny one)")  # fmt: skip
    bench.add_argument("--layers", action="append", metavar="KINDS",
                       help="a value of --mxfp4-layers; again for one more"
                       " (default: qkv, o, lm_head, and all three)")  # fmt: skip
    bench.add_argument("--max-kl", type=_share, default=0.1, metavar="NATS",
                       help="mean divergence of the next token (default: 0.1)")  # fmt: skip
    bench.add_argument("--min-agreement", type=_share, default=0.9, metavar="SHARE",
                       help="positions with the same likeliest token (default: 0.9)")  # fmt: skip
    bench.add_argument("--max-score-drop", type=_share, default=0.05, metavar="SHARE",
                       help="questions no longer answered right (default: 0.05)")  # fmt: skip
    for name, default, what in (("prompts", None, "prompts to continue (default: all 24)"),
                                ("questions", None, "questions to ask (default: all 65)"),
                                ("tokens", 64, "length of a continuation (default: 64)"),
                                ("top", 256, "likeliest tokens that count each for itself"
                                 " (default: 256)")):  # fmt: skip
        bench.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=what)
    bench.set_defaults(run=commands.bench)


def _proofs(options: argparse.Namespace) -> int:
    from sparkforge.proofs import command  # no other command needs it

    return command.run(options)


def _verify(options: argparse.Namespace) -> int:
    from sparkforge import verify  # no other command needs it

    return verify.run(options)


def _target_options(*, required: bool = True) -> _Parser:
    target = _Parser(add_help=False)
    target.add_argument(
        "--target", required=required, metavar="NAME", help="what to build for whom"
    )
    target.add_argument(
        "--engine",
        choices=("auto", "docker", "none"),
        default="auto",
        help="container engine; none: a plain environment (default: auto)",
    )
    target.add_argument("--base", metavar="IMAGE", help="base image: NAME@sha256:… or a local one")
    target.add_argument(
        "--ca-bundle",
        type=Path,
        metavar="FILE",
        default=None,
        help="certificates of a company proxy, for the image's build steps",
    )
    target.add_argument("--port", type=_port, default=0, help="loopback port (default: a free one)")
    target.add_argument(
        "--ready-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long a server may load (default: 300)",
    )
    return target


def _parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code:3}  {meaning}" for code, meaning in errors.exit_codes())
    shared = _Parser(add_help=False)
    shared.add_argument("--pins", type=Path, default=None, metavar="FILE", help=argparse.SUPPRESS)
    shared.add_argument(
        "--store",
        type=Path,
        default=None,
        metavar="DIR",
        help="cache folder (SPARKFORGE_STORE, else ~/.cache/sparkforge)",
    )
    shared.add_argument("--json", action="store_true", help="one JSON document on stdout")
    shared.add_argument("-v", "--verbose", action="store_true", help="echo every command")

    sources = _Parser(add_help=False)
    sources.add_argument("--offline", action="store_true", help="use only what the store holds")
    sources.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="UPSTREAM=URL-or-path",
        help="take an upstream's git commit from here",
    )

    target = _target_options()

    parser = _Parser(
        prog="build.py",
        description="Fetch, patch, build, bake and prove. `build.py --target NAME` builds.",
        epilog="smoke, serve and bench: what stands behind -- goes to `vllm serve`, as in\n"
        "  build.py serve --target cpu -- --mxfp4-layers qkv,o,lm_head\n\nexit codes:\n" + codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands_ = parser.add_subparsers(dest="command", required=True, metavar="COMMAND",
                                      parser_class=_Parser)  # fmt: skip

    build = commands_.add_parser("build", parents=[shared, sources, target],
                                 help="the default: sources to a proved image")  # fmt: skip
    build.add_argument("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage")
    build.add_argument(
        "--force",
        action="append",
        choices=STAGES,
        default=[],
        help="run a stage again although its result is in the store",
    )
    build.add_argument(
        "--wheels",
        choices=("overlay",),
        default="overlay",
        help="how wheels are made: a release wheel with the patched files put in place",
    )
    build.add_argument("--dry-run", action="store_true", help="show the plan, do nothing")
    build.set_defaults(run=commands.build)

    explain = commands_.add_parser(
        "explain",
        parents=[shared, sources, target],
        help="what would be made again, and which input changed",
    )
    explain.set_defaults(run=commands.explain)

    smoke = commands_.add_parser(
        "smoke",
        parents=[shared, sources, target],
        help="run the smoke test again on what was built",
    )
    smoke.set_defaults(run=commands.smoke)

    serve = commands_.add_parser(
        "serve",
        parents=[shared, sources, target],
        help="serve what was built, on loopback, until Ctrl-C",
    )
    serve.add_argument(
        "--model",
        type=Path,
        default=None,
        metavar="DIR",
        help="checkpoint to serve (default: the tiny one)",
    )
    serve.set_defaults(run=commands.serve)

    _bench_options(commands_.add_parser(
        "bench", parents=[shared, sources, target], help="measure what was built"
    ))  # fmt: skip

    pins = commands_.add_parser("pins", help="check pins.yaml, record patched trees")
    pins_commands = pins.add_subparsers(dest="action", required=True, metavar="ACTION",
                                        parser_class=_Parser)  # fmt: skip
    check = pins_commands.add_parser("check", parents=[shared], help="is pins.yaml well formed?")
    check.set_defaults(run=patchcommands.pins_check)
    record = pins_commands.add_parser(
        "record", parents=[shared, sources], help="write what the series give into pins.yaml"
    )
    record.set_defaults(run=patchcommands.pins_record)

    patches = commands_.add_parser("patches", help="list, check, apply or document the series")
    patches_commands = patches.add_subparsers(dest="action", required=True, metavar="ACTION",
                                              parser_class=_Parser)  # fmt: skip
    listing = patches_commands.add_parser("list", parents=[shared], help="every patch, in order")
    listing.add_argument("upstream", nargs="?", help="only this upstream's series")
    listing.set_defaults(run=patchcommands.patches_list)
    check = patches_commands.add_parser(
        "check", parents=[shared, sources], help="lint, and apply in memory against the record"
    )
    check.add_argument("upstream", nargs="?", help="only this upstream's series")
    check.set_defaults(run=patchcommands.patches_check)
    apply = patches_commands.add_parser(
        "apply", parents=[shared, sources], help="give a folder with the patched tree"
    )
    apply.add_argument("upstream")
    apply.add_argument("folder", type=Path, help="where; must not exist yet")
    apply.set_defaults(run=patchcommands.patches_apply)

    stats = patches_commands.add_parser("stats", parents=[shared], help="how much each changes")
    stats.add_argument("upstream", nargs="?", help="only this upstream's series")
    stats.set_defaults(run=patchcommands.patches_stats)
    page = patches_commands.add_parser("docs", parents=[shared], help="write docs/patches.md")
    page.add_argument("--check", action="store_true", help="fail where it is stale, write nothing")
    page.set_defaults(run=patchcommands.patches_docs, upstream=None)

    ablate = commands_.add_parser(
        "ablate", parents=[shared, sources],
        help="leave each patch out in turn: its own test must fail then",
    )  # fmt: skip
    ablate.add_argument("patch", nargs="*", help="only these (names as in series)")
    ablate.add_argument(
        "--python", type=Path, metavar="FILE",
        help="interpreter that has pytest (default: .venv-dev, made where it is missing)",
    )  # fmt: skip
    ablate.set_defaults(run=patchcommands.ablate, upstream=None)

    roofline = commands_.add_parser(
        "roofline", parents=[shared], help="bytes read a token, and the speed that memory allows"
    )
    roofline.add_argument("--target", required=True, metavar="NAME", help="whose memory and model")
    roofline.add_argument("--model", metavar="NAME", help="another model than the target's")
    roofline.add_argument("--context", type=_count, default=2048, metavar="N",
                          help="tokens that a sequence attends to (default: 2048)")  # fmt: skip
    roofline.add_argument("--batch", type=_count, default=1, metavar="N",
                          help="sequences decoded together (default: 1)")  # fmt: skip
    roofline.add_argument("--layers", metavar="SPEC",
                          help="one more row, as --mxfp4-layers: qkv,o,lm_head=mxfp8")  # fmt: skip
    roofline.add_argument("--bandwidth", type=_positive, metavar="GB/s",
                          help="in place of the target's")  # fmt: skip
    roofline.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto",
                          help="of keys and values; auto: BF16")  # fmt: skip
    _generated(roofline, "docs/roofline.md and its picture")
    roofline.set_defaults(run=commands.roofline)

    proofs = commands_.add_parser(
        "proofs", parents=[shared, sources], help="compile, disassemble and check the kernels"
    )
    proofs.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    proofs.add_argument("--ci", action="store_true", help="the smallest set that proves it")
    proofs.add_argument("--list", action="store_true", help="say what there is to prove")
    proofs.add_argument(
        "--jobs",
        type=_count,
        default=None,
        metavar="N",
        help="compilers at once (default: as many as memory holds)",
    )
    proofs.set_defaults(run=_proofs)

    verify = commands_.add_parser(
        "verify", parents=[shared, sources, _target_options(required=False)],
        help="build a second time, cold: every byte must be the same; or look into an image",
    )  # fmt: skip
    verify.add_argument(
        "image", nargs="?",
        help="say what is in it, and whether this checkout makes it: archive, receipt.json, or a"
        " name that the engine knows (default: build --target a second time)",
    )  # fmt: skip
    verify.add_argument("--until", choices=("wheels", "image"), default="image",
                        help="compare up to this stage (default: image)")  # fmt: skip
    verify.set_defaults(run=_verify)

    clean = commands_.add_parser("clean", parents=[shared], help="empty the store's artefacts")
    how = clean.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="downloads and git mirrors too")
    how.add_argument(
        "--superseded", action="store_true", help="only results that no target's newest build uses"
    )
    clean.set_defaults(run=commands.clean)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see ``errors``)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    behind: list[str] = []  # what stands behind -- goes to `vllm serve`, in whatever form
    if "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    # `build.py --target spark` is `build.py build --target spark`
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, _DEFAULT_COMMAND)
    # a killed build must clean up as an interrupted one does
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and `&` of a script
            signal.signal(number, _interrupt)
    git.unbind()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
    start = time.monotonic()
    try:
        options = _parser().parse_args(words)
        options.serve_arguments = tuple(behind)
        if behind and options.command not in _STARTS_A_SERVER:
            msg = f"{options.command} starts no server that could take {behind[0]}"
            raise UsageError(msg, f"only these do: {', '.join(_STARTS_A_SERVER)}")
        log.configure(to_stderr=options.json, verbose=options.verbose)
        code: int = options.run(options)
    except SparkforgeError as error:
        return _fail(error, words)
    except KeyboardInterrupt:
        log.error(f"interrupted after {time.monotonic() - start:.0f} s; the next run goes on")
        return errors.INTERRUPTED_EXIT_CODE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _REFUSED:
            what = f"{error.filename or 'standard output'}: {error.strerror}"
            told = words if error.filename else ()  # no document where stdout takes none
            return _fail(StoreError(what, "give the user access to it, or make room"), told)
        log.error(f"a bug in sparkforge ({platform.python_version()}), please report it:")
        traceback.print_exc()
        return 1
    return code


def _fail(error: SparkforgeError, words: Sequence[str]) -> int:
    log.error(str(error))
    if "--json" in words:  # who reads stdout gets a document in any case
        log.json({"error": error.as_json()})
    return error.exit_code


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # a second one must not stop the cleaning up that this one begins
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt
