"""What the image runs: `vllm serve MODEL`, with options of profile, target and caller.

The model is the first argument if that is no option, else SPARKFORGE_MODEL: a directory in the
container (by default /model, where a checkpoint is mounted) or the name of a model on the hub,
which is downloaded first.

    SPARKFORGE_MODEL            /model
    SPARKFORGE_MODEL_REVISION   commit on the hub; without it the hub's newest is served
    SPARKFORGE_DOWNLOAD         entrypoint, or vllm: then vLLM downloads while it loads
    SPARKFORGE_MODEL_NAME       the name that clients ask for; without it the model's own
    SPARKFORGE_PROFILE          file of the profile (pins.yaml); empty: none
    SPARKFORGE_SERVE_ARGS       options of the target, set when the image was built
    SPARKFORGE_EXTRA_ARGS       options on top of those, e.g. --max-num-seqs 8
    SPARKFORGE_MXFP4_LAYERS     e.g. qkv,o,lm_head; off by default (docs/mxfp4-layers.md)
    SPARKFORGE_GPU_MEMORY_UTILIZATION   share of all memory; without it: computed (docs/serving.md)
    SPARKFORGE_MEMORY_GUARD     off, warn or on: watch free memory; on where GPU and host share it
    SPARKFORGE_MEMORY_MARKS     GiB below which it warns, refuses requests, ends the server; 6,4,2
    SPARKFORGE_BACKEND_CHECK    fail, warn or off, where vLLM chose other backends than the profile,
                                or there is no device
    SPARKFORGE_WARM_UP          off, quick or full: requests before the server counts as healthy
    SPARKFORGE_WARM_UP_SECONDS  for all of them; 900
    SPARKFORGE_WARM_UP_FAILURE  fail or warn, where one of them fails
    SPARKFORGE_PREFLIGHT        auto, off or always: a small model with known answers is served
                                before the real one is fetched (docs/serving.md)
    SPARKFORGE_PREFLIGHT_SECONDS  for all of it; 1800
    SPARKFORGE_JIT_DIR          where compiled kernels are kept, a folder for each build and device
    SPARKFORGE_JIT_BUDGET_GIB   of all builds together; the longest unused go first; 20
    SPARKFORGE_HANG_SECONDS     within so many without progress a server is ended; 60; 0: never
    SPARKFORGE_START_LIMIT      starts in a row that may fail to become ready; 3; 0: any number
    SPARKFORGE_RESTART          Docker's restart policy for this container, which cannot see it;
                                where that repeats without an end, the entrypoint waits in place of
                                ending for what a restart does not change (docs/serving.md)
    SPARKFORGE_SHARE            what the image has of the build; for trials outside of one
    MAX_JOBS                    compilers at once; without it: as many as free memory holds
    SPARKFORGE_LISTEN_PORT      port in the container
    SPARKFORGE_LISTEN_HOST      address in the container: 127.0.0.1 or 0.0.0.0; without it: all
    SPARKFORGE_CLUSTER_ROLE     head or worker: one half of a model on each of two machines, with
                                _HEAD, _WORKER, _IFNAME and _PORT: docs/two-sparks.md
"""

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# the image's own copy lies beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import (
    access,
    caches,
    cluster,
    compilers,
    devices,
    guard,
    hub,
    hubfiles,
    memory,
    moments,
    pagecache,
    preflight,
    profile,
    refusal,
    settings,
    starts,
    steps,
    supervise,
    vocabulary,
    warmup,
)
from sparkforge.serving.errors import EX_CONFIG, EX_NOINPUT, StartError
from sparkforge.serving.progress import Client
from sparkforge.serving.supervise import say

SHARE = Path(os.environ.get("SPARKFORGE_SHARE") or "/opt/sparkforge/share")
PROFILE = SHARE / "profile.json"
LOOK_S, EVERY_S = 6.0, 5.0
# what our own looks ask for, every few seconds, would fill the log
QUIET = ("--disable-access-log-for-endpoints", "/health,/metrics,/v1/models")


