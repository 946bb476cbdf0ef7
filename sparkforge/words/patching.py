"""pins, patches."""

from __future__ import annotations

from pathlib import Path

from sparkforge import patchcommands
from sparkforge.authoring import commands
from sparkforge.patchfile import NATIVE
from sparkforge.patchlint import TRAILERS
from sparkforge.words.parents import Parents, Parser, Subparsers, source_option


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands about pins and series."""
    shared, sources, _ = groups
    pins = subparsers.add_parser("pins", help="check pins.yaml, record patched trees")
    pins_commands = pins.add_subparsers(dest="action", required=True, metavar="ACTION",
                                        parser_class=Parser)  # fmt: skip
    check = pins_commands.add_parser("check", parents=[shared], help="is pins.yaml well formed?")
    check.set_defaults(run=patchcommands.pins_check)
    record = pins_commands.add_parser(
        "record",
        parents=[shared, sources],
        help="write what the series give into pins.yaml",
    )
    source_option(record, "release")
    record.set_defaults(run=patchcommands.pins_record)
    resolve = pins_commands.add_parser(
        "resolve", parents=[shared, sources],
        help="ask the repositories for commits that pins.yaml leaves out, and write them",
    )  # fmt: skip
    resolve.add_argument("upstream", nargs="*", help="only these, whether or not it has theirs")
    resolve.set_defaults(run=patchcommands.pins_resolve)

    patches = subparsers.add_parser("patches", help="list, check, apply or document the series")
    patches_commands = patches.add_subparsers(dest="action", required=True, metavar="ACTION",
                                              parser_class=Parser)  # fmt: skip
    listing = patches_commands.add_parser("list", parents=[shared], help="every patch, in order")
    listing.add_argument("upstream", nargs="?", help="only this upstream's series")
    listing.set_defaults(run=patchcommands.patches_list)
    check = patches_commands.add_parser(
        "check",
        parents=[shared, sources],
        help="lint, and apply in memory against the record",
    )
    check.add_argument("upstream", nargs="?", help="only this upstream's series")
    source_option(check, "release")
    check.set_defaults(run=patchcommands.patches_check)
    apply = patches_commands.add_parser(
        "apply",
        parents=[shared, sources],
        help="give a folder with the patched tree",
    )
    apply.add_argument("upstream")
    apply.add_argument("folder", type=Path, help="where; must not exist yet")
    apply.set_defaults(run=patchcommands.patches_apply)
    export = patches_commands.add_parser(
        "export", parents=[shared, sources], help="write a work tree's commits back as the series"
    )
    export.add_argument("folder", type=Path, nargs="?", default=Path(),
                        help="what `patches apply` made (default: the present folder)")  # fmt: skip
    export.add_argument("--check", action="store_true", help="fail where it would change something")
    export.add_argument("--drop", action="append", default=[], metavar="NAME",
                        help="a patch whose commit is gone on purpose")  # fmt: skip
    export.set_defaults(run=commands.patches_export)
    import_ = patches_commands.add_parser(
        "import", parents=[shared, sources, _trailers()],
        help="take patches from outside (mbox, .patch, diff) into a series",
    )  # fmt: skip
    import_.add_argument("upstream")
    import_.add_argument("file", type=Path, nargs="+")
    import_.add_argument("--before", metavar="NAME", help="the patch to put them in front of")
    import_.add_argument("--subject", metavar="TEXT", help="in place of the patch's own")
    import_.add_argument("--why", metavar="TEXT", help="goes before the patch's own message")
    import_.set_defaults(run=commands.patches_import)
    new = patches_commands.add_parser(
        "new", parents=[shared, _trailers()],
        help="commit what is staged in a work tree, under a message to be filled in",
    )  # fmt: skip
    new.add_argument("folder", type=Path, help="what `patches apply` made")
    new.add_argument("subject", help="one line, what the patch does")
    new.set_defaults(run=commands.patches_new)

    stats = patches_commands.add_parser("stats", parents=[shared], help="how much each changes")
    stats.add_argument("upstream", nargs="?", help="only this upstream's series")
    stats.set_defaults(run=patchcommands.patches_stats)
    page = patches_commands.add_parser("docs", parents=[shared], help="write docs/patches.md")
    page.add_argument("--check", action="store_true", help="fail where it is stale, write nothing")
    page.set_defaults(run=patchcommands.patches_docs, upstream=None)


def _trailers() -> Parser:
    parser = Parser(add_help=False)
    for key in (*TRAILERS, NATIVE):
        parser.add_argument(f"--{key.lower()}", metavar="TEXT", help=f"the trailer {key}")
    return parser
