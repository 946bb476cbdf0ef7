"""Probes of the container engine and its GPU support: readings → findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sparkforge.core import plain
from sparkforge.core.errors import EngineError
from sparkforge.core.run import Glimpse
from sparkforge.inspect.doctor.finding import Finding, State
from sparkforge.inspect.doctor.reading import Readings, first_line
from sparkforge.inspect.doctor.wanted import Wanted
from sparkforge.runtime.engine import check_version

# docker-compose.yml's health check and volumes need this; tested with 2.26.1
_OLDEST_COMPOSE = (2, 20)
_INSTALL = "curl -fsSL https://get.docker.com | sudo sh   # or your distribution's packages"


def engine(seen: Readings, want: Wanted) -> Iterator[Finding]:
    output = seen.output("docker")
    info = _info(output)
    bad: State = "fail" if want.needs_engine else "note"
    instead = (
        ""
        if want.needs_engine
        else "; without one, builds use a virtual environment (--engine none)"
    )
    socket = seen.facts.get("docker_socket", "")
    state = seen.state(socket)
    if socket and state.exists:
        if state.writable:
            yield Finding("docker-socket", "ok", f"{socket} is accessible")
        else:
            yield Finding(
                "docker-socket",
                bad,
                f"{socket}: permission denied{instead}",
                "sudo usermod -aG docker $USER && newgrp docker"
                "   # members of docker have root rights",
            )
    version = str(info.get("ServerVersion") or "") if info else ""
    if not version:
        hint = _INSTALL if "PATH" in output.problem else "sudo systemctl start docker"
        hint = hint if want.needs_engine else ""
        yield Finding("engine", bad, _silence(output, info) + instead, hint)
        return
    try:
        check_version(version)
    except EngineError as error:
        yield Finding("engine", bad, error.what, _INSTALL)
    else:
        yield Finding("engine", "ok", f"Docker Engine {version}")
    yield from _plugins(seen, bad)
    if want.gpu:
        yield _toolkit(seen, info or {})


def _plugins(seen: Readings, bad: State) -> Iterator[Finding]:
    buildx = seen.output("buildx")
    if buildx.code == 0:
        yield Finding("buildx", "ok", first_line(buildx.out))
    else:
        yield Finding("buildx", bad, _why_not(buildx), "sudo apt-get install docker-buildx-plugin")
    compose = seen.output("compose")
    found = re.search(r"(\d+)\.(\d+)", compose.out) if compose.code == 0 else None
    install = "sudo apt-get install docker-compose-plugin"
    if found is None:
        yield Finding("compose", "warn", _why_not(compose), install)
    elif (int(found[1]), int(found[2])) < _OLDEST_COMPOSE:
        yield Finding("compose", "warn", f"{first_line(compose.out)}: older than 2.20", install)
    else:
        yield Finding("compose", "ok", first_line(compose.out))


def _toolkit(seen: Readings, info: dict[str, Any]) -> Finding:
    runtimes = info.get("Runtimes")
    known = "nvidia" in runtimes if isinstance(runtimes, dict) else False
    found = info.get("DiscoveredDevices")
    cdi = (
        any("nvidia.com/gpu" in str(device) for device in found)
        if isinstance(found, list)
        else False
    )
    output = seen.output("nvidia-ctk")
    version = first_line(output.out) if output.code == 0 else "nvidia-ctk is not installed"
    ways = [word for word, is_so in (("runtime nvidia", known), ("CDI devices", cdi)) if is_so]
    if ways:
        return Finding("container-toolkit", "ok", f"{version}; the engine has {', '.join(ways)}")
    if output.code == 0:
        # Docker finds the toolkit's hook itself, so this may still work
        text = f"{version}; the engine has no runtime nvidia"
        hint = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
        return Finding("container-toolkit", "warn", text, hint)
    return Finding(
        "container-toolkit",
        "fail",
        f"{version}, and the engine has no runtime nvidia",
        "sudo apt-get install nvidia-container-toolkit"
        " && sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    )


def _info(output: Glimpse) -> dict[str, Any] | None:
    try:
        found = plain.json_of(output.out)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _silence(output: Glimpse, info: dict[str, Any] | None) -> str:
    if output.problem:
        return output.problem
    errors = (info or {}).get("ServerErrors") or []
    words = [str(error) for error in errors] if isinstance(errors, list) else []
    words += (output.err + ("" if info else output.out)).strip().splitlines()
    return f"docker info: {words[0][:160] if words else 'no server'}"


def _why_not(output: Glimpse) -> str:
    return (
        output.problem
        or first_line(output.err + output.out)
        or f"failed with exit code {output.code}"
    )


PROBES = (engine,)