def main(arguments: list[str]) -> int:
    """Serve until the server ends, and as long as Docker would only repeat a failure.

    Returns:
        The exit code.
    """
    failed, words = None, "its log says what is wrong"
    try:
        end, failed = serve(arguments)
    except hub.StoppedError as error:
        say("the download was stopped; the next start continues it")
        return 128 + error.number
    except StartError as error:
        words, end = str(error), supervise.End(error.code)
        say(f"error: {words}")
    except (OSError, ValueError) as error:
        words, end = f"{type(error).__name__}: {error}", supervise.End(EX_CONFIG)
        say(f"error: {words}")
    if failed is not None and end.told():
        failed.forget()
    why = "" if end.told() else starts.why_to_wait(end.code, failed)
    if why and starts.repeats(os.environ.get("SPARKFORGE_RESTART", "")):
        if failed is not None:
            failed.forget()  # who starts this container again wants it tried again
        say(f"waiting, and serving nothing: {why}; the lines above say what is wrong")
        say("to try again: docker compose restart, or docker compose up after a change of .env")
        supervise.tell(f"serves nothing and waits: {why}: {words}", given_up=True)
        starts.wait(end.told)
    return end.code


def serve(arguments: list[str]) -> tuple[supervise.End, starts.Starts | None]:
    """Run the server; returns how it ended, and the count of its starts.

    Raises:
        StartError: it cannot be started.
        OSError, ValueError: the same, for a reason that nobody foresaw.
    """
    settings.check_text(os.environ)
    model = ""
    if arguments and not arguments[0].startswith("-"):
        model, *arguments = arguments
    model = model or os.environ.get("SPARKFORGE_MODEL") or "/model"
    if model.startswith("-"):
        raise StartError(
            "SPARKFORGE_MODEL begins with -: name a model; options go into SPARKFORGE_EXTRA_ARGS"
        )
    if model.startswith(("/", ".")):
        check_checkpoint(Path(model))
    plan = wanted_profile()
    caller = settings.words(os.environ, "SPARKFORGE_EXTRA_ARGS") + arguments
    variables = dict(os.environ)
    key = access.api_key(variables)
    if key:
        variables["VLLM_API_KEY"] = key
    pair = cluster.settings(variables)
    asks = pair is None or pair.is_head  # a worker has no port to ask
    if asks:
        access.check_options(caller)
        access.check_open(variables, key)
    if name := plan.get("vocabulary_sha256"):
        vocabulary.check(name)

    port = settings.listen_port(os.environ)
    asked = ["--port", str(port), *QUIET]
    if host := os.environ.get("SPARKFORGE_LISTEN_HOST"):
        if host not in ("127.0.0.1", "0.0.0.0"):  # elsewhere our own looks would not find it
            name = "SPARKFORGE_LISTEN_HOST (SPARKFORGE_BIND of two machines' .env)"
            raise StartError(f"{name} is {host!r}: use 127.0.0.1 or 0.0.0.0")
        asked += ["--host", host]
    watch = guard.of(os.environ, unified=bool(plan.get("memory")), asked=asks, say=say)
    if watch is not None and watch.file is not None:
        asked += refusal.OPTIONS
        variables = refusal.environment(variables)
    downloads = settings.choice(
        os.environ, "SPARKFORGE_DOWNLOAD", "entrypoint", ("entrypoint", "vllm")
    ) == "entrypoint" and not model.startswith(("/", "."))
    revision = os.environ.get("SPARKFORGE_MODEL_REVISION", "")
    name = os.environ.get("SPARKFORGE_MODEL_NAME") or (model if downloads else "")
    # in one word: no value is taken for an option
    named = [f"--revision={revision}"] if revision and not downloads else []
    named += [f"--served-model-name={name}"] if name else []
    options = profile.options(plan)
    way = [model, f"--revision={revision}", *named, *options]
    check = settings.choice(
        os.environ,
        "SPARKFORGE_BACKEND_CHECK",
        plan.get("on_mismatch", "fail"),
        ("fail", "warn", "off"),
    )
    hang_s = settings.number(os.environ, "SPARKFORGE_HANG_SECONDS", 60)
    limit = int(settings.number(os.environ, "SPARKFORGE_START_LIMIT", 3))
    share = settings.share(os.environ)
    last: list[str] = []
    if pair is not None:
        last += cluster.SPLIT  # unlike the place, this decides which kernels there are
    if layers := settings.layers(os.environ):
        last.append(f"--mxfp4-layers={layers}")
    last += settings.words(os.environ, "SPARKFORGE_SERVE_ARGS")
    last += caller  # at the end: of two values of one option vLLM takes the later
    if not shutil.which("c++") and not shutil.which("g++"):
        if plan.get("cuda_arch"):  # a server several times slower, and FlashInfer would fail anyway
            raise StartError(
                "no C++ compiler is in this image, and its kernels are compiled at run"
                " time: build the image again, on a base with g++"
            )
        # torch.compile would call the compiler at the first token (vLLM's CPU sampler uses it even
        # with --enforce-eager), and the engine would die of it.
        say("no C++ compiler here: serving without torch.compile")
        variables.setdefault("TORCH_COMPILE_DISABLE", "1")
        if "--enforce-eager" not in [*options, *last]:
            last.append("--enforce-eager")
    check_devices(plan, check)
    # all that may be wrong with settings, before what takes hours
    settings.max_jobs(os.environ)
    settings.choice(os.environ, "SPARKFORGE_WARM_UP", plan.get("warm_up", "off"), warmup.MODES)
    warm_strict = (
        settings.choice(os.environ, "SPARKFORGE_WARM_UP_FAILURE", "fail", ("fail", "warn"))
        == "fail"
    )
    nodes = 1 if pair is None else 2
    memory_options(plan, caller, share, nodes)  # computed anew later: hours may pass until then
    held = jit_folder(variables)
    if held is not None:
        variables |= held.variables
    tried = try_out(plan, [*options, *last], caller, variables, check, key, held)
    if tried is not None:
        return tried, None

    served = model
    say(moments.line("the start"))
    if downloads:  # for hours, it may be: what is free here is looked up afterwards
        revision = profile.value(caller, "--revision") or revision
        snapshot = hub.fetch(model, revision, variables, say, supervise.tell)
        served, revision = str(snapshot.folder), snapshot.commit
        say(moments.line("the end of the download"))
    command = ["vllm", "serve", served, *asked, *named, *options]
    link = None
    if pair is not None:
        command += cluster.place(pair)
        variables = cluster.environment(pair, variables)
        link = cluster.Link(pair, same_on_both(model, revision, plan, caller), say)
        supervise.tell("waiting for the other machine")
        link.meet()  # the same
    if plan.get("evict_page_cache"):
        evict(weight_files(served))  # first: memory is measured after it
    asked_memory, found = memory_options(plan, caller, share, nodes)
    if found:
        say(found)
    command += [*asked_memory, *last]

    say(shlex.join(access.redacted(command)))
    variables["MAX_JOBS"] = str(max_jobs(plan, command))
    if hang_s and "--disable-log-stats" in command:
        say("with --disable-log-stats a busy server looks like one that hangs: none is ended")
        hang_s = 0
    # three looks that fail, and the time between them, fit into the time that a hang may take
    look_s, every_s = min(LOOK_S, hang_s / 5 or LOOK_S), min(EVERY_S, hang_s / 12 or EVERY_S)
    client = Client(port, look_s, key)
    # a share of memory is another one at each start, and changes no kernel
    way = access.redacted([*way, *last])
    counted = None
    if asks:  # a worker fails with its head, which counts
        folder = held.folder.parent if held else Path(tempfile.gettempdir())
        counted = starts.Starts.of(folder, way, limit, say)
        counted.begin()
    say(moments.line("the load"))
    end = supervise.run(
        supervise.Plan(
            command=command,
            variables=variables,
            expected={} if check == "off" else profile.expectations(plan, command, caller),
            client=client if asks else None,
            strict=check == "fail",
            hang_s=hang_s,
            every_s=every_s,
            warm_up=warm_up(plan, command, client, held, warmup.way(way)) if asks else None,
            warm_strict=warm_strict,
            at_ready=lambda: at_first_token(served if plan.get("evict_page_cache") else ""),
            when_ready=lambda: when_ready(counted),
            link=link,
            guard=watch,
        )
    )
    return end, counted


