"""Checks of the machine and its software, of memory, and of the container engine."""

from __future__ import annotations

import os
import re

from sparkforge.check.doctor.check import Found, check, error, ok, unknown, warning
from sparkforge.check.doctor.readings import Machine, first_line, json_of
from sparkforge.check.doctor.wanted import Wanted
from sparkforge.core.errors import SparkforgeError
from sparkforge.runtime import isa
from sparkforge.runtime.engine import check_version
from sparkforge.serving import devices, memory

_GIB = 1 << 30
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_INFO = ("docker", "info", "--format", "{{json .}}")
_INSTALL = "curl -fsSL https://get.docker.com | sudo sh   # or your distribution's packages"
UPGRADE = "sudo apt-get update && sudo apt-get full-upgrade"


@check("machine", alike=("warning", f"{UPGRADE}   # on both"))
def machine(seen: Machine, want: Wanted) -> Found:
    """An image is built and served on its own platform; wheels are built anywhere."""
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)', seen.text("/etc/os-release"), re.MULTILINE)
    text = f"{seen.platform}, {release[1] if release else 'unknown system'}, kernel {seen.kernel}"
    if seen.platform in want.platforms:
        return ok(text)
    hint = f"python3 build.py --target {want.target} --until wheels   # or use another machine"
    return error(f"{text}; target {want.target} is for {', '.join(want.platforms)}", hint)


@check("instructions")
def instructions(seen: Machine, want: Wanted) -> Found:
    """vLLM's CPU wheel for x86-64 has no kernels for less than AVX2."""
    if want.cuda_arch or seen.platform != "linux/amd64":
        return None
    if best := isa.best(seen.text("/proc/cpuinfo")):
        return ok(best)
    hint = "use a machine with AVX2; in a virtual machine, give it the host's CPU model"
    return error("no AVX2 among the flags of /proc/cpuinfo", hint)


@check("page-size")
def page_size(seen: Machine, want: Wanted) -> Found:
    """Only 4 KiB was tested; programs built for 4 KiB may not run with 64 KiB."""
    size = seen.value("page size", int, lambda: os.sysconf("SC_PAGESIZE")) or 0
    hint = "boot a kernel with 4 KiB pages (on Ubuntu: without the suffix -64k; uname -r)"
    return ok("4 KiB") if size == 4096 else warning(f"{size / 1024:.0f} KiB", hint)


@check("git")
def git(seen: Machine, want: Wanted) -> Found:
    """Sources and series are git commits."""
    output = seen.run("git", "--version")
    version = re.search(r"(\d+)\.(\d+)", output.out)
    install = "sudo apt-get install git"
    if output.code != 0 or version is None:
        return error(first_line(output), install)
    if (int(version[1]), int(version[2])) < (2, 34):
        return warning(f"{first_line(output)}; use 2.34 or newer", install)
    return ok(first_line(output))


@check("compiler", "platform")
def compiler(seen: Machine, want: Wanted) -> Found:
    """It compiles the host code of FlashInfer's modules (docs/build.md)."""
    if not want.compiles:
        return None
    output = seen.run("g++", "--version")
    if output.code == 0:
        return ok(first_line(output))
    return error(first_line(output), "sudo apt-get install g++; or build with --pack none")


@check("proxies")
def proxies(seen: Machine, want: Wanted) -> Found:
    """Clients on this machine must reach the server without the proxy."""
    there = {name: seen.variables[name] for name in _PROXIES if seen.variables.get(name)}
    without = seen.variables.get("no_proxy") or seen.variables.get("NO_PROXY") or ""
    # a proxy's address may have a password
    text = ", ".join(f"{n}={re.sub(r'//[^/@]*@', '//***@', v)}" for n, v in there.items())
    if not there or {"127.0.0.1", "localhost", "*"}.intersection(re.split(r"[,\s]+", without)):
        return ok(text or "none")
    hint = "export no_proxy=127.0.0.1,localhost NO_PROXY=127.0.0.1,localhost"
    return warning(f"{text}; no_proxy does not contain loopback", hint)


