"""One start of the server: checks, preflight, download, load, and supervision to its end."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.serving import (
    access,
    caches,
    checks,
    choices,
    cluster,
    command,
    compilers,
    devices,
    document,
    door,
    guard,
    hub,
    hubfiles,
    memory,
    moments,
    packed,
    pagecache,
    plugin,
    preflight,
    settings,
    state,
    steps,
    supervise,
    triton_driver,
    warmup,
)
from sparkforge.serving.errors import EX_CONFIG, EX_TEMPFAIL, StartError
from sparkforge.serving.log import say
from sparkforge.serving.progress import Client
from sparkforge.serving.settings import Settings
from sparkforge.serving.starts import Starts

LOOK_S, EVERY_S = 6.0, 5.0


@dataclass(frozen=True)
class Launch:
    """A start whose settings have been checked."""

    settings: Settings
    command: command.Command
    """Parts of ``vllm serve``."""
    variables: Mapping[str, str]
    """Of the server."""
    kernels: caches.Caches | None
    """The folder of compiled kernels, held by this process; None: not kept."""
    entrance: door.Door | None
    """Open since the settings were checked; None: this server takes no requests."""
    watch: guard.Guard | None
    """Of memory; None: off."""


@dataclass(frozen=True)
class Model:
    """The model as vLLM gets it."""

    name: str
    """A folder, or a name that vLLM downloads."""
    revision: str
    """Commit, branch or tag; "" for a folder."""

    @property
    def folder(self) -> Path | None:
        """The checkpoint; None where vLLM downloads it."""
        return Path(self.name) if settings.is_folder(self.name) else None

    def weights(self, variables: Mapping[str, str]) -> list[Path]:
        """Return the weight files that are on this machine."""
        return hubfiles.weight_files(self.name, self.revision, variables)


def serve(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[supervise.End, Starts | None]:
    """Run the server; returns its end, and the count of its starts if it was started.

    Raises:
        StartError: it cannot be started.
        hub.StoppedError: a signal came during the download.
        OSError, ValueError: it cannot be started, for a reason without a message of ours.
    """
    chosen = settings.read(arguments, environment)
    checks.check(chosen)
    entrance = None if chosen.rules is None else door.Door(chosen.rules)
    launch = None
    try:
        launch = prepare(chosen, environment, entrance)
        end = _serve(launch)
    finally:
        if entrance is not None:
            entrance.close()
        if launch is not None and launch.kernels is not None:
            launch.kernels.close(say)
    if entrance is not None and entrance.died:
        return supervise.End(EX_TEMPFAIL), end[1]
    return end


def _serve(launch: Launch) -> tuple[supervise.End, Starts | None]:
    failed = _preflight(launch)
    if failed is not None:
        return failed, None
    say(moments.line("the start"))
    model = _model(launch)
    link = None
    if (pair := launch.settings.pair) is not None:
        link = _meet(launch.settings, pair, model.revision)
        launch = replace(launch, variables=cluster.environment(pair, launch.variables))
    plan, starts = _plan(launch, model, link)
    say(moments.line("the load"))
    return supervise.run(plan), starts


def prepare(chosen: Settings, environment: Mapping[str, str], entrance: door.Door | None) -> Launch:
    """Check the rest, before anything that takes long.

    Raises:
        StartError: the server cannot be started.
    """
    watch = guard.of(
        environment,
        unified=chosen.profile.memory is not None,
        refuse=None if entrance is None else entrance.refuse,
        say=say,
    )
    variables = dict(environment)
    variables.pop("VLLM_API_KEY", None)  # the front door's
    on_device = chosen.profile.cuda_arch is not None
    # for a GPU torch.compile writes code for Triton, which brings its own compiler
    eager = not on_device and not packed.has_compiler(variables)
    if eager:
        # torch.compile would call the compiler at the first token (vLLM's CPU sampler uses it even
        # with --enforce-eager), and the engine would die of it
        say("no C++ compiler here: serving without torch.compile")
        variables.setdefault("TORCH_COMPILE_DISABLE", "1")
    parts = command.of(chosen, eager=eager)
    plugin.for_plugin(parts.kernel_options)  # or its error would come after the download
    if on_device:
        variables |= _packed(parts.kernel_options, variables, strict=chosen.strict)
    kernels = None
    if chosen.jit is not None:
        budget = int(min(chosen.jit_budget_gib, 1e9) * caches.GIB)
        build = caches.build_key(chosen.share, chosen.release)
        kernels = caches.hold(chosen.jit, build, budget, variables, say)
        variables |= kernels.variables
    variables |= triton_driver.seed(chosen.share, variables, say)
    return Launch(chosen, parts, variables, kernels, entrance, watch)


def _packed(
    options: Sequence[str], variables: Mapping[str, str], *, strict: bool
) -> Mapping[str, str]:
    """Return the server's variables for the image's pack of FlashInfer's modules.

    Args:
        options: of ``vllm serve``.
        strict: whether options that need another module end the start.
    """
    try:
        pack = packed.installed()
    except (OSError, document.DocumentError) as error:
        raise StartError(f"FlashInfer's modules: {error}; build the image again") from None
    found = devices.capabilities()
    try:
        packed.check(pack, found, options, variables)
    except StartError as error:
        if strict:
            raise
        say(f"warning: {error}")
    return packed.variables(pack, found, variables, say)


def _preflight(launch: Launch) -> supervise.End | None:
    """Serve a small model with known answers; returns the end of a failed or stopped trial."""
    chosen = launch.settings
    on_device = chosen.profile.cuda_arch is not None
    if not preflight.wanted(chosen.preflight, on_device=on_device):
        return None
    if on_device and not devices.capabilities():  # the user has been warned, and wants to continue
        say("no preflight: there is no device")
        return None
    driver = devices.driver() if on_device else ""
    if driver:
        say(f"driver {driver}")
    trial = preflight.Trial.of(
        chosen.share / preflight.NAME,
        launch.command.kernel_options,
        driver,
        launch.kernels.folder if launch.kernels else None,
        say,
    )
    if chosen.preflight == "auto" and trial.passed():
        say("preflight: passed before, with this build, device and driver")
        return None
    say("preflight: a small model with known answers is served first")
    say(shlex.join(trial.command))
    jobs = compilers.max_jobs(chosen.profile, trial.command, chosen.max_jobs, launch.variables)
    end = supervise.run(
        supervise.Plan(
            command=trial.command,
            variables={**launch.variables, "MAX_JOBS": str(jobs)},
            client=trial.client,
            strict=chosen.strict,
            expected=chosen.expectations(trial.command),
            trial=trial.run,
            entrance=launch.entrance,
            trial_s=chosen.preflight_s,
        )
    )
    if end.stopped():
        return end
    if end.code:
        say(
            f"error: the preflight failed (exit code {end.code}): the lines above say what differs;"
            " to serve anyway: SPARKFORGE_PREFLIGHT=off"
        )
        return supervise.End(EX_CONFIG)
    trial.note()
    return None


def _model(launch: Launch) -> Model:
    """Download the model, unless it is a folder or vLLM downloads it."""
    chosen = launch.settings
    if not chosen.downloads:
        return Model(chosen.model, chosen.revision)
    snapshot = hub.fetch(chosen.model, chosen.revision, launch.variables, say, state.tell)
    say(moments.line("the end of the download"))
    return Model(str(snapshot.folder), snapshot.commit)


def _meet(chosen: Settings, pair: cluster.Settings, revision: str) -> cluster.Link:
    """Wait for the other of two machines; returns the link to it."""
    both = {  # equal on both machines
        "release": chosen.release,
        "model": chosen.model,
        "revision": revision,
        "profile": json.dumps(chosen.profile.document(), sort_keys=True),
        "options": shlex.join(access.redacted([*chosen.caller_options, chosen.layers])),
    }
    link = cluster.Link(pair, both, say)
    state.tell("waiting for the other machine")
    link.meet()
    return link


def _plan(
    launch: Launch, model: Model, link: cluster.Link | None
) -> tuple[supervise.Plan, Starts | None]:
    """Return the plan of the real server, and the count of its starts."""
    chosen, profile = launch.settings, launch.settings.profile
    if profile.evict_page_cache:
        pagecache.drop(model.weights(launch.variables), say)  # before memory is measured
    share, description = memory.options(
        profile.memory, chosen.caller_options, chosen.memory_share, chosen.machines
    )
    if description:
        say(description)
    place = [] if chosen.pair is None else cluster.place(chosen.pair)
    door.engine_socket().unlink(missing_ok=True)  # the preflight's
    line = launch.command.line(model.name, door.engine_socket(), place, share)
    if told := choices.line(profile, line, model.folder, chosen.machines):
        say(told)
    say(shlex.join(access.redacted(line)))
    jobs = compilers.max_jobs(profile, line, chosen.max_jobs, launch.variables)
    hang_s = chosen.hang_s
    if hang_s and "--disable-log-stats" in line:
        say("--disable-log-stats: hang detection is off, since a busy server would look hung")
        hang_s = 0
    # three failed checks, and the time between them, fit into the time that a hang may take
    look_s, every_s = min(LOOK_S, hang_s / 5 or LOOK_S), min(EVERY_S, hang_s / 12 or EVERY_S)
    client = Client(door.own_socket(), look_s)
    identity = launch.command.identity(chosen.model, chosen.revision)
    starts = None
    if launch.entrance is not None:  # a worker fails with its head, which counts
        folder = launch.kernels.folder.parent if launch.kernels else Path(tempfile.gettempdir())
        starts = Starts.of(folder, identity, chosen.start_limit, say)
        starts.begin()

    def at_first_token() -> None:
        say(moments.line("the first token"))
        if profile.evict_page_cache:
            pagecache.drop(model.weights(launch.variables), say)  # vLLM's downloads, too

    def when_ready() -> None:
        if launch.entrance is not None:
            launch.entrance.ready()
        say(moments.line("ready"))
        if starts is not None:
            starts.forget()

    plan = supervise.Plan(
        command=line,
        variables={**launch.variables, "MAX_JOBS": str(jobs)},
        expected=chosen.expectations(line),
        client=client if launch.entrance is not None else None,
        strict=chosen.strict,
        hang_s=hang_s,
        every_s=every_s,
        warm_up=_warm_up(launch, line, client, identity) if launch.entrance else None,
        warm_strict=chosen.warm_up.strict,
        at_first_token=at_first_token,
        when_ready=when_ready,
        link=link,
        guard=launch.watch,
        entrance=launch.entrance,
    )
    return plan, starts


def _warm_up(
    launch: Launch, line: Sequence[str], client: Client, identity: Sequence[str]
) -> warmup.WarmUp | None:
    """Return the warm-up of a server, or None."""
    chosen = launch.settings
    if chosen.warm_up.mode == "off":
        return None
    return warmup.WarmUp(
        client,
        steps.Shape.of(line, chosen.profile.cudagraph_capture_sizes),
        chosen.warm_up.mode,
        chosen.warm_up.limit_s,
        say,
        state.tell,
        launch.kernels,
        warmup.way(identity),
        chosen.profile.answers,
    )
