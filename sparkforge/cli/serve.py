"""serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from sparkforge.build.options import Behind, OutputOptions, ServerOptions, VariantOptions
from sparkforge.build.setup import last_build
from sparkforge.core.errors import UsageError
from sparkforge.sources.project import Project, ProjectOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``serve``."""

    target: str
    """target to serve"""
    model: Path | None = None
    """checkpoint to serve (default: a tiny test model)"""
    chat: bool = False
    """serve a tiny model with canned chat and tool-call replies"""
    profile: str | None = None
    """exact, balanced or fast: format of the dense layers (default: SPARKFORGE_PROFILE for an
    image, else the target's)"""
    arguments: Behind = ()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    server: ServerOptions = ServerOptions()


def run(options: Options) -> int:
    """Serve the last build until Ctrl-C."""
    from sparkforge.build import serve  # not needed by a build in which nothing changed

    if options.chat and options.model is not None:
        raise UsageError("--chat and --model conflict", "give only one")
    model = None if options.model is None else serve.checkpoint(options.model)
    project = Project.open(options.project)
    build = last_build(project, options.target, options.variant, options.server, options.arguments)
    if options.chat and build.context.target.smoke is None:
        msg = f"--chat: target {options.target} serves a real model; it has no tiny one"
        raise UsageError(msg, "use --target cpu, or omit --chat")
    profile = None if options.profile is None else serve.chosen(build.context, options.profile)
    build.run("image")
    limit = options.server.ready_timeout or float("inf")
    return serve.serve(
        build,
        model,
        chat=options.chat,
        profile=profile,
        limit_s=limit,
    )
