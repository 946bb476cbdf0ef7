"""Checks of machine, memory, GPU, container engine, disks, model, and the settings of Compose.

No GB10 was available. Public reports show nvidia-smi's memory as N/A, and the clocks of a machine
after a power fault. So every value may be missing, which is never a fault by itself.
"""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

from sparkforge.build import receipt
from sparkforge.build.composing import MODELS_VOLUME
from sparkforge.check.doctor.machine import (
    CHECKS,
    Finding,
    Machine,
    Need,
    Want,
    check,
    error,
    ok,
    unseen,
    warning,
)
from sparkforge.pins.pins import ModelPin
from sparkforge.runtime import isa
from sparkforge.runtime.engine import OLDEST_ENGINE
from sparkforge.serving import devices, memory
from sparkforge.serving.cluster import ROLE

_GB = 10**9
_LEAST = 2 * _GB  # on each disk
# Reports of Sparks after a power fault: permanently 500 to 850 of 3003 MHz at full load, without a
# reason for a slow-down (eugr/spark-vllm-docker 255, 334; NVIDIA/dgx-spark-playbooks 97, 116).
_STUCK_MHZ = 900
_SLOWED = r"clocks_(?:event|throttle)_reason_(hw_(?:\w+_)?slowdown|sw_thermal_slowdown)"
_SMI = ("nvidia-smi", "-q", "-x")
_APT = "sudo apt-get install"
# of OpenAI's safetensors files; docs/kernels.md computes the same from the shapes
_MODEL_GB = {"gpt-oss-120b": 65.2, "gpt-oss-20b": 13.8}
_USER = 10001  # user and group of the image (Dockerfile)
_FREE = (
    "python3 build.py clean --superseded; docker builder prune; or on a larger disk:"
    " SPARKFORGE_STORE (store), SPARKFORGE_HF_CACHE (model), Docker's data-root (image)"
)


def _numbers(text: str) -> tuple[int, int]:
    """Return the first version in a text, of two numbers; (0, 0) for none."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@check()
def machine(seen: Machine, want: Want) -> Finding:
    """An image is built and served on its own platform; wheels are built anywhere."""
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)', seen.text("/etc/os-release"), re.MULTILINE)
    text = f"{seen.platform}, {release[1] if release else 'unknown system'}"
    if seen.platform in want.target.platforms:
        return ok(text)
    hint = f"python3 build.py --target {want.name} --until wheels   # or use another machine"
    return error(f"{text}; target {want.name} is for {', '.join(want.target.platforms)}", hint)


@check()
def instructions(seen: Machine, want: Want) -> Finding | None:
    """vLLM's CPU wheel for x86-64 has no kernels for less than AVX2."""
    if want.target.cuda_arch or seen.platform != "linux/amd64":
        return None
    best = isa.best(seen.text("/proc/cpuinfo"))
    return ok(best) if best else error("no AVX2 in /proc/cpuinfo", "use a machine with AVX2")


def _program(
    name: str, command: str, hint: str, *needs: Need, least: tuple[int, int] = (0, 0)
) -> None:
    """Add a check of a program by the version that it prints."""
    words = command.split()

    def read(seen: Machine, want: Want) -> Finding:
        output, line = seen.run(*words), seen.first_line(*words)
        if output.code != 0:
            return error(line, hint)
        if _numbers(output.out) < least:
            return error(f"{line}: older than {least[0]}.{least[1]}", hint)
        return ok(line)

    CHECKS[name] = needs, read


_program("git", "git --version", f"{_APT} git", least=(2, 34))
# for the host code of FlashInfer's modules (docs/build.md)
_program("compiler", "g++ --version", f"{_APT} g++; or --pack none", "platform", "pack")
_program(
    "engine",
    "docker version --format {{.Server.Version}}",
    # members of the group have root rights
    "permission denied: sudo usermod -aG docker $USER && newgrp docker; not running: sudo systemctl"
    " start docker; missing or old: curl -fsSL https://get.docker.com | sudo sh",
    *("platform", "image"),
    least=(OLDEST_ENGINE, 0),
)
_program("buildx", "docker buildx version", f"{_APT} docker-buildx-plugin", "platform", "image")
_program(  # Compose's health check needs 2.20 (tested with 2.26.1)
    *("compose", "docker compose version --short", f"{_APT} docker-compose-plugin"),
    *("platform", "image"),
    least=(2, 20),
)


