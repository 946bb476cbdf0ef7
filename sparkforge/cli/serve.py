"""serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkforge.build import executor
from sparkforge.build.options import OutputOptions, ServerOptions, VariantOptions
from sparkforge.build.setup import context_of, last_variant
from sparkforge.cli.parser import Parents, Subparsers, here, server_options
from sparkforge.core.errors import UsageError
from sparkforge.sources.project import Project, ProjectOptions


@dataclass(frozen=True)
class Options:
    """Options of ``serve``."""

    target: str
    model: Path | None
    chat: bool
    arguments: tuple[str, ...]
    project: ProjectOptions
    output: OutputOptions
    variant: VariantOptions
    server: ServerOptions


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    serve = subparsers.add_parser(
        "serve",
        parents=[*groups.project, groups.last_variant, server_options("8000", "none")],
        help="serve the last build on loopback until Ctrl-C",
    )
    serve.add_argument("--target", required=True, metavar="NAME", help="target to serve")
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
    serve.set_defaults(entry=here(Options, _serve), arguments=())


def _serve(options: Options) -> int:
    """Serve what was built until Ctrl-C."""
    from sparkforge.build import serve  # not needed by a build in which nothing changed

    project = Project.open(options.project)
    context = context_of(
        project,
        options.target,
        last_variant(project, options.target, options.variant),
        "image",
        server=options.server,
        arguments=options.arguments,
    )
    if options.chat and context.target.smoke is None:
        msg = f"--chat: target {context.target_name} serves a real model; it has no tiny one"
        raise UsageError(msg, "use --target cpu, or omit --chat")
    build = executor.build(context, "image")
    limit = options.server.ready_timeout or float("inf")
    return serve.serve(
        context,
        build.results.artefact(build.graph.product),
        options.model,
        chat=options.chat,
        limit_s=limit,
        as_json=options.output.json,
    )