def try_out(
    plan: Mapping[str, Any],
    words: list[str],
    caller: list[str],
    variables: Mapping[str, str],
    check: str,
    key: str,
    held: caches.Caches | None,
) -> supervise.End | None:
    """Serve a small model with known answers; returns how that ended, None where all is well.

    Args:
        words: options of the real server, ``caller`` those that the user gave.
        check: how strictly backends are compared.
    """
    mode = settings.choice(os.environ, "SPARKFORGE_PREFLIGHT", "auto", preflight.MODES)
    limit_s = settings.number(os.environ, "SPARKFORGE_PREFLIGHT_SECONDS", 1800)
    on_device = bool(plan.get("cuda_arch"))
    if not preflight.wanted(mode, plan):
        return None
    if on_device and not devices.capabilities():  # told already, and the user wants to go on
        say("no preflight: there is no device")
        return None
    driver = devices.driver() if on_device else ""
    if driver:
        say(f"driver {driver}")
    folder = held.folder if held else None
    trial = preflight.Trial.of(SHARE / preflight.NAME, words, driver, folder, key, say)
    if mode == "auto" and trial.passed():
        say("preflight: passed before, with this build, device and driver")
        return None
    say("preflight: a small model with known answers is served first")
    say(shlex.join(trial.command))
    given = {**variables, "MAX_JOBS": str(max_jobs(plan, [*trial.command]))}
    end = supervise.run(
        supervise.Plan(
            command=trial.command,
            variables=given,
            client=trial.client,
            strict=check == "fail",
            expected={} if check == "off" else profile.expectations(plan, trial.command, caller),
            trial=trial.run,
            trial_s=limit_s,
        )
    )
    if end.told():
        return end
    if end.code:
        say(
            f"error: the preflight failed (exit code {end.code}): the lines above say what differs;"
            " to serve all the same: SPARKFORGE_PREFLIGHT=off"
        )
        return supervise.End(EX_CONFIG)
    trial.note()
    return None