@check("platform")
def memory_(seen: Machine, want: Want) -> Finding:
    """The server does not start with less than the profile needs (docs/serving.md)."""
    have = memory.meminfo(seen.text("/proc/meminfo"))
    if not have.get("MemTotal") or "MemAvailable" not in have:
        return unseen("/proc/meminfo has no memory information")
    reading = memory.Reading(have["MemTotal"], have["MemAvailable"])
    # as in the image: vLLM multiplies what CUDA counts, which need not be MemTotal
    cuda_total = seen.value("unified memory", devices.unified_bytes)
    text = memory.described(reading, cuda_total)
    if (plan := want.profile.memory) is None:
        return ok(text)
    machines = 2 if seen.variables.get(ROLE) else 1
    try:
        share = memory.utilisation(plan, reading, cuda_total, machines)
    except memory.MemoryShortError:
        text += f"; {plan.keep_free_gib} are kept free, and the model needs"
        text += f" {plan.least_gib / machines:g}"
        return error(text, "ps aux --sort=-rss | head; docker ps   # then stop what uses memory")
    return ok(f"{text}; vLLM would be given {share:.2f} of all")


def _smi(seen: Machine) -> ET.Element | None:
    """Return the output of nvidia-smi; None if it is missing or fails, which `gpu` reports."""
    output = seen.run(*_SMI)
    try:
        return ET.fromstring(output.out) if output.code == 0 else None
    except ET.ParseError:
        return None


@check("platform", "gpu")
def gpu(seen: Machine, want: Want) -> Finding:
    """Kernels are compiled for one compute capability and do not load on another."""
    tree = _smi(seen)
    if tree is None or tree.find("gpu") is None:
        hint = "nvidia-smi; sudo dmesg | grep -iE 'nvrm|xid' | tail"
        hint += "   # not installed: sudo apt-get install nvidia-driver-580-open"
        return error(f"nvidia-smi shows no GPU: {seen.first_line(*_SMI)}", hint)
    names = ", ".join(node.findtext("product_name", "unnamed") for node in tree.iter("gpu"))
    rows = seen.run("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").out.split()
    found = {row for row in rows if re.fullmatch(r"\d+\.\d+", row)}
    text = f"{names}; compute capability {', '.join(sorted(found)) or 'unknown'}"
    if want.target.cuda_arch in found:
        return ok(text)
    text += f"; target {want.name} is for {want.target.cuda_arch}"
    return error(text, "grep -n cuda_arch pins.yaml   # another target?") if found else unseen(text)


@check("platform", "gpu")
def driver(seen: Machine, want: Want) -> Finding | None:
    """A container includes CUDA, but not the driver."""
    if (tree := _smi(seen)) is None:
        return None
    # uv's name for a build of PyTorch: cu130 is CUDA 13.0
    needed = re.sub(r"cu(\d+)(\d)", r"\1.\2", want.target.torch_backend or "")
    text = f"{tree.findtext('driver_version')}, CUDA {tree.findtext('cuda_version')}"
    cuda = _numbers(tree.findtext("cuda_version", ""))
    if cuda >= _numbers(needed):
        return ok(text)
    hint = "sudo apt-get update && sudo apt-get full-upgrade   # CUDA 13.0: driver 580"
    return error(f"{text}; the target's CUDA is {needed}", hint) if any(cuda) else unseen(text)


