"""One start of the server: checks, preflight, download, load, and supervision to its end."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sparkforge.serving import (
    access,
    caches,
    checkpoint,
    cluster,
    devices,
    door,
    guard,
    hub,
    memory,
    preflight,
    settings,
    state,
    supervise,
    triton_driver,
    warmup,
)
from sparkforge.serving.arguments import for_plugin
from sparkforge.serving.errors import EX_CONFIG, EX_TEMPFAIL, StartError, say
from sparkforge.serving.progress import Client
from sparkforge.serving.settings import Settings
from sparkforge.serving.state import Starts

LOOK_S, EVERY_S = 6.0, 5.0


@dataclass(frozen=True)
class Launch:
    """A start whose settings have been checked."""

    settings: Settings
    options: Sequence[str]
    """Of ``vllm serve``, that decide which kernels the server uses."""
    variables: Mapping[str, str]
    """Of the server."""
    kernels: Path | None
    """The folder of compiled kernels, held by this process; None: not kept."""
    entrance: door.Door | None
    """Open since the settings were checked; None: this server takes no requests."""


def serve(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[supervise.End, Starts | None]:
    """Run the server; returns its end, and the count of its starts if it was started.

    Raises:
        StartError: it cannot be started.
        hub.StoppedError: a signal came during the download.
        OSError, ValueError: it cannot be started, for a reason without a message of ours.
    """
    # Compose passes on what .env lists, and an empty value is an error to the hub's library
    given = {
        name: value for name, value in environment.items() if value or not name.startswith("HF_")
    }
    chosen = settings.read(words, given)
    _check(chosen)
    entrance = None if chosen.rules is None else door.Door(chosen.rules)
    try:
        end, starts = _serve(prepare(chosen, given, entrance))
    finally:
        if entrance is not None:
            entrance.close()
    if entrance is not None and entrance.died:
        return supervise.End(EX_TEMPFAIL), starts
    return end, starts


def _check(chosen: Settings) -> None:
    """Check model, vocabulary, device and memory, before anything is downloaded or loaded."""
    profile = chosen.profile
    if chosen.is_folder:
        checkpoint.check(Path(chosen.model))
    if profile.vocabulary_sha256:
        checkpoint.check_vocabulary(profile.vocabulary_sha256)
    if profile.cuda_arch is not None and chosen.backend_check != "off":
        try:
            warning = devices.check(profile.cuda_arch, devices.capabilities())
        except devices.DeviceError as error:
            if chosen.backend_check == "fail":
                raise
            warning = str(error)
        if warning:
            say(f"warning: {warning}")
    # the share is computed again before the server starts: hours may pass until then
    memory.options(profile.memory, chosen.caller_options, chosen.machines)


def prepare(chosen: Settings, environment: Mapping[str, str], entrance: door.Door | None) -> Launch:
    """Check the rest, and choose the server's variables.

    Raises:
        StartError: the server cannot be started.
    """
    variables = dict(environment)
    variables.pop("VLLM_API_KEY", None)  # the front door's
    on_device = chosen.profile.cuda_arch is not None
    # for a GPU torch.compile writes code for Triton, which brings its own compiler
    eager = not on_device and not devices.has_compiler(variables)
    if eager:
        # torch.compile would call the compiler at the first token (vLLM's CPU sampler uses it even
        # with --enforce-eager), and the engine would die of it
        say("no C++ compiler here: serving without torch.compile")
        variables.setdefault("TORCH_COMPILE_DISABLE", "1")
    options = chosen.kernel_options(eager=eager)
    for_plugin(options)  # or its error would come after the download
    if on_device:
        variables |= _pack(options, variables, strict=chosen.backend_check == "fail")
    kernels = None
    if (folder := chosen.variables.jit_dir) is not None:
        build = caches.build_key(chosen.variables.share, chosen.variables.release)
        held = caches.hold(folder.absolute(), build, variables)
        kernels, variables = held.folder, {**variables, **held.variables}
    variables |= triton_driver.seed(chosen.variables.share, variables, say)
    return Launch(chosen, options, variables, kernels, entrance)


def _pack(
    options: Sequence[str], variables: Mapping[str, str], *, strict: bool
) -> Mapping[str, str]:
    """Return the server's variables for the image's pack of FlashInfer's modules.

    Args:
        strict: whether options that need another module end the start.
    """
    try:
        pack = devices.installed()
    except (OSError, ValueError) as error:
        raise StartError(f"FlashInfer's modules: {error}; build the image again") from None
    found = devices.capabilities()
    try:
        devices.check_pack(pack, found, options, variables)
    except StartError as error:
        if strict:
            raise
        say(f"warning: {error}")
    return devices.pack_variables(pack, found, variables)


def _serve(launch: Launch) -> tuple[supervise.End, Starts | None]:
    failed = _preflight(launch)
    if failed is not None:
        return failed, None
    say(memory.line("the start"))
    chosen, link = launch.settings, None
    model, revision = chosen.model, chosen.revision
    if not chosen.is_folder:
        model = str(hub.fetch(model, revision, launch.variables, state.tell))
        revision = Path(model).name
        say(memory.line("the end of the download"))
    if chosen.pair is not None:
        link = _meet(chosen, chosen.pair, revision)
        launch = replace(launch, variables=cluster.environment(chosen.pair, launch.variables))
    plan, starts = _plan(launch, model, link)
    say(memory.line("the load"))
    return supervise.run(plan), starts


def _preflight(launch: Launch) -> supervise.End | None:
    """Serve a small model with known answers; returns the end of a failed or stopped trial."""
    chosen = launch.settings
    mode, on_device = chosen.variables.preflight, chosen.profile.cuda_arch is not None
    if mode == "off" or (mode == "auto" and not on_device):
        return None
    if on_device and not devices.capabilities():  # the user has been warned, and wants to continue
        say("no preflight: there is no device")
        return None
    driver = devices.driver() if on_device else ""
    if driver:
        say(f"driver {driver}")
    trial = preflight.Trial.of(
        chosen.variables.share / preflight.NAME,
        launch.options,
        driver,
        launch.kernels,
        Client(door.own_socket(), LOOK_S),
    )
    if mode == "auto" and trial.passed():
        say("preflight: passed before, with this build, device and driver")
        return None
    say("preflight: a small model with known answers is served first")
    command = settings.serve(str(trial.model), trial.options)
    say(shlex.join(command))
    end = supervise.run(
        supervise.Plan(
            command=command,
            variables=_with_jobs(launch, command),
            client=trial.client,
            strict=chosen.backend_check == "fail",
            expected=chosen.expectations(command),
            trial=trial.run,
            entrance=launch.entrance,
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


def _with_jobs(launch: Launch, command: Sequence[str]) -> Mapping[str, str]:
    jobs = memory.max_jobs(launch.settings.profile, command, launch.variables)
    return {**launch.variables, "MAX_JOBS": jobs}


def _meet(chosen: Settings, pair: cluster.Settings, revision: str) -> cluster.Link:
    """Wait for the other of two machines; returns the link to it."""
    both = {  # equal on both machines
        "release": chosen.variables.release,
        "model": chosen.model,
        "revision": revision,
        "profile": json.dumps(chosen.profile.document(), sort_keys=True),
        "options": shlex.join(access.redacted(chosen.caller_options)),
    }
    link = cluster.Link(pair, both, say)
    state.tell("waiting for the other machine")
    link.meet()
    return link


def _plan(
    launch: Launch, model: str, link: cluster.Link | None
) -> tuple[supervise.Plan, Starts | None]:
    """Return the plan of the real server, and the count of its starts."""
    chosen, profile, entrance = launch.settings, launch.settings.profile, launch.entrance
    weights = checkpoint.weight_files(Path(model)) if profile.evict_page_cache else []
    if weights:
        memory.drop(weights)  # before memory is measured
    share, description = memory.options(profile.memory, chosen.caller_options, chosen.machines)
    if description:
        say(description)
    door.engine_socket().unlink(missing_ok=True)  # the preflight's
    command = chosen.command(model, launch.options, share)
    if profile.choice is not None:
        say(f"profile {profile.choice}")
    say(shlex.join(access.redacted(command)))
    hang_s = chosen.variables.hang_seconds
    if hang_s and "--disable-log-stats" in command:
        say("--disable-log-stats: hang detection is off, since a busy server would look hung")
        hang_s = 0
    # three failed checks, and the time between them, fit into the time that a hang may take
    look_s, every_s = min(LOOK_S, hang_s / 5 or LOOK_S), min(EVERY_S, hang_s / 12 or EVERY_S)
    client, starts = Client(door.own_socket(), look_s), None
    if entrance is not None:  # a worker fails with its head, which counts
        folder = launch.kernels.parent if launch.kernels else Path(tempfile.gettempdir())
        starts = Starts.of(folder, chosen.identity(launch.options))
        starts.begin()
    unified = "on" if profile.memory is not None else "off"
    mode = chosen.variables.memory_guard or unified
    refuse = None if entrance is None else entrance.refuse

    def at_first_token() -> None:
        say(memory.line("the first token"))
        if weights:
            memory.drop(weights)

    def when_ready() -> None:
        if entrance is not None:
            entrance.ready()
        os.sync()  # a power cut would leave kernels that are cut short
        say(memory.line("ready"))
        if starts is not None:
            starts.forget()

    warm_up = partial(warmup.run, client, command, answers=profile.answers, tell=state.tell)
    plan = supervise.Plan(
        command=command,
        variables=_with_jobs(launch, command),
        expected=chosen.expectations(command),
        client=client if entrance is not None else None,
        strict=chosen.backend_check == "fail",
        hang_s=hang_s,
        every_s=every_s,
        warm_up=warm_up if entrance is not None and chosen.warms_up else None,
        at_first_token=at_first_token,
        when_ready=when_ready,
        link=link,
        guard=None if mode == "off" else guard.Guard(mode == "on", refuse),
        entrance=entrance,
    )
    return plan, starts
