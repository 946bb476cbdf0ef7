"""The command line of ``vllm serve`` in the container."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkforge.serving import access, arguments, bodies, cluster, readiness, refusal
from sparkforge.serving.settings import Settings

QUIET = ("--disable-access-log-for-endpoints", "/health,/metrics,/v1/models")
"""Our own requests come every few seconds, and would fill the log."""


@dataclass(frozen=True)
class Command:
    """Groups of options of ``vllm serve``. Of two values of one option vLLM uses the later."""

    port: int
    host: str
    """``port``, ``host``: to listen on; host "": all addresses."""
    access: tuple[str, ...]
    """Handling of requests."""
    naming: tuple[str, ...]
    """Revision and name of the model."""
    profile: tuple[str, ...]
    last: tuple[str, ...]
    """The pair's split, dense layers, and the options of target and user."""

    @property
    def kernel_options(self) -> list[str]:
        """Options that decide which kernels the server uses."""
        return [*self.profile, *self.last]

    def line(self, model: str, place: Sequence[str] = (), memory: Sequence[str] = ()) -> list[str]:
        """Return the whole command.

        Args:
            model: a folder, or a name that vLLM downloads.
        """
        options = (*self.access, *self.naming, *self.profile, *place, *memory, *self.last)
        return arguments.serve(model, self.port, self.host, options)

    def identity(self, model: str, revision: str) -> list[str]:
        """Return words that identify this way to start a server, without secrets.

        The share of memory differs at each start and changes no kernel, so it is left out.
        """
        words = [model, f"--revision={revision}", *self.naming, *self.profile, *self.last]
        return access.redacted(words)


def of(settings: Settings, *, refusing: bool, eager: bool) -> Command:
    """Return the command for some settings.

    Args:
        refusing: load the middleware that refuses requests while memory is short.
        eager: without torch.compile.
    """
    requests = [*QUIET, *(refusal.OPTIONS if refusing else [])]
    if settings.limits_bodies:
        requests += bodies.OPTIONS
    if settings.takes_requests:
        requests += readiness.OPTIONS
    naming = []
    # as one word each: vLLM takes no value for an option
    if settings.revision and not settings.downloads:
        naming.append(f"--revision={settings.revision}")
    if settings.served_name:
        naming.append(f"--served-model-name={settings.served_name}")
    profile = settings.profile.options()
    # unlike the place of a machine, the split decides which kernels there are
    last = [*cluster.SPLIT] if settings.pair is not None else []
    if settings.layers:
        last.append(f"--mxfp4-layers={settings.layers}")
    last += [*settings.target_options, *settings.caller_options]
    if eager and "--enforce-eager" not in [*profile, *last]:
        last.append("--enforce-eager")
    return Command(
        settings.port, settings.host, tuple(requests), tuple(naming), tuple(profile), tuple(last)
    )