@check("platform", "gpu")
def clocks(seen: Machine, want: Want) -> Finding | None:
    """After a power fault a Spark may stay at 500 to 850 MHz, and is several times slower."""
    tree = _smi(seen)
    if tree is None or (node := tree.find("gpu")) is None:
        return None
    paths = ("clocks/sm_clock", "max_clocks/sm_clock", "utilization/gpu_util")
    now, most, load = (node.findtext(path, "unknown").strip() for path in paths)
    text = f"SM {now}, at most {most}, load {load}"
    mhz, percent = re.match(r"\d+", now), re.match(r"\d+", load)
    busy = percent is not None and int(percent[0]) >= 50
    if busy and mhz and int(mhz[0]) < _STUCK_MHZ:
        hint = "shut down, unplug for a minute, start again   # reports: only this fixes it"
        return error(f"{text}: stuck", hint)
    reasons = {one.tag for one in node.iter() if (one.text or "").strip() == "Active"}
    if slowed := re.findall(_SLOWED, " ".join(sorted(reasons))):
        look = "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE"
        return warning(f"{text}; throttled by {', '.join(slowed)}", look)
    return ok(text) if busy else unseen(f"{text}; run doctor while it serves")


def _info(seen: Machine) -> dict[str, object]:
    """Return `docker info`; {} if it is unusable, which `engine` reports."""
    try:
        return dict(json.loads(seen.run("docker", "info", "--format", "{{json .}}").out))
    except (ValueError, TypeError):
        return {}


@check("platform", "image", "gpu")
def container_toolkit(seen: Machine, want: Want) -> Finding:
    """Without it, docker compose up fails: could not select device driver nvidia."""
    if "nvidia" in f"{_info(seen).get('Runtimes')} {_info(seen).get('DiscoveredDevices')}":
        return ok("nvidia is among the engine's runtimes or devices")
    hint = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    if seen.run("nvidia-ctk", "--version").code != 0:
        return error("not installed", f"{_APT} nvidia-container-toolkit && {hint}")
    # Docker finds the toolkit's hook itself, so this may still work
    return warning("the engine has no runtime nvidia", hint)


@check()
def store(seen: Machine, want: Want) -> Finding:
    """It has downloads, wheels and environments."""
    if seen.access(seen.store) in ("write", "new"):
        return ok(f"{seen.store} is writable")
    hint = f"ls -ld {seen.store}; or SPARKFORGE_STORE=/another/folder"
    return error(f"{seen.store} is not writable", hint)


@check()
def disk(seen: Machine, want: Want) -> list[Finding]:
    """Store, image and model often share one disk, so their needs are added up for each disk."""
    here = seen.platform in want.target.platforms  # elsewhere only wheels are built
    built = seen.access(seen.root / "dist" / want.name / receipt.NAME) in ("read", "write")
    docker = str(_info(seen).get("DockerRootDir") or "/var/lib/docker")
    # measured after a first build for cpu, an estimate with CUDA
    needs = [("store", seen.store, 2 if built else 30 if want.target.cuda_arch else 5)]
    if here and want.target.base is not None and not built:
        needs.append(("image", docker, 35))  # with the build cache; an estimate
    if here and want.model is not None:
        size = round(_MODEL_GB.get(str(want.target.model), 0))
        if not _there(seen, want.model):
            needs.append(("model", mounted(seen) or docker, size))
    findings: list[Finding] = []
    disks: dict[tuple[int, int], list[tuple[str, str, int]]] = {}
    for need in needs:
        if (found := seen.disk(need[1])) is None:
            findings.append(unseen(f"{need[1]} is not readable", "df -h"))
        else:
            disks.setdefault(found, []).append(need)
    for (_, free), on_it in disks.items():
        whole = sum(size for *_, size in on_it)
        parts = ", ".join(f"{name} {size}" for name, _, size in on_it)
        text = f"{on_it[0][1]}: {free / _GB:.0f} GB free, needs {whole} ({parts})"
        short = error if free < _LEAST else warning
        findings.append(ok(text) if free >= whole * _GB else short(text, _FREE))
    return findings


@check()
def port(seen: Machine, want: Want) -> Finding:
    """The server cannot use a port that another program uses."""
    text = seen.variables.get("SPARKFORGE_PORT") or "8000"
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        return error(f"SPARKFORGE_PORT is {text!r}", "SPARKFORGE_PORT=8000")
    # listeners have the state 0A
    row = rf"^\s*\d+: [0-9A-F]+:{int(text):04X} [0-9A-F]+:[0-9A-F]{{4}} 0A "
    tables = f"{seen.text('/proc/net/tcp')}\n{seen.text('/proc/net/tcp6')}"
    if not re.search(row, tables, re.MULTILINE):
        return ok(f"{text} is free")
    hint = f"ss -ltnp 'sport = :{text}'; or another: echo SPARKFORGE_PORT=8001 >>.env"
    return warning(f"{text} is in use, perhaps by the server itself", hint)