def at_first_token(served: str) -> None:
    """Say what memory is like, and drop a model's weights from the page cache.

    Args:
        served: as vLLM got it; "": nothing is dropped.
    """
    say(moments.line("the first token"))
    if served:
        evict(weight_files(served))  # the files that are there by now


def when_ready(counted: starts.Starts | None) -> None:
    """Forget the starts that failed."""
    say(moments.line("ready"))
    if counted is not None:
        counted.forget()


def max_jobs(plan: Mapping[str, Any], command: list[str]) -> int:
    """Return how many compilers FlashInfer may run at once: the user's number, else what fits."""
    if (own := settings.max_jobs(os.environ)) is not None:
        return own
    unified = bool(plan.get("memory"))  # a profile for a card of its own memory has no plan
    found = compilers.jobs(command, memory.read(), unified=unified)
    if not plan.get("cuda_arch"):  # nothing of FlashInfer's is compiled for a CPU
        return found
    say(
        f"kernels are compiled with MAX_JOBS={found}, at {compilers.gib_per_job(command):.1f} GiB"
        " each of the memory beside the model"
    )
    return found


def jit_folder(variables: Mapping[str, str]) -> caches.Caches | None:
    """Hold the folder of this build's kernels, and make room among those of others."""
    named = os.environ.get("SPARKFORGE_JIT_DIR")
    if not named:
        return None
    gib = settings.number(os.environ, "SPARKFORGE_JIT_BUDGET_GIB", 20)
    budget = int(min(gib, 1e9) * caches.GIB)
    build = caches.build_key(SHARE, os.environ.get("SPARKFORGE_RELEASE", ""))
    root, key = Path(named).absolute(), f"{build}-{caches.device_key()}"
    try:
        held = caches.occupy(root, key, variables)
        caches.prune(root, key, budget, say)
    except OSError as error:
        msg = (
            f"compiled kernels cannot be kept in {named}: {error}; it must be a folder that user"
            f" {os.getuid()} may write, on a disk with room (SPARKFORGE_JIT_DIR)"
        )
        raise StartError(msg) from None
    say(f"compiled kernels are kept in {held.folder}")
    return held


def warm_up(
    plan: Mapping[str, Any],
    command: list[str],
    client: Client,
    held: caches.Caches | None,
    way: str,
) -> warmup.WarmUp | None:
    """Return what is to be compiled before users are served, or None."""
    mode = settings.choice(
        os.environ, "SPARKFORGE_WARM_UP", plan.get("warm_up", "off"), warmup.MODES
    )
    limit_s = settings.number(os.environ, "SPARKFORGE_WARM_UP_SECONDS", 900)
    if mode == "off":
        return None

    def most(option: str, default: int) -> int:
        text = profile.value(command, option) or ""
        return int(text) if text.isdecimal() and int(text) > 0 else default

    shape = steps.Shape(
        max_len=most("--max-model-len", 4096),  # the server will say
        # without the option vLLM takes 2048 to 16384, as the device is
        chunk=most("--max-num-batched-tokens", 8192),
        max_seqs=most("--max-num-seqs", 64),
        captured=tuple(plan.get("cudagraph_capture_sizes", ())),
    )
    asks = bool(plan.get("answers"))
    return warmup.WarmUp(client, shape, mode, limit_s, say, supervise.tell, held, way, asks)


