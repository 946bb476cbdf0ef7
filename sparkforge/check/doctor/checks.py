"""Checks of machine, memory, GPU, container engine, disks and model.

No GB10 was available. Public reports show nvidia-smi's memory as N/A, and the clocks of a machine
after a power fault. So every value may be missing, which is never a fault by itself.
"""

import json
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from xml.etree import ElementTree as ET

from sparkforge.build import composing, receipt
from sparkforge.core.run import Glimpse, glimpse
from sparkforge.pins.pins import ModelPin, Pins, Target
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import isa
from sparkforge.runtime.engine import OLDEST_ENGINE
from sparkforge.serving import cluster, devices, memory
from sparkforge.serving.cluster import ROLE
from sparkforge.serving.options import SECRET_NAME, StartError
from sparkforge.serving.profile import Profile

_T = TypeVar("_T")
State = Literal["ok", "warning", "error", "not checked"]
"""``error``: the target cannot be built or served; ``warning``: it may fail."""
Need = Literal["", "platform", "gpu", "pack", "image", "model"]
"""A machine of the target's platform; on it, a target with one of these."""


@dataclass(frozen=True)
class Finding:
    """Result of a check; ``hint``: a command, mostly; ``judge`` sets the name."""

    state: State
    seen: str
    hint: str = ""
    name: str = ""


ok, warning = partial(Finding, "ok"), partial(Finding, "warning")
error, unseen = partial(Finding, "error"), partial(Finding, "not checked")


@dataclass(frozen=True)
class Want:
    """The target that a machine is judged for, and its pinned model, or None."""

    name: str
    target: Target
    profile: Profile
    model: ModelPin | None


def want_of(pins: Pins, name: str) -> Want:
    """Return what a target wants; UsageError if there is no such target."""
    target = pins.target(name)
    model = pins.models[target.model] if target.model else None
    return Want(name, target, pins.profile_of(target), model)


