"""One start of the server: checks, preflight, download, load, and supervision to its end.

Docker's ``unless-stopped`` restarts a container after any exit code, and a server reads up to 65 GB
before it fails again. So where a restart changes nothing, the entrypoint waits instead of ending.
"""

import json
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from sparkforge.serving import (
    checkpoint,
    cluster,
    devices,
    door,
    health,
    image_build,
    memory,
    options,
    preflight,
    profile,
    trial,
)
from sparkforge.serving.health import Client
from sparkforge.serving.options import EX_CONFIG, EX_DATAERR, StartError, say
from sparkforge.serving.profile import Profile
from sparkforge.serving.settings import Variables
from sparkforge.serving.supervise import Phases, Server, Signals, StoppedError

LOOK_S = 6.0  # for all requests of one check
LIMIT = 3  # failed starts in a row


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Serve until the server ends; wait where Docker would only repeat a failure."""
    signals = Signals()
    health.forget()
    # Compose passes on what .env lists; the libraries take no empty value
    unset = ("HF_", "NCCL_", "GLOO_", "VLLM_LOGGING_", "VLLM_FASTSAFETENSORS_", "FASTSAFETENSORS_")
    given = {name: text for name, text in environment.items() if text or not name.startswith(unset)}
    reason, launch = "its log gives the reason", None
    try:
        if door.REPLICAS in given:  # this container is the router
            door.route(Variables.read(given), given)
        launch = Launch(words, given, signals)
        code = launch.run()
    except StoppedError:
        return 128 + signals.came[0]
    except (StartError, OSError, ValueError) as error:
        code, reason = getattr(error, "code", EX_CONFIG), str(error)
        say(f"error: {reason}")
    if launch is not None and launch.entrance is not None:
        launch.entrance.close()
    starts, why = None if launch is None else launch.starts, ""
    if code in (EX_CONFIG, EX_DATAERR):
        why = f"a restart changes nothing (exit code {code})"
    elif starts is not None and starts.exists() and starts.stat().st_size >= LIMIT:
        why = f"{LIMIT} starts in a row never became ready (the last exit code: {code})"
    repeats = environment.get("SPARKFORGE_RESTART") in ("always", "unless-stopped", "on-failure")
    waits = why and repeats and not signals.came
    if starts is not None and (waits or signals.came):
        starts.unlink(missing_ok=True)  # a restart by the user tries again
    if waits:
        with suppress(StoppedError):
            health.tell(f"waiting without a server: {why}: {reason}", given_up=True)
            say(f"waiting without a server: {why}; the lines above give the reason")
            say("to try again: docker compose restart, or docker compose up after a change of .env")
            while True:
                time.sleep(1)
    return code


def serve(model: str, words: Sequence[str]) -> list[str]:
    """Return the command of a server behind the front door, whose log has its requests."""
    place = str(door.folder() / door.ENGINE)
    return ["vllm", "serve", model, "--uds", place, "--disable-uvicorn-access-log", *words]


class Launch:
    """One start, by the entrypoint's arguments: the model, if the first is none, and options."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], signals: Signals
    ) -> None:
        self.signals, self.phases = signals, Phases()
        given = self.given = Variables.read(environment)
        model, own = given.model, list(words)
        if own and not own[0].startswith("-"):
            model, *own = own
        self.is_folder = model.startswith(("/", "."))  # else a name on the hub
        self.model, _, revision = (model, "", "") if self.is_folder else model.partition("@")
        self.caller = (*given.extra_args, *own)
        options.check([*given.serve_args, *self.caller])
        self.revision = options.value(self.caller, "--revision") or revision
        # the user's own profile, an empty one, or the image's, with the user's choice
        name, file = given.profile, given.share / "profile.json"
        if name is not None and (name == "" or "/" in name):
            self.profile = Profile.load(Path(name)) if name else Profile()
        else:
            self.profile = Profile.load(file) if file.is_file() else Profile()
            if name is not None:
                self.profile = profile.pick(self.profile, name, profile.VARIABLE)
        self.on_device = self.profile.cuda_arch is not None
        self.rounds = self.profile.choice not in (None, "exact")
        self.backends = given.checks.backends or self.profile.on_mismatch
        self.pair = cluster.settings(environment)
        self.machines = 1 if self.pair is None else 2
        self.variables = dict(environment)
        self.variables.pop("VLLM_API_KEY", None)  # the front door's
        # a worker of two machines takes no requests, and has no door
        self.has_door = self.pair is None or self.pair.is_head
        self.key = door.key_of(given, environment) if self.has_door else ""
        self.entrance: door.Door | None = None
        self.starts: Path | None = None  # counts them, once the server is started
        self.tried: Mapping[str, str | None] = {}  # what vLLM will say after the trial of kernels

    def run(self) -> int:
        """Run the server; returns the exit code. Raises StoppedError where a signal came before."""
        given, profile, link = self.given, self.profile, None
        if self.is_folder:
            checkpoint.check(Path(self.model))
        if profile.vocabulary_sha256:
            checkpoint.check_vocabulary(profile.vocabulary_sha256)
        if profile.cuda_arch is not None and self.backends != "off":
            there, strict = devices.capabilities(), self.backends == "fail"
            devices.check(profile.cuda_arch, there, strict=strict)
        memory.share(profile.memory, self.caller, self.machines)
        if self.has_door:
            self.entrance = door.Door(given, self.key)
        # of two equal options the later counts
        words = [*profile.options(), *(cluster.SPLIT if self.pair is not None else ())]
        words += [*given.serve_args, *self.caller]
        if self.on_device:
            self.variables |= devices.flashinfer_variables(self.variables)
        elif not devices.has_compiler(self.variables):
            # for a GPU torch.compile writes code for Triton, which brings its own compiler. vLLM's
            # CPU sampler calls the compiler even with --enforce-eager, and the engine dies
            say("no C++ compiler here: serving without torch.compile")
            self.variables.setdefault("TORCH_COMPILE_DISABLE", "1")
            words.append("--enforce-eager")
        options.for_plugin(words)  # or its error would come after the download
        kernels = None
        if given.jit_dir is not None:
            folder, environment = given.jit_dir.absolute(), self.variables
            kernels, places = devices.caches(folder, given.share, given.release, environment)
            self.variables |= places
            self.variables |= image_build.seed(given.share, self.variables, say)
        self.phases.end("checks")
        self._preflight(words, kernels)
        model, revision = self.model, self.revision
        if not self.is_folder:
            found = checkpoint.fetch(model, revision, self.variables, self.signals)
            self.phases.end("model")
            model, revision = str(found), found.name
        if self.pair is not None:
            both = {  # equal on both machines
                "release": given.release,
                "model": self.model,
                "revision": revision,
                "profile": json.dumps(profile.document(), sort_keys=True),
                "options": shlex.join(options.redacted(self.caller)),
            }
            cluster.say_nccl()
            link = cluster.Link(self.pair, both)
            health.tell("waiting for the other machine")
            link.meet()
            self.phases.end("other machine")
            self.variables = {**cluster.half(self.pair)[1], **self.variables}
        return self._server(model, words, kernels, link).run()

    def _supervised(self, command: Sequence[str], client: Client | None) -> Server:
        """Return a server that has to choose the profile's backends."""
        told = {**self.profile.expectations(command, self.caller), **self.tried}
        expected = {kind: name for kind, name in told.items() if name and self.backends != "off"}
        strict = self.backends == "fail"
        variables, signals, entrance = self.variables, self.signals, self.entrance
        return Server(command, variables, signals, client, expected, strict, entrance)

    def _preflight(self, real: list[str], kernels: Path | None) -> None:
        """Try our kernels, whose verdict becomes options of the real server, and serve a small
        model with known answers; StartError where it fails.
        """
        mode, model = self.given.checks.preflight, self.given.share / preflight.NAME
        if mode == "off" or (mode == "auto" and not self.on_device):
            return
        if self.on_device and not devices.capabilities():  # the user wants to continue
            return
        driver = devices.driver()
        if self.on_device:
            self._trial(real, driver, kernels / trial.NAME if kernels else None, mode)
        words = preflight.small_options(real)
        key, mark = preflight.key(model, words, driver), kernels and kernels / preflight.NAME
        if mode == "auto" and mark and mark.exists() and mark.read_text() == key:
            say("preflight: passed before, with this build, device and driver")
            self.phases.end("preflight", "passed before")
            return
        command = serve(str(model), words)
        client = Client(door.folder() / (door.OWN if self.has_door else door.ENGINE), LOOK_S)
        say(f"preflight: a small model with known answers is served first; driver {driver or '-'}")
        say(shlex.join(command))
        server = self._supervised(command, client)
        server.trial, server.warm_up = True, partial(preflight.run, client, model)
        code = server.run()
        if self.signals.came:
            raise StoppedError
        if code:
            msg = f"the preflight failed (exit code {code}): the lines above say what differs"
            raise StartError(f"{msg}; to serve anyway: SPARKFORGE_CHECKS=preflight=off")
        self.phases.end("preflight")
        if mark is not None:
            mark.write_text(key, encoding="ascii")

    def _trial(self, real: list[str], driver: str, file: Path | None, mode: str) -> None:
        """Try our kernels, and add what follows to the server's options."""
        mine = [*self.given.serve_args, *self.caller]
        # CUTLASS rounds activations, too; two machines could choose differently
        choose = self.pair is None and self.rounds
        choose = choose and not options.has(mine, "--moe-backend")
        asked = trial.plan(real, self.variables, choose=choose)
        if not asked:
            return
        if mode == "always" and file is not None:
            file.unlink(missing_ok=True)
        verdict = trial.run(asked, self.variables, self.signals, driver, file)
        real += verdict.options()
        self.tried = verdict.expect
        self.phases.end("trial", "as before" if verdict.before else "")

    def _server(
        self, model: str, words: Sequence[str], kernels: Path | None, link: cluster.Link | None
    ) -> Server:
        """Return the real server, and count its start."""
        checks = self.given.checks
        weights = sorted(Path(model).glob("*.safetensors")) if self.profile.evict_page_cache else []
        memory.drop(weights)  # before memory is measured
        (door.folder() / door.ENGINE).unlink(missing_ok=True)  # the preflight's
        # as one word: vLLM takes no value for an option
        name = self.given.model_name or ("" if self.is_folder else self.model)
        naming = [f"--served-model-name={name}"] if name else []
        place = cluster.half(self.pair)[0] if self.pair is not None else []
        # again: hours may have passed
        share = memory.share(self.profile.memory, self.caller, self.machines)
        command = serve(model, [*naming, *place, *share, *words])
        say(f"profile {self.profile.choice or '-'}: {shlex.join(options.redacted(command))}")
        if self.profile.choice == "fast":
            say("fast has INT6 in the dense layers; MXFP4, as before: --mxfp4-layers qkv,o,lm_head")
        if self.rounds:
            say("the dense layers are rounded; as published: SPARKFORGE_PROFILE=exact")
        # a busy one would look hung
        hang_s = 0 if "--disable-log-stats" in command else checks.hang
        # three failed checks, and the time between them, fit into the time of a hang
        client = Client(door.folder() / door.OWN, min(LOOK_S, hang_s / 5 or LOOK_S))
        server = self._supervised(command, client if self.has_door else None)
        server.weights, server.link, server.hang_s = weights, link, hang_s
        server.phases = self.phases
        mode = checks.guard or ("on" if self.profile.memory else "off")
        if mode != "off":
            server.guard = memory.Guard(mode == "on", self.entrance)
        if self.entrance is None:  # a worker fails with its head
            return server
        if (checks.warm_up or self.profile.warm_up) != "off":
            warm_up = preflight.warm_up
            server.warm_up = partial(warm_up, client, command, answers=self.profile.answers)
        folder = kernels.parent if kernels else health.temporary()
        # in a volume of several containers: by the container's own name
        self.starts = server.starts = folder / f"starts-{socket.gethostname()}"
        with self.starts.open("ab") as file:
            # starts in a row that have not become ready: a size takes no space on a full disk
            count = file.truncate(file.tell() + 1)
        if count > 1:
            say(f"start {count} of {LIMIT}: the last one never became ready")
        return server
