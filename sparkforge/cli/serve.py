"""serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions, ServerOptions, VariantOptions, as_last
from sparkforge.build.setup import last_build
from sparkforge.core.command import Entry, behind, grouped, needed, option, switch
from sparkforge.core.errors import UsageError
from sparkforge.sources.project import Project, ProjectOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``serve``."""

    target: str = needed("target to serve", metavar="NAME")
    model: Path | None = option(
        "checkpoint to serve (default: a tiny test model)", type=Path, metavar="DIR", one_of="model"
    )
    chat: bool = switch("serve a tiny model with canned chat and tool-call replies", one_of="model")
    profile: str | None = option(
        "exact, balanced or fast: format of the dense layers (default: SPARKFORGE_PROFILE for an"
        " image, else the target's)",
        metavar="NAME",
    )
    arguments: tuple[str, ...] = behind()
    project: ProjectOptions
    output: OutputOptions
    variant: VariantOptions = as_last()
    server: ServerOptions = grouped(port="8000", ready_timeout="none")


def _serve(options: Options) -> int:
    """Serve the last build until Ctrl-C."""
    from sparkforge.build import serve  # not needed by a build in which nothing changed

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


COMMANDS = (Entry("serve", Options, _serve),)
