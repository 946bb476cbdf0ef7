"""up, status: Compose's server for its owner."""

import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkforge.build import composing, serve
from sparkforge.build.graph import last_variant
from sparkforge.build.options import CheckoutOptions, StoreOptions, VariantOptions, command_options
from sparkforge.check.subject import Subject, Unseen, of_compose, output
from sparkforge.cli.build import BuildOptions, made
from sparkforge.core.errors import Interrupted, ServerError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.pins import Pins
from sparkforge.runtime import client, engine
from sparkforge.serving import memory
from sparkforge.serving.profile import SENTENCES
from sparkforge.sources.project import Project, checkout

_EVERY_S = 30.0  # between two lines that differ in numbers only
_SAMPLE_S = 2.0  # for the speed
_LOGS = "docker compose logs --tail 50; docs/troubleshooting.md, Start"


@command_options
class Options(StoreOptions):
    target: str | None = None
    """target to serve (default: the one that Compose serves)"""


def up(options: Options = Options()) -> int:
    """Serve by Compose, after building or pulling the image that .env lacks or the engine.

    Interrupted: the server goes on starting. ServerError: it gave up.
    """
    project = Project.open(options.project)
    env_file, there = project.root / ".env", engine.connect()
    variables = composing.seen(env_file)
    served = composing.served_target(variables, project.pins)
    target = options.target or served
    image = composing.in_use(variables, target)
    if engine.is_published(image) and there.image_id(image) is None:
        engine.registry("pull", image)
    elif not image or there.image_id(image) is None:
        variant = replace(last_variant(project, target, VariantOptions()), engine="docker")
        made(project, BuildOptions(target=target, project=options.project, variant=variant))
        variables = composing.seen(env_file)
    if project.pins.target(target).model is not None:
        there.client.volumes.create(composing.MODELS_VOLUME)
    if target != served or not variables.get("COMPOSE_PROFILES"):
        composing.put(env_file, {"COMPOSE_PROFILES": target})  # for other commands of Compose, too
    compose = ("docker", "compose", "--project-directory", project.root)
    call(*compose, "up", "--detach", stream=True)
    try:
        _wait(variables, target)
    except KeyboardInterrupt:
        hint = "see it: build.py status, docker compose logs -f; stop it: docker compose down"
        raise Interrupted("the server goes on starting", hint) from None
    log.document(_invite(variables, target, project.pins))
    return 0


def _health(seen: Any) -> tuple[str, str]:
    """Return a container's state, and the last line of its health check."""
    state = seen["State"]
    health = (state.get("Health") or {}) if state["Status"] == "running" else {}
    said = [one["Output"].strip() for one in health.get("Log") or []]
    return health.get("Status") or state["Status"], "".join(said[-1:])


def _wait(variables: Mapping[str, str], target: str) -> None:
    """Wait until the container is healthy, and show what it does; ServerError: it gave up."""
    began, at, told = time.monotonic(), 0.0, ""
    while (found := _health(seen := of_compose(variables, target)))[0] != "healthy":
        state, said = found
        if state in ("exited", "dead") or "waiting without a server" in said:
            raise ServerError(f"the server does not start: {said or state}", _LOGS)
        text = f"{said or state}; restarts: {seen['RestartCount']}".removesuffix("; restarts: 0")
        now, kind = time.monotonic(), re.sub("[0-9.]+", "", text)
        if kind != told or now - at > _EVERY_S:
            log.info(f"{now - began:4.0f} s  {text}")
            told, at = kind, now
        time.sleep(1)
    log.info(f"healthy after {time.monotonic() - began:.0f} s")


def _invite(variables: Mapping[str, str], target: str, pins: Pins) -> dict[str, str]:
    """Print how to ask Compose's server; return it."""
    place = client.place_of(variables)
    model = client.served_model(place).name
    line = serve.curl(place.url, model, chat=pins.target(target).smoke is None)
    if place.key:  # read by the shell: the key itself is on no screen
        file = shlex.quote(variables["SPARKFORGE_API_KEY_FILE"])
        line += f' -H "Authorization: Bearer $(cat {file})"'
    return serve.invite(place.url, model, line)


def status(options: CheckoutOptions = CheckoutOptions()) -> int:
    """Show Compose's server; ServerError: there is none, or it is neither healthy nor starting."""
    here = checkout(options.pins)
    variables = composing.seen(here.root / ".env")
    target, place = composing.served_target(variables, here.pins), client.place_of(variables)
    seen = of_compose(variables, target)
    state, said = _health(seen)
    found: dict[str, Any] = {"target": target, "state": state, "health": said}
    asked = _invite(variables, target, here.pins) if state == "healthy" else {}
    found |= {"image": seen["Config"]["Image"], "memory": memory.described(memory.read())}
    try:
        lines = output(seen)
        found["profile"] = "".join(re.findall(r"entrypoint: profile (\S+): ", lines)[-1:])
        none = "none" if asked and "entrypoint: trial: " in lines else ""  # "": not yet tried
        found["failed_kernels"] = "".join(re.findall(SENTENCES["failed"], lines)[-1:]) or none
        if asked:
            one = Subject(place, client.Model(asked["model"], 0))
            began, before = time.monotonic(), one.total("generation_tokens_total")
            time.sleep(_SAMPLE_S)
            made_now, took_s = one.total("generation_tokens_total"), time.monotonic() - began
            found["tokens/s"] = round((made_now - before) / took_s, 1)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                found[name] = one.total(name)
    except (Unseen, OSError) as why:  # no log, --disable-log-stats, or it ends just now
        found["problem"] = str(why)
    log.table([(name, str(value)) for name, value in found.items() if value != ""])
    log.document({**found, **asked})
    if state in ("healthy", "starting"):
        return 0
    return log.failure(ServerError(f"the server is {state}: {said or 'it ended'}", _LOGS))
