"""The settings of a start: the container's variables, arguments and profile, read and checked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sparkforge.serving import access, arguments, cluster, door, profile
from sparkforge.serving.errors import StartError
from sparkforge.serving.profile import Profile


def _words(value: Any) -> Any:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class Variables(BaseModel):
    """All variables ``SPARKFORGE_*`` of the image, but ``_CLUSTER_*`` (cluster.py).

    An empty value stands for the default, but in ``SPARKFORGE_PROFILE``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: Annotated[str, Field(pattern="^[^-]")] = "/model"
    """A folder in the container, or a name on the hub, which is downloaded first."""
    model_revision: str = ""
    """Commit, branch or tag on the hub; without it the newest."""
    model_name: str = ""
    """The model's name for clients; without it the model's own."""
    profile: str | None = None
    """exact, balanced or fast, the choices of the image's profile; or a profile file, with a / in
    its path; empty: no profile."""
    serve_args: Words = ()
    """Options of the target, set by the build."""
    extra_args: Words = ()
    """Further options of `vllm serve`, e.g. --max-num-seqs 8."""
    memory_guard: Literal["off", "warn", "on"] | None = None
    """Watch free memory; on where GPU and host share it."""
    backend_check: Literal["fail", "warn", "off"] | None = None
    """Where vLLM chooses other backends than the profile's, or there is no device."""
    warm_up: Literal["off", "on"] | None = None
    """Requests before the server counts as healthy; without it: as the profile has it."""
    preflight: Literal["auto", "off", "always"] = "auto"
    """Serve a small model with known answers before the real one is downloaded."""
    hang_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60
    """Without progress, until the server is ended; 0: never."""
    restart: str = ""
    """Docker's restart policy of this container, which cannot see it. Where it restarts without
    limit, the entrypoint waits instead of ending for an error that a restart does not fix."""
    jit_dir: Path | None = None
    """Folder of compiled kernels, with one for each build and device."""
    share: Path = Path("/opt/sparkforge/share")
    """The image's folder of data; for trials outside of an image."""
    release: str = ""
    """Set by the build."""
    bind: str = ""
    """The host's address of the published port; another than loopback needs an API key."""
    allow_open: bool = False
    """1: no API key is needed."""
    origins: str = ""
    """Web pages that may ask, e.g. http://localhost:3000."""
    open_metrics: bool = False
    """1: /metrics needs no API key."""
    listen_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port in the container."""
    listen_host: Literal["", "127.0.0.1", "0.0.0.0"] = ""
    """Address in the container; without it: all."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Variables:
        """Read and check the variables.

        Raises:
            StartError: one cannot be used; the message names it, but not a value with options.
        """
        found = {
            name: text
            for name in cls.model_fields
            if (text := environment.get(f"SPARKFORGE_{name.upper()}", ""))
            or (name == "profile" and profile.VARIABLE in environment)
        }
        try:
            for text in found.values():
                text.encode()  # vLLM would fail without naming the variable
            return cls.model_validate(found)
        except UnicodeEncodeError:
            raise StartError("a variable SPARKFORGE_* is not UTF-8 text") from None
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            given = "" if name.endswith("_args") else f" {found[name][:100]!r}"
            msg = f"SPARKFORGE_{name.upper()}{given}: {first['msg']}"
            raise StartError(msg) from None


@dataclass(frozen=True)
class Settings:
    """Settings of one start."""

    variables: Variables
    model: str
    """A folder in the container, or a name on the hub."""
    revision: str
    """Commit, branch or tag on the hub; "": the newest."""
    profile: Profile
    """Of the image with the user's choice, or the user's own file."""
    caller_options: tuple[str, ...]
    """Of ``vllm serve``, set by the user."""
    rules: door.Rules | None
    """Of the front door; None: the second of two machines, which takes no requests."""
    pair: cluster.Settings | None
    """This machine's place among two; None: it serves alone."""

    @property
    def is_folder(self) -> bool:
        """The model is a folder in the container."""
        return self.model.startswith(("/", "."))

    @property
    def machines(self) -> int:
        """Machines that hold the model together."""
        return 1 if self.pair is None else 2

    @property
    def backend_check(self) -> str:
        """``fail``, ``warn`` or ``off``."""
        return self.variables.backend_check or self.profile.on_mismatch

    @property
    def warms_up(self) -> bool:
        """Requests are sent before the server counts as healthy."""
        return (self.variables.warm_up or self.profile.warm_up) != "off"

    def expectations(self, command: Sequence[str]) -> dict[str, str]:
        """Return the backends that vLLM has to choose with a command, by kind."""
        if self.backend_check == "off":
            return {}
        return self.profile.expectations(command, self.caller_options)

    def kernel_options(self, *, eager: bool) -> list[str]:
        """Return the options that decide which kernels the server uses.

        They are the profile's, the pair's split, and those of target and user. Of two values of one
        option vLLM uses the later.

        Args:
            eager: without torch.compile.
        """
        split = cluster.SPLIT if self.pair is not None else ()
        words = [*self.profile.options(), *split]
        words += [*self.variables.serve_args, *self.caller_options]
        return [*words, "--enforce-eager"] if eager and "--enforce-eager" not in words else words

    def command(
        self, model: str, kernel_options: Sequence[str], memory: Sequence[str]
    ) -> list[str]:
        """Return the whole command.

        Args:
            model: a folder, or a name that vLLM downloads.
            memory: options of the share of memory.
        """
        # as one word: vLLM takes no value for an option
        name = self.variables.model_name or ("" if self.is_folder else self.model)
        naming = [f"--served-model-name={name}"] if name else []
        place = cluster.place(self.pair) if self.pair is not None else []
        # a user's own value comes later, and counts
        return serve(model, [*naming, *place, *memory, *kernel_options])

    def identity(self, kernel_options: Sequence[str]) -> list[str]:
        """Return words that identify this way to start a server, without secrets."""
        words = [self.model, self.revision, self.variables.model_name, *kernel_options]
        return access.redacted(words)


def serve(model: str, options: Sequence[str]) -> list[str]:
    """Return the command of a server behind the front door, whose log has its requests."""
    socket = str(door.engine_socket())
    return ["vllm", "serve", model, "--uds", socket, "--disable-uvicorn-access-log", *options]


def read(words: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read and check all settings.

    Args:
        words: the entrypoint's arguments: the model, if the first is not an option, and options
            of ``vllm serve``.
        environment: of the container.

    Raises:
        StartError: a setting cannot be used.
        OSError: the profile cannot be read.
    """
    variables = Variables.read(environment)
    model, options = variables.model, list(words)
    if options and not options[0].startswith("-"):
        model, *options = options
    caller = (*variables.extra_args, *options)
    access.check_options([*variables.serve_args, *caller])
    pair = cluster.settings(environment)
    return Settings(
        variables=variables,
        model=model,
        revision=arguments.value(caller, "--revision") or variables.model_revision,
        profile=_profile(variables),
        caller_options=caller,
        rules=door.rules(variables, environment) if pair is None or pair.is_head else None,
        pair=pair,
    )


def _profile(variables: Variables) -> Profile:
    """Return the user's own profile, the image's with the user's choice, or an empty one."""
    name = variables.profile
    if name == "":
        return Profile()
    if name is not None and "/" in name:
        return Profile.load(Path(name))
    path = variables.share / "profile.json"
    found = Profile.load(path) if path.is_file() else Profile()
    return found if name is None else profile.pick(found, name, profile.VARIABLE)