def same_on_both(
    model: str, revision: str, plan: Mapping[str, Any], caller: list[str]
) -> dict[str, str]:
    """Return what two machines that serve together must have alike, by name."""
    layers = os.environ.get("SPARKFORGE_MXFP4_LAYERS", "")
    return {
        "release": os.environ.get("SPARKFORGE_RELEASE", ""),
        "model": model,
        "revision": revision,
        "profile": json.dumps(plan, sort_keys=True),
        "options": shlex.join(access.redacted([*caller, layers])),
    }


def wanted_profile() -> Mapping[str, Any]:
    """Return the image's profile, another one that is named, or nothing."""
    named = os.environ.get("SPARKFORGE_PROFILE")
    if named == "" or (named is None and not PROFILE.is_file()):
        return {}
    return profile.read(Path(named or PROFILE))


def memory_options(
    plan: Mapping[str, Any], caller: list[str], share: str, nodes: int
) -> tuple[list[str], str]:
    """Return the share of memory to ask for: the user's, else what the profile's plan gives.

    With it, what it was computed from, in words; "" where nothing was computed.

    Args:
        share: the user's, or "".
        nodes: machines that the weights are split over.

    Raises:
        MemoryShortError: the model cannot fit.
    """
    option = "--gpu-memory-utilization"
    if share:
        return [option, share], ""
    others = (option, "--device-memory-utilization", "--kv-cache-memory-bytes")
    if not plan.get("memory") or any(profile.given(caller, other) for other in others):
        return [], ""
    reading = memory.read()
    wanted = {**plan["memory"], "least_gib": -(-int(plan["memory"]["least_gib"]) // nodes)}
    cuda_total = devices.unified_bytes()
    share = f"{memory.utilisation(wanted, reading, cuda_total):.2f}"
    return [option, share], f"{memory.described(reading, cuda_total)}: {option} {share}"


def weight_files(model: str) -> list[Path]:
    """Return the files that the weights are read from, as far as they are here already."""
    if model.startswith(("/", ".")):
        return pagecache.weight_files(Path(model))
    revision = os.environ.get("SPARKFORGE_MODEL_REVISION") or None
    found = pagecache.snapshot(hubfiles.cache(os.environ), model, revision)
    return pagecache.weight_files(found) if found else []


def evict(files: list[Path]) -> None:
    """Drop the weight files from the page cache; a failure costs memory and ends nothing."""
    try:
        asked = pagecache.evict(files)
        left = sum(pagecache.resident(file) for file in files)
    except OSError as error:
        say(f"warning: the page cache keeps the weights: {error}")
        return
    say(f"page cache: {asked / 1e9:.1f} GB of weights dropped, {left / 1e9:.1f} GB stay")


def check_devices(plan: Mapping[str, Any], strictness: str) -> None:
    """End, or warn, where the device that the profile is for is not there."""
    wanted = plan.get("cuda_arch")
    if wanted is None or strictness == "off":
        return
    try:
        said = devices.check(wanted, devices.capabilities())
    except devices.DeviceError as error:
        if strictness == "fail":
            raise
        said = str(error)
    if said:
        say(f"warning: {said}")


def check_checkpoint(path: Path) -> None:
    """End with a message that says what to do, which vLLM's own for a wrong path does not."""
    if not path.is_dir():
        problem = "is not there"
    elif not os.access(path, os.R_OK | os.X_OK):
        problem = f"cannot be read by user {os.getuid()}: chmod -R a+rX it on the host"
    elif not (path / "config.json").is_file():
        problem = "has no config.json" if any(path.iterdir()) else "is empty"
    elif any(one.is_file() and not os.access(one, os.R_OK) for one in path.iterdir()):
        problem = f"has files that user {os.getuid()} cannot read: chmod -R a+rX it on the host"
    else:
        return
    msg = (
        f"the model directory {path} {problem}.\n"
        "Mount a checkpoint there (with Compose: SPARKFORGE_MODEL_DIR=/path/on/the/host), or name "
        "another one in SPARKFORGE_MODEL."
    )
    raise StartError(msg, EX_NOINPUT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