class Machine:
    """This machine; ``taken`` has its readings so far, for an archive: JSON values."""

    def __init__(self, root: Path, store: Path) -> None:
        self.root, self.store = root, str(store)
        # some readings are named after these folders
        self.taken: dict[str, Any] = {"root": str(root), "store": str(store)}
        self.variables = self.value("variables", self._variables) or {}
        machine = self.value("machine", platform.machine) or "unknown"
        self.platform = MACHINES.get(machine, machine)

    def _variables(self) -> dict[str, str]:
        """Return the variables that the checks need, none of them a secret."""
        return {
            name: value
            for name, value in composing.seen(self.root / ".env").items()
            if re.match("SPARKFORGE_|NCCL_|GLOO_|HF_|DOCKER_HOST$", name)
            and not re.search(SECRET_NAME, name, re.IGNORECASE)
        }

    def value(self, name: str, read: Callable[[], _T | None]) -> _T | None:
        """Return a reading, taken once; None if it failed."""
        if name not in self.taken:
            self.taken[name] = None
            with suppress(OSError):  # missing or unreadable
                self.taken[name] = read()
        found: _T | None = self.taken[name]
        return found

    def text(self, path: str) -> str:
        """Return a file's text; "" if it is missing or unreadable."""
        return self.value(path, lambda: Path(path).read_text(errors="replace")) or ""

    def run(self, *words: str) -> Glimpse:
        """Return a program's output; it has some seconds."""
        line = f"$ {shlex.join(words)}"
        found = self.value(line, lambda: asdict(glimpse(*words, timeout_s=8.0)))
        return Glimpse(**(found or {"code": None, "problem": f"{words[0]}: cannot be started"}))

    def first_line(self, *words: str) -> str:
        """Return the first line of a program's output, or the reason why it failed."""
        seen = self.run(*words)
        text = seen.out if seen.code == 0 else seen.err + seen.out
        return seen.problem or text.strip().partition("\n")[0][:120] or f"exit code {seen.code}"

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder that this user may know of."""
        return bool(self.value(f"exists {path}", Path(path).exists))

    def disk(self, path: str) -> tuple[int, int] | None:
        """Return the device that a path is on, or would be, and its free bytes."""

        def read() -> tuple[int, int]:
            near = next(one for one in (Path(path), *Path(path).parents) if one.exists())
            return near.stat().st_dev, shutil.disk_usage(near).free

        return self.value(f"disk {path}", read)


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


def machine(seen: Machine, want: Want) -> Finding:
    """An image is built and served on its own platform; wheels are built anywhere."""
    release = re.search(r'(?m)^PRETTY_NAME="?([^"\n]*)', seen.text("/etc/os-release"))
    text = f"{seen.platform}, {release[1] if release else 'unknown system'}"
    if seen.platform not in want.target.platforms:
        hint = f"python3 build.py --target {want.name} --until wheels   # or use another machine"
        return error(f"{text}; target {want.name} is for {', '.join(want.target.platforms)}", hint)
    if want.target.cuda_arch or seen.platform != "linux/amd64":
        return ok(text)
    # vLLM's CPU wheel for x86-64 has no kernels for less than AVX2
    best = isa.best(seen.text("/proc/cpuinfo"))
    return ok(f"{text}, {best}") if best else error(f"{text}, no AVX2", "use one with AVX2")


def _program(command: str, least: str, hint: str, seen: Machine, want: Want) -> Finding:
    words = command.split()
    output, line = seen.run(*words), seen.first_line(*words)
    if output.code != 0:
        return error(line, hint)
    older = _numbers(output.out) < _numbers(least)
    return error(f"{line}: older than {least}", hint) if older else ok(line)


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
    except StartError:
        least = plan.least_gib / machines
        text += f"; {plan.keep_free_gib} are kept free, and the model needs {least:g}"
        return error(text, "ps aux --sort=-rss | head; docker ps   # then stop what uses memory")
    return ok(f"{text}; vLLM would be given {share:.2f} of all")


def _smi(seen: Machine) -> ET.Element | None:
    """Return the output of nvidia-smi; None if it is missing or fails, which `gpu` reports."""
    output = seen.run(*_SMI)
    try:
        return ET.fromstring(output.out) if output.code == 0 else None
    except ET.ParseError:
        return None


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
    return error(text, "give another --target") if found else unseen(text)


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


def container_toolkit(seen: Machine, want: Want) -> Finding:
    """Without it, docker compose up fails: could not select device driver nvidia."""
    if "nvidia" in f"{_info(seen).get('Runtimes')} {_info(seen).get('DiscoveredDevices')}":
        return ok("nvidia is among the engine's runtimes or devices")
    # Docker may find the toolkit's hook itself, so this may still work
    hint = f"{_APT} nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker"
    return warning("the engine has no runtime nvidia", f"{hint} && sudo systemctl restart docker")


def disk(seen: Machine, want: Want) -> list[Finding]:
    """Store, image and model often share one disk, so their needs are added up for each disk."""
    here = seen.platform in want.target.platforms  # elsewhere only wheels are built
    built = seen.exists(f"{seen.root}/dist/{want.name}/{receipt.NAME}")
    docker = str(_info(seen).get("DockerRootDir") or "/var/lib/docker")
    # GB; measured after a first build for cpu, an estimate with CUDA
    needs = [("store", seen.store, 2 if built else 30 if want.target.cuda_arch else 5)]
    if here and want.target.base is not None and not built:
        needs.append(("image", docker, 35))  # with the build cache; an estimate
    if here and want.model is not None and not _there(seen, want.model):
        size = round(_MODEL_GB.get(str(want.target.model), 0))
        needs.append(("model", mounted(seen) or docker, size))
    disks: dict[tuple[int, int] | None, list[tuple[str, str, int]]] = {}
    for need in needs:
        disks.setdefault(seen.disk(need[1]), []).append(need)
    findings = []
    for found, on_it in disks.items():
        if found is None:  # not readable
            continue
        whole, free = sum(size for *_, size in on_it), found[1] / 10**9
        parts = ", ".join(f"{name} {size}" for name, _, size in on_it)
        text = f"{on_it[0][1]}: {free:.0f} GB free, needs {whole} ({parts})"
        short = error if free < 2 else warning
        findings.append(ok(text) if free >= whole else short(text, _FREE))
    return findings


# -- the model ---------------------------------------------------------------------------


def mounted(seen: Machine) -> str:
    """Return the folder that Compose mounts as the hub's home; "" for a volume (no slash)."""
    chosen = seen.variables.get("SPARKFORGE_HF_CACHE") or ""
    return str(Path(chosen).expanduser()) if chosen.startswith(("/", ".", "~")) else ""


def _there(seen: Machine, model: ModelPin) -> bool:
    """Return whether the model is in a folder of the host; only root sees what a volume has."""
    hub = f"{mounted(seen)}/hub/models--{model.repository.replace('/', '--')}"
    return bool(mounted(seen)) and seen.exists(f"{hub}/snapshots/{model.revision}")


def model(seen: Machine, want: Want) -> Finding:
    """A missing model is downloaded at the first start; every start checks its files."""
    assert want.model is not None  # the check needs one
    folder = mounted(seen)
    if _there(seen, want.model):
        return ok(f"revision {want.model.revision[:12]} is in {folder}")
    to = folder or f"its volume {composing.MODELS_VOLUME}, unless it has them,"
    size = _MODEL_GB.get(str(want.target.model), "some")
    text = f"Compose downloads {size} GB into {to} at the first start"
    return warning(text, f"python3 build.py model fetch --target {want.name}   # after the build")


