"""Checks of the container engine, its plugins and its GPU support."""

from __future__ import annotations

import re

from sparkforge.core.errors import SparkforgeError
from sparkforge.inspect.doctor.check import Found, check, error, ok, warning
from sparkforge.inspect.doctor.readings import Machine, first_line, json_of
from sparkforge.inspect.doctor.wanted import Wanted
from sparkforge.runtime.engine import check_version

_INFO = ("docker", "info", "--format", "{{json .}}")
_INSTALL = "curl -fsSL https://get.docker.com | sudo sh   # or your distribution's packages"


def info(seen: Machine) -> dict[str, object]:
    """Return `docker info`; {} if it is unusable."""
    found = json_of(seen.run(*_INFO))
    return found if isinstance(found, dict) else {}


def socket(seen: Machine) -> str:
    """Return the path of the engine's socket; "" for an engine at another address."""
    host = seen.variables.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    return host.removeprefix("unix://") if host.startswith("unix://") else ""


@check("engine", "platform", "image")
def engine(seen: Machine, want: Wanted) -> Found:
    """It builds and runs the image."""
    path = socket(seen)
    if path and (access := seen.access(path)).exists and not access.writable:
        hint = "sudo usermod -aG docker $USER && newgrp docker   # its members have root rights"
        return error(f"{path}: permission denied", hint)
    output, found = seen.run(*_INFO), info(seen)
    if version := str(found.get("ServerVersion") or ""):
        try:
            check_version(version)
        except SparkforgeError as why:
            return error(why.what, _INSTALL)
        return ok(f"Docker Engine {version}")
    errors = found.get("ServerErrors")
    reason = str(errors[0]) if isinstance(errors, list) and errors else first_line(output)
    hint = _INSTALL if "PATH" in output.problem else "sudo systemctl start docker"
    return error(f"docker info: {reason}", hint)


@check("buildx", "platform", "image")
def buildx(seen: Machine, want: Wanted) -> Found:
    """It builds the image."""
    output = seen.run("docker", "buildx", "version")
    if output.code == 0:
        return ok(first_line(output))
    return error(first_line(output), "sudo apt-get install docker-buildx-plugin")


@check("compose", "platform", "image")
def compose(seen: Machine, want: Wanted) -> Found:
    """`docker compose up` serves the image; its health check needs 2.20 (tested with 2.26.1)."""
    output = seen.run("docker", "compose", "version", "--short")
    found = re.search(r"(\d+)\.(\d+)", output.out) if output.code == 0 else None
    if found is not None and (int(found[1]), int(found[2])) >= (2, 20):
        return ok(first_line(output))
    text = first_line(output) if found is None else f"{first_line(output)}: older than 2.20"
    return warning(text, "sudo apt-get install docker-compose-plugin")


@check("container-toolkit", "platform", "image", "gpu")
def toolkit(seen: Machine, want: Wanted) -> Found:
    """Without it, docker compose up fails: could not select device driver nvidia."""
    found = info(seen)
    runtimes, devices = found.get("Runtimes"), found.get("DiscoveredDevices")
    if isinstance(runtimes, dict) and "nvidia" in runtimes:
        return ok("runtime nvidia")
    if isinstance(devices, list) and any("nvidia.com/gpu" in str(device) for device in devices):
        return ok("CDI devices")
    output = seen.run("nvidia-ctk", "--version")
    hint = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    text = f"{first_line(output)}; the engine has no runtime nvidia"
    if output.code == 0:  # Docker finds the toolkit's hook itself, so this may still work
        return warning(text, hint)
    return error(text, f"sudo apt-get install nvidia-container-toolkit && {hint}")