# -- the model ---------------------------------------------------------------------------


def mounted(seen: Machine) -> str:
    """Return the folder that Compose mounts as the hub's home; "" for a volume (no slash)."""
    chosen = seen.variables.get("SPARKFORGE_HF_CACHE") or ""
    return str(Path(chosen).expanduser()) if chosen.startswith(("/", ".", "~")) else ""


def _there(seen: Machine, model: ModelPin) -> bool:
    """Return whether the model is in a folder of the host; only root sees what a volume has."""
    name = f"models--{model.repository.replace('/', '--')}"
    snapshot = f"{mounted(seen)}/hub/{name}/snapshots/{model.revision}"
    return bool(mounted(seen)) and seen.access(snapshot) in ("read", "write")


@check("model")
def model(seen: Machine, want: Want) -> Finding:
    """A missing model is downloaded at the first start; every start checks its files."""
    assert want.model is not None  # the check needs one
    folder, revision = mounted(seen), want.model.revision[:12]
    if _there(seen, want.model):
        return ok(f"revision {revision} is in {folder}")
    text = f"Compose downloads {_MODEL_GB.get(str(want.target.model), 'some')} GB into"
    text += f" {folder or f'its volume {MODELS_VOLUME}'} at the first start"
    text += "" if folder else ", unless it has them"
    return warning(text, f"python3 build.py model fetch --target {want.name}   # after the build")


@check("model", "image")
def model_rights(seen: Machine, want: Want) -> Finding | None:
    """The container runs as user 10001: it reads at each start and writes when it downloads."""
    if not (folder := mounted(seen)):
        return None
    quoted = shlex.quote(folder)
    # for new files, too, and the owner keeps access
    share = f"setfacl -R -m u:{_USER}:rwX,d:u:{_USER}:rwX,d:u:$(id -u):rwX {quoted}"
    if seen.access(folder) not in ("read", "write"):
        return error(f"{folder} does not exist", f"mkdir -p {quoted} && {share}")
    # user:10001:rwx, if need be with its effective rights; else the last line: other::r-x
    output = seen.run("getfacl", "-n", folder).out
    who = "" if f"# owner: {_USER}\n" in output else _USER
    rights = re.search(rf"(?m)^(?:user:{who}|other:):(?:.*effective:)?([r-][w-][x-])", output)
    if rights is None:
        return unseen(f"getfacl tells nothing of {folder}", "sudo apt-get install acl")
    if rights[1] == "rwx":
        return ok(f"user {_USER} of the container may use {folder}")
    short = warning if rights[1] == "r-x" else error  # a complete model is only read
    return short(f"user {_USER} of the container has only {rights[1]} in {folder}", share)


# -- all checks --------------------------------------------------------------------------


def judge(seen: Machine, want: Want) -> list[Finding]:
    """Run all checks that concern the target; one that fails is a finding."""
    needs = {
        "gpu": want.target.cuda_arch is not None,
        "pack": bool(want.target.pack),
        "image": want.target.base is not None,
        "model": want.model is not None,
    }
    platforms = " or ".join(want.target.platforms)
    findings: list[Finding] = []
    for name, (needed, run_it) in CHECKS.items():
        if not all(needs.get(need, True) for need in needed):
            continue
        found: Finding | list[Finding] | None
        try:
            found = unseen(f"this machine is {seen.platform}; run doctor on {platforms}")
            if "platform" not in needed or seen.platform in want.target.platforms:
                found = run_it(seen, want)
        except Exception as why:  # a machine may report anything: the other checks still count
            text = f"the check failed: {type(why).__name__}: {why}"
            found = unseen(text, "build.py doctor --report   # and attach it to an issue")
        listed = found if isinstance(found, list) else [found]
        findings += [replace(each, name=name) for each in listed if each is not None]
    return findings