@check("time")
def time(seen: Machine, want: Wanted) -> Found:
    """Certificates have dates, and logs of two machines are compared by time."""
    output = seen.run("timedatectl", "show", "--property", "NTPSynchronized", "--value")
    if output.code != 0:
        return unknown(first_line(output))
    if output.out.strip() == "yes":
        return ok("synchronised")
    return warning("not synchronised", "sudo timedatectl set-ntp true")


@check("memory", "platform")
def memory_free(seen: Machine, want: Wanted) -> Found:
    """The server does not start with less than the profile needs (docs/serving.md)."""
    have = memory.meminfo(seen.text("/proc/meminfo"))
    if not have.get("MemTotal") or "MemAvailable" not in have:
        return unknown("/proc/meminfo has no memory information")
    reading = memory.Reading(have["MemTotal"], have["MemAvailable"])
    # as in the image: vLLM multiplies what CUDA counts, which need not be MemTotal
    cuda_total = seen.value("unified memory", int, devices.unified_bytes)
    text = memory.described(reading, cuda_total)
    if (plan := want.profile.memory) is None:
        return ok(text)
    machines = 2 if seen.in_pair else 1
    try:
        share = memory.utilisation(plan, reading, cuda_total, machines)
    except memory.MemoryShortError:
        least_gib = plan.least_gib / machines
        text += f"; {plan.keep_free_gib} are kept free, and the model needs {least_gib:g}"
        if reading.total / _GIB < plan.keep_free_gib + least_gib:
            return error(text, "this machine has too little memory: use another")
        return error(text, "ps aux --sort=-rss | head; docker ps   # then stop what uses memory")
    return ok(f"{text}; vLLM would be given {share:.2f} of all")


@check("page-cache", "platform")
def page_cache(seen: Machine, want: Wanted) -> Found:
    """CUDA on unified memory may fail (NV_ERR_NO_MEMORY) before the kernel frees cached pages."""
    have = memory.meminfo(seen.text("/proc/meminfo"))
    if (plan := want.profile.memory) is None or "MemFree" not in have:
        return None
    text = f"{have['MemFree'] / _GIB:.1f} GiB free, {have.get('Cached', 0) / _GIB:.1f} GiB cached"
    if have["MemFree"] >= plan.least_gib * _GIB:
        return ok(text)
    hint = "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches   # the image drops the model's pages"
    return warning(f"{text}; the model takes {plan.least_gib} GiB", hint)


@check("swap", "platform")
def swap(seen: Machine, want: Wanted) -> Found:
    """A machine that swaps while a model fills the same memory stops responding."""
    have = memory.meminfo(seen.text("/proc/meminfo"))
    used = (have.get("SwapTotal", 0) - have.get("SwapFree", 0)) / _GIB
    text = f"{used:.1f} of {have.get('SwapTotal', 0) / _GIB:.1f} GiB used"
    hint = "sudo swapoff -a && sudo swapon -a   # when enough memory is available"
    return ok(text) if used <= 1 else warning(text, hint)


# -- container engine ------------------------------------------------------------


def engine_info(seen: Machine) -> dict[str, object]:
    """Return `docker info`; {} if it is unusable."""
    found = json_of(seen.run(*_INFO))
    return found if isinstance(found, dict) else {}


def engine_socket(seen: Machine) -> str:
    """Return the path of the engine's socket; "" for an engine at another address."""
    host = seen.variables.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    return host.removeprefix("unix://") if host.startswith("unix://") else ""


@check("engine", "platform", "image")
def engine(seen: Machine, want: Wanted) -> Found:
    """It builds and runs the image."""
    path = engine_socket(seen)
    if path and (access := seen.access(path)).exists and not access.writable:
        hint = "sudo usermod -aG docker $USER && newgrp docker   # its members have root rights"
        return error(f"{path}: permission denied", hint)
    output, found = seen.run(*_INFO), engine_info(seen)
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
    found = engine_info(seen)
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
