"""patches: export, import, new."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkforge.build.options import access_of, pins_path, store_of
from sparkforge.cli.parser import Parents, Parser, Subparsers
from sparkforge.core import transaction
from sparkforge.core.errors import SeriesError, StaleError, UsageError
from sparkforge.core.log import log
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import exporting, importing, lint, series, worktree
from sparkforge.series.exporting import Chain, Checkout
from sparkforge.series.lint import TRAILERS
from sparkforge.series.patchfile import NATIVE
from sparkforge.series.worktree import WorkTree
from sparkforge.sources import sources
from sparkforge.sources.sources import Source


def register(actions: Subparsers, groups: Parents) -> None:
    """Add the commands that write patches."""
    export = actions.add_parser(
        "export",
        parents=[groups.shared, groups.sources],
        help="write the commits of a work tree back as patches",
    )
    export.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        help="work tree (default: the current folder)",
    )
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
    export.set_defaults(run=_export)
    import_ = actions.add_parser(
        "import",
        parents=[groups.shared, groups.sources, _trailer_options()],
        help="import patches (mbox, .patch, diff) into a series",
    )
    import_.add_argument("upstream")
    import_.add_argument("file", type=Path, nargs="+")
    import_.add_argument(
        "--before", metavar="NAME", help="insert before this patch (default: at the end)"
    )
    import_.add_argument(
        "--subject", metavar="TEXT", help="subject to use instead of the patch's own"
    )
    import_.add_argument("--why", metavar="TEXT", help="text to put before the patch's message")
    import_.set_defaults(run=_import)
    new = actions.add_parser(
        "new",
        parents=[groups.shared, _trailer_options()],
        help="commit the staged changes of a work tree with a message template",
    )
    new.add_argument("folder", type=Path, help="work tree from `patches apply`")
    new.add_argument("subject", help="one line that says what the patch does")
    new.set_defaults(run=_new)


def _trailer_options() -> Parser:
    parser = Parser(add_help=False)
    for key in (*TRAILERS, NATIVE):
        parser.add_argument(f"--{key.lower()}", metavar="TEXT", help=f"value of the trailer {key}")
    return parser


@contextmanager
def _held(options: argparse.Namespace) -> Iterator[Checkout]:
    """Give the checkout, which nobody else changes meanwhile."""
    path = pins_path(options)
    pins.load(path)  # where there is none, none is made
    with transaction.held(path.parent):
        yield Checkout(path.parent, path, pins.load(path), store_of(options))


def _source(options: argparse.Namespace, checkout: Checkout, upstream: str) -> Source:
    access = access_of(options, checkout.pins)
    return sources.ensure(
        checkout.store, upstream, checkout.pins.upstream(upstream), RELEASE_PLAN, access
    )


def _export(options: argparse.Namespace) -> int:
    """Write a work tree's commits back as the series of its upstream."""
    tree = worktree.read(options.folder)
    commits = worktree.settled(tree)
    if left := worktree.untracked(tree):
        log.warning(
            f"{tree.folder}: not committed: {', '.join(left[:5])}"
            + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        )
    with _held(options) as checkout:
        source = _source(options, checkout, tree.upstream)
        if source.commit != tree.base:
            msg = f"{tree.folder}: is based on {tree.base[:12]}, but {source.commit[:12]} is pinned"
            raise SeriesError(
                msg, "create a new work tree (build.py patches apply) and cherry-pick your commits"
            )
        chain = Chain(source, commits, tree.objects)
        now = series.read(checkout.folder(tree.upstream))
        # what others did to the series since must not be undone: only a no-op may pass
        behind = now.sha256 not in tree.series
        try:
            fresh, report, written = exporting.export(
                checkout, chain, drop=_names(options.drop), check=options.check or behind
            )
        except StaleError as error:
            if options.check or not behind:
                raise
            raise _behind(tree) from error
        worktree.exported(tree, commits, [patch.name for patch in fresh.patches], fresh.sha256)
    document = exporting.document(report, written)
    log.info(
        f"{tree.upstream}: {len(fresh.patches)} patch(es), "
        + ("written" if written else "nothing to write")
    )
    if options.json:
        log.json({"upstream": tree.upstream, **document})
    return 0


def _behind(tree: WorkTree) -> SeriesError:
    msg = f"patches/{tree.upstream}: changed since {tree.folder} was created from it"
    return SeriesError(
        msg, "make a new work tree (build.py patches apply) and cherry-pick your commits onto it"
    )


def _names(words: list[str]) -> list[str]:
    return [f"{word.removesuffix('.patch')}.patch" for word in words]


def _import(options: argparse.Namespace) -> int:
    """Take patches from outside into a series."""
    for file in options.file:
        if not file.is_file():
            raise UsageError(f"{file}: no such file", "give a .patch, mbox or diff file")
    with _held(options) as checkout:
        source = _source(options, checkout, options.upstream)
        one = series.read(checkout.folder(options.upstream))
        wanted = importing.Wanted(
            _trailers(options),
            options.subject,
            options.why,
            _names([options.before])[0] if options.before else None,
        )
        patched = series.apply(checkout.store, one, source)
        chain = importing.chain(checkout.store, one, patched, options.file, wanted)
        fresh, report, written = exporting.export(checkout, chain, drop=(), check=False)
    document = exporting.document(report, written)
    log.info(f"{options.upstream}: {len(fresh.patches)} patch(es)")
    if options.json:
        log.json({"upstream": options.upstream, **document})
    return 0


def _new(options: argparse.Namespace) -> int:
    """Commit what is staged in a work tree, under a message to be filled in."""
    if len(options.subject.split("\n")) != 1 or not any(map(str.isalnum, options.subject)):
        msg = f"{options.subject!r}: empty subject"
        raise UsageError(msg, "say in one line what the patch does; the file is named after it")
    tree = worktree.read(options.folder)
    trailers = _trailers(options)
    commit = worktree.commit_template(
        tree, lambda subject, body: importing.template(options.subject, trailers, body)
    )
    log.info(
        f"{tree.folder}: commit {commit[:12]}; now write its message: git commit --amend,"
        " then build.py patches export"
    )
    if options.json:
        log.json({"folder": str(tree.folder), "commit": commit})
    return 0


def _trailers(options: argparse.Namespace) -> dict[str, str]:
    given = vars(options)
    values = {key: given[key.lower().replace("-", "_")] for key in (*lint.TRAILERS, NATIVE)}
    return {key: value for key, value in values.items() if value is not None}
