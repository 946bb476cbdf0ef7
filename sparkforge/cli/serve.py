"""serve."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.build import executor
from sparkforge.build.graph import items
from sparkforge.build.setup import context_of, follow_last_build
from sparkforge.cli.parser import Parents, Subparsers
from sparkforge.core.errors import UsageError


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    serve = subparsers.add_parser(
        "serve",
        parents=[groups.shared, groups.sources, groups.target],
        help="serve the last build on loopback until Ctrl-C",
    )
    model = serve.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        type=Path,
        default=None,
        metavar="DIR",
        help="checkpoint to serve (default: a tiny test model)",
    )
    model.add_argument(
        "--chat",
        action="store_true",
        help="serve a tiny model with canned chat and tool-call replies",
    )
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    """Serve what was built until Ctrl-C."""
    follow_last_build(options)
    from sparkforge.build import serve  # not needed by a build in which nothing changed

    context = context_of(options, "image")
    if options.chat and context.target.smoke is None:
        msg = f"--chat: target {context.target_name} serves a real model; it has no tiny one"
        raise UsageError(msg, "use --target cpu, or omit --chat")
    lines = executor.run(context, items(context, "image"))
    limit = options.ready_timeout or float("inf")
    return serve.serve(
        context,
        lines[-1].artefact,
        options.model,
        chat=options.chat,
        limit_s=limit,
        as_json=options.json,
    )
