"""pins, patches."""

from __future__ import annotations

from pathlib import Path

from sparkforge.cli import authoring, patchcommands
from sparkforge.cli.parser import Parents, Parser, Subparsers, source_option
from sparkforge.series.lint import TRAILERS
from sparkforge.series.patchfile import NATIVE


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands about pins and series."""
    shared, sources, _ = groups
    pins = subparsers.add_parser("pins", help="check pins.yaml and record the patched trees")
    pins_commands = pins.add_subparsers(dest="action", required=True, metavar="ACTION",
                                        parser_class=Parser)  # fmt: skip
    check = pins_commands.add_parser("check", parents=[shared], help="check pins.yaml")
    check.set_defaults(run=patchcommands.pins_check)
    record = pins_commands.add_parser(
        "record",
        parents=[shared, sources],
        help="record the patched trees in pins.yaml",
    )
    source_option(record, "release")
    record.set_defaults(run=patchcommands.pins_record)
    resolve = pins_commands.add_parser(
        "resolve", parents=[shared, sources],
        help="look up the commits that pins.yaml leaves out, and record them",
    )  # fmt: skip
    resolve.add_argument(
        "upstream",
        nargs="*",
        help="upstreams to look up, even if recorded (default: those without a commit)",
    )
    resolve.set_defaults(run=patchcommands.pins_resolve)

    patches = subparsers.add_parser("patches", help="list, check, apply, edit or document patches")
    patches_commands = patches.add_subparsers(dest="action", required=True, metavar="ACTION",
                                              parser_class=Parser)  # fmt: skip
    listing = patches_commands.add_parser(
        "list", parents=[shared], help="list all patches in order"
    )
    listing.add_argument("upstream", nargs="?", help="only this upstream's series")
    listing.set_defaults(run=patchcommands.patches_list)
    check = patches_commands.add_parser(
        "check",
        parents=[shared, sources],
        help="lint the patches and check that they apply and give the recorded trees",
    )
    check.add_argument("upstream", nargs="?", help="only this upstream's series")
    source_option(check, "release")
    check.set_defaults(run=patchcommands.patches_check)
    apply = patches_commands.add_parser(
        "apply",
        parents=[shared, sources],
        help="create a git work tree with the patches as commits",
    )
    apply.add_argument("upstream")
    apply.add_argument("folder", type=Path, help="folder to create; must not exist")
    apply.set_defaults(run=patchcommands.patches_apply)
    export = patches_commands.add_parser(
        "export", parents=[shared, sources], help="write the commits of a work tree back as patches"
    )
    export.add_argument("folder", type=Path, nargs="?", default=Path(),
                        help="work tree (default: the current folder)")  # fmt: skip
    export.add_argument(
        "--check", action="store_true", help="fail if it would change a file; write nothing"
    )
    export.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="patch whose commit was removed on purpose; may be repeated",
    )
    export.set_defaults(run=authoring.patches_export)
    import_ = patches_commands.add_parser(
        "import", parents=[shared, sources, _trailers()],
        help="import patches (mbox, .patch, diff) into a series",
    )  # fmt: skip
    import_.add_argument("upstream")
    import_.add_argument("file", type=Path, nargs="+")
    import_.add_argument(
        "--before", metavar="NAME", help="insert before this patch (default: at the end)"
    )
    import_.add_argument(
        "--subject", metavar="TEXT", help="subject to use instead of the patch's own"
    )
    import_.add_argument("--why", metavar="TEXT", help="text to put before the patch's message")
    import_.set_defaults(run=authoring.patches_import)
    new = patches_commands.add_parser(
        "new", parents=[shared, _trailers()],
        help="commit the staged changes of a work tree with a message template",
    )  # fmt: skip
    new.add_argument("folder", type=Path, help="work tree from `patches apply`")
    new.add_argument("subject", help="one line that says what the patch does")
    new.set_defaults(run=authoring.patches_new)

    stats = patches_commands.add_parser(
        "stats", parents=[shared], help="show the size of each patch"
    )
    stats.add_argument("upstream", nargs="?", help="only this upstream's series")
    stats.set_defaults(run=patchcommands.patches_stats)
    page = patches_commands.add_parser("docs", parents=[shared], help="write docs/patches.md")
    page.add_argument("--check", action="store_true", help="fail if it is stale; write nothing")
    page.set_defaults(run=patchcommands.patches_docs, upstream=None)


def _trailers() -> Parser:
    parser = Parser(add_help=False)
    for key in (*TRAILERS, NATIVE):
        parser.add_argument(f"--{key.lower()}", metavar="TEXT", help=f"value of the trailer {key}")
    return parser