def model_rights(seen: Machine, want: Want) -> Finding | None:
    """The container runs as user 10001: it reads at each start and writes when it downloads."""
    if not (folder := mounted(seen)):
        return None
    quoted = shlex.quote(folder)
    # for new files, too, and the owner keeps access
    share = f"setfacl -R -m u:{_USER}:rwX,d:u:{_USER}:rwX,d:u:$(id -u):rwX {quoted}"
    if not seen.exists(folder):
        return error(f"{folder} does not exist", f"mkdir -p {quoted} && {share}")
    # user:10001:rwx, if need be with its effective rights; else the last line: other::r-x
    output = seen.run("getfacl", "-n", folder).out
    who = "" if f"# owner: {_USER}\n" in output else _USER
    rights = re.search(rf"(?m)^(?:user:{who}|other:):(?:.*effective:)?([r-][w-][x-])", output)
    if rights is None:
        return unseen(f"getfacl tells nothing of {folder}", f"{_APT} acl")
    text = f"user {_USER} of the container has {rights[1]} in {folder}"
    # a complete model is only read
    short = warning if rights[1] == "r-x" else error
    return ok(text) if rights[1] == "rwx" else short(text, share)


def pair(seen: Machine, want: Want) -> list[Finding]:
    """One of two machines needs the network between them, and NCCL (docs/several-sparks.md)."""
    try:
        mine = cluster.settings(seen.variables)
    except StartError as why:
        return [error(str(why))]
    if mine is None:
        return []
    paths = (f"/sys/class/net/{mine.interface}/{name}" for name in ("operstate", "mtu"))
    state, mtu = (seen.text(path).strip() for path in paths)
    text = f"{mine.interface}: {state or 'missing'}, mtu {mtu or 'unknown'}"
    hint = "ip -br address   # and step 1 of docs/several-sparks.md"
    bad = warning(text, hint) if state == "up" else error(text, hint)
    cable = ok(text) if (state, mtu) == ("up", "9000") else bad
    locks = [seen.text(f"{seen.root}/{path}") for path in want.target.requirements.values()]
    nccl = re.search(rf"(?m)^{cluster.NCCL}==([\d.]+)", "".join(locks))
    version, kernel = nccl[1] if nccl else "", seen.value("kernel", platform.release) or "unknown"
    found = cluster.faults(version, kernel, seen.text("/proc/cmdline"))
    text = f"NCCL {version} is locked, kernel {kernel}"
    hint = "docs/several-sparks.md, If one hangs or dies"
    return [cable, warning("; ".join([text, *found]), hint) if found else ok(text)]


# -- all checks --------------------------------------------------------------------------

# members of the group docker have root rights
_ENGINE = (
    "permission denied: sudo usermod -aG docker $USER && newgrp docker; not running: sudo systemctl"
    " start docker; missing or old: curl -fsSL https://get.docker.com | sudo sh"
)
_VERSION, _OLDEST = "docker version --format {{.Server.Version}}", f"{OLDEST_ENGINE}.0"
_PLUGINS = f"{_APT} docker-buildx-plugin docker-compose-plugin"
CHECKS: Mapping[str, tuple[Need, Callable[[Machine, Want], Finding | list[Finding] | None]]] = {
    "machine": ("", machine),
    "git": ("", partial(_program, "git --version", "2.34", f"{_APT} git")),
    # for the host code of FlashInfer's modules (docs/build.md)
    "compiler": ("pack", partial(_program, "g++ --version", "", f"{_APT} g++; or --pack none")),
    "engine": ("image", partial(_program, _VERSION, _OLDEST, _ENGINE)),
    "buildx": ("image", partial(_program, "docker buildx version", "", _PLUGINS)),
    # Compose's health check needs 2.20 (tested with 2.26.1)
    "compose": ("image", partial(_program, "docker compose version --short", "2.20", _PLUGINS)),
    "memory": ("platform", memory_),
    "gpu": ("gpu", gpu),
    "driver": ("gpu", driver),
    "clocks": ("gpu", clocks),
    "container-toolkit": ("gpu", container_toolkit),
    "pair": ("gpu", pair),
    "disk": ("", disk),
    "model": ("model", model),
    "model-rights": ("model", model_rights),
}
"""What each needs, and its function, which returns None where another check reports the fault."""


def judge(seen: Machine, want: Want) -> list[Finding]:
    """Run all checks that concern the target on this machine; one that fails is a finding."""
    there: dict[Need, object] = {
        "platform": True,
        "gpu": want.target.cuda_arch,
        "pack": want.target.pack,
        "image": want.target.base,
        "model": want.model,
    }
    here = seen.platform in want.target.platforms
    findings: list[Finding] = []
    for name, (need, run) in CHECKS.items():
        if need and not (here and there[need]):
            continue
        found: Finding | list[Finding] | None
        try:
            found = run(seen, want)
        except Exception as why:  # a machine may report anything: the other checks still count
            text = f"the check failed: {type(why).__name__}: {why}"
            found = unseen(text, "build.py doctor --report   # and attach it to an issue")
        listed = found if isinstance(found, list) else [found]
        findings += [replace(each, name=name) for each in listed if each is not None]
    return findings
