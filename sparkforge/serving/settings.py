"""The settings of a start: variables of the container, arguments and profile, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving import arguments, choices, cluster, door, variables
from sparkforge.serving.errors import StartError
from sparkforge.serving.profile import Profile

_SHARE = "/opt/sparkforge/share"
_WARM_UPS = ("off", "quick", "full")
_PREFLIGHTS = ("auto", "off", "always")


@dataclass(frozen=True)
class WarmUpSettings:
    """Settings of the warm-up."""

    mode: str
    """``off``, ``quick`` or ``full``."""
    limit_s: float
    """Seconds for all steps together."""
    strict: bool
    """A failure ends the server."""


@dataclass(frozen=True)
class Settings:
    """Settings of one start."""

    model: str
    """A folder in the container, or a name on the hub."""
    revision: str
    """Commit, branch or tag on the hub; "": the newest."""
    served_name: str
    """The model's name for clients; "": vLLM's choice."""
    downloads: bool
    """The entrypoint downloads the model; else vLLM does, or it is a folder."""
    profile: Profile
    """Of the image with the user's choice, or the user's own file."""
    share: Path
    """Folder of the build's data in the image."""
    release: str
    target_options: tuple[str, ...]
    """Of ``vllm serve``, set by the build."""
    caller_options: tuple[str, ...]
    """Of ``vllm serve``, set by the user."""
    layers: str
    """``SPARKFORGE_MXFP4_LAYERS``."""
    memory_share: str
    """The user's own share of memory, or ""."""
    rules: door.Rules | None
    """Of the front door; None: the second of two machines, which takes no requests."""
    pair: cluster.Settings | None
    """This machine's place among two; None: it serves alone."""
    backend_check: str
    """``fail``, ``warn`` or ``off``."""
    warm_up: WarmUpSettings
    preflight: str
    preflight_s: float
    """``preflight``, ``preflight_s``: mode, and seconds for all of it."""
    jit: Path | None
    """Folder of compiled kernels, or None."""
    jit_budget_gib: float
    """Size of the kernels of all builds."""
    max_jobs: int | None
    """The user's own number of compilers, or None."""
    hang_s: float
    """Seconds without progress until a server is ended; 0: never."""
    start_limit: int
    """Failed starts in a row; 0: any number."""

    @property
    def is_folder(self) -> bool:
        """The model is a folder in the container."""
        return is_folder(self.model)

    @property
    def machines(self) -> int:
        """Machines that hold the model together."""
        return 1 if self.pair is None else 2

    @property
    def strict(self) -> bool:
        """A backend other than the profile's ends the server."""
        return self.backend_check == "fail"

    def expectations(self, command: Sequence[str]) -> dict[str, str]:
        """Return the backends that vLLM has to choose with a command, by kind."""
        if self.backend_check == "off":
            return {}
        return self.profile.expectations(command, self.caller_options)


def is_folder(model: str) -> bool:
    """Return whether a model is a folder in the container, not a name on the hub."""
    return model.startswith(("/", "."))


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
    variables.check_text(environment)
    model, options = _model(words, environment)
    share = Path(environment.get("SPARKFORGE_SHARE") or _SHARE)
    profile = _profile(environment, share)
    target = variables.options(environment, "SPARKFORGE_SERVE_ARGS")
    caller = [*variables.options(environment, "SPARKFORGE_EXTRA_ARGS"), *options]
    layers = variables.layers(environment)
    if named := choices.named(environment):
        given = {
            choices.LAYERS: layers,
            choices.OPTION: arguments.value([*target, *caller], choices.OPTION),
        }
        choices.check(profile, f"{choices.VARIABLE}={named}", given)
    pair = cluster.settings(environment)
    downloader = variables.choice(
        environment, "SPARKFORGE_DOWNLOAD", "entrypoint", ("entrypoint", "vllm")
    )
    downloads = downloader == "entrypoint" and not is_folder(model)
    revision = environment.get("SPARKFORGE_MODEL_REVISION", "")
    if downloads:
        revision = arguments.value(caller, "--revision") or revision
    jit = environment.get("SPARKFORGE_JIT_DIR")
    return Settings(
        model=model,
        revision=revision,
        served_name=environment.get("SPARKFORGE_MODEL_NAME") or (model if downloads else ""),
        downloads=downloads,
        profile=profile,
        share=share,
        release=environment.get("SPARKFORGE_RELEASE", ""),
        target_options=tuple(target),
        caller_options=tuple(caller),
        layers=layers,
        memory_share=variables.memory_share(environment),
        rules=door.rules(environment) if pair is None or pair.is_head else None,
        pair=pair,
        backend_check=variables.choice(
            environment, "SPARKFORGE_BACKEND_CHECK", profile.on_mismatch, ("fail", "warn", "off")
        ),
        warm_up=_warm_up(environment, profile),
        preflight=variables.choice(environment, "SPARKFORGE_PREFLIGHT", "auto", _PREFLIGHTS),
        preflight_s=variables.number(environment, "SPARKFORGE_PREFLIGHT_SECONDS", 1800),
        jit=Path(jit).absolute() if jit else None,
        jit_budget_gib=variables.number(environment, "SPARKFORGE_JIT_BUDGET_GIB", 20),
        max_jobs=variables.max_jobs(environment),
        hang_s=variables.number(environment, "SPARKFORGE_HANG_SECONDS", 60),
        start_limit=int(variables.number(environment, "SPARKFORGE_START_LIMIT", 3)),
    )


def _model(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """Return the model, and the options after it."""
    model = ""
    if words and not words[0].startswith("-"):
        model, *words = words
    model = model or environment.get("SPARKFORGE_MODEL") or "/model"
    if model.startswith("-"):
        raise StartError(
            "SPARKFORGE_MODEL begins with -: name a model; options go into SPARKFORGE_EXTRA_ARGS"
        )
    return model, words


def _profile(environment: Mapping[str, str], share: Path) -> Profile:
    """Return the user's own profile, the image's with the user's choice, or an empty one."""
    own, named = environment.get(choices.VARIABLE), choices.named(environment)
    if own == "":
        return Profile()
    if own and not named:
        return Profile.load(Path(own))
    path = share / "profile.json"
    profile = Profile.load(path) if path.is_file() else Profile()
    return choices.pick(profile, named, choices.VARIABLE) if named else profile


def _warm_up(environment: Mapping[str, str], profile: Profile) -> WarmUpSettings:
    mode = variables.choice(environment, "SPARKFORGE_WARM_UP", profile.warm_up, _WARM_UPS)
    failure = variables.choice(environment, "SPARKFORGE_WARM_UP_FAILURE", "fail", ("fail", "warn"))
    limit_s = variables.number(environment, "SPARKFORGE_WARM_UP_SECONDS", 900)
    return WarmUpSettings(mode, limit_s, failure == "fail")
