"""The command line of ``vllm serve`` in the container."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving import access, cluster
from sparkforge.serving.settings import Settings


@dataclass(frozen=True)
class Command:
    """Groups of options of ``vllm serve``. Of two values of one option vLLM uses the later."""

    naming: tuple[str, ...]
    """Revision and name of the model."""
    profile: tuple[str, ...]
    last: tuple[str, ...]
    """The pair's split, dense layers, and the options of target and user."""

    @property
    def kernel_options(self) -> list[str]:
        """Options that decide which kernels the server uses."""
        return [*self.profile, *self.last]

    def line(
        self,
        model: str,
        address: Path,
        place: Sequence[str] = (),
        memory: Sequence[str] = (),
    ) -> list[str]:
        """Return the whole command.

        Args:
            model: a folder, or a name that vLLM downloads.
            address: of the socket to listen on.
        """
        options = (*self.naming, *self.profile, *place, *memory, *self.last)
        return serve(model, address, options)

    def identity(self, model: str, revision: str) -> list[str]:
        """Return words that identify this way to start a server, without secrets.

        The share of memory differs at each start and changes no kernel, so it is left out.
        """
        words = [model, f"--revision={revision}", *self.naming, *self.profile, *self.last]
        return access.redacted(words)


def serve(model: str, address: Path, options: Iterable[str]) -> list[str]:
    """Return the command of a server behind the front door, whose log has its requests."""
    return ["vllm", "serve", model, "--uds", str(address), "--disable-uvicorn-access-log", *options]


def of(settings: Settings, *, eager: bool) -> Command:
    """Return the command for some settings.

    Args:
        eager: without torch.compile.
    """
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
    return Command(tuple(naming), tuple(profile), tuple(last))
