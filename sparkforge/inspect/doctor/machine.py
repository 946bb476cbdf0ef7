"""Probes of the machine and its software, and of memory: readings → findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sparkforge.inspect.doctor.finding import Finding
from sparkforge.inspect.doctor.reading import Readings, first_line
from sparkforge.inspect.doctor.wanted import Wanted
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import isa
from sparkforge.serving import memory

_GIB = 1 << 30
_OLDEST_GIT = (2, 34)
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def architecture(seen: Readings, want: Wanted) -> Iterator[Finding]:
    machine = seen.facts.get("machine", "unknown")
    here = MACHINES.get(machine)
    if here in want.platforms:
        yield Finding("architecture", "ok", f"{machine}, {here}")
        return
    yield Finding(
        "architecture",
        "fail",
        f"{machine}; target {want.target} is for {', '.join(want.platforms)}",
        f"python3 build.py doctor --target {want.target}   # run it there; to build the wheels"
        f" here: build.py --target {want.target} --until wheelhouse",
    )


# selected by vLLM 0.33.0 for an instruction set: its extension (platforms/cpu.py, import_kernels),
# and the kernels of experts in BF16 (fused_moe/experts/cpu_moe.py)
_EXTENSION: Mapping[str, str] = {
    "amx": "_C",
    "avx512_bf16": "_C",
    "avx512": "_C_AVX512",
    "avx2": "_C_AVX2",
    "neon": "_C",
}
_KERNELS: Mapping[str, str] = {"amx": "AMX", "neon": "NEON"}


def instructions(seen: Readings, want: Wanted) -> Iterator[Finding]:
    if want.gpu:
        return
    arm = MACHINES.get(seen.facts.get("machine", "")) == "linux/arm64"
    best = "neon" if arm else isa.best(seen.text("/proc/cpuinfo"))
    if best is None:
        text = "no AVX2 among the flags of /proc/cpuinfo; vLLM's CPU wheel for x86-64 needs AVX2"
        hint = "use a machine with AVX2; in a virtual machine, give it the host's CPU model"
        yield Finding("instructions", "fail", text, hint)
        return
    native = best == "amx"
    experts = want.moe_backend
    if experts == "bf16_dequant":
        experts += f" (experts in BF16, {_KERNELS.get(best, 'vector')} kernels"
        experts += "; --moe-backend auto keeps them in MXFP4 here)" if native else ")"
    elif experts == "auto":
        experts += " (MXFP4 experts, AMX kernels)" if native else " (no backend for MXFP4 experts)"
    yield Finding(
        "instructions", "ok", f"{best}; vLLM loads {_EXTENSION[best]}, MoE backend {experts}"
    )


def system(seen: Readings, want: Wanted) -> Iterator[Finding]:
    release = _settings(seen.text("/etc/os-release"))
    dgx = _settings(seen.text("/etc/dgx-release"))
    parts = [release.get("PRETTY_NAME", "no /etc/os-release"), f"kernel {seen.facts.get('kernel')}"]
    if dgx:
        words = (
            dgx.get("DGX_PRETTY_NAME") or dgx.get("DGX_NAME", "DGX"),
            dgx.get("DGX_OTA_VERSION") or dgx.get("DGX_SWBUILD_VERSION", ""),
        )
        parts.insert(0, " ".join(word for word in words if word))
    yield Finding("system", "ok", "; ".join(parts))


def firmware(seen: Readings, want: Wanted) -> Iterator[Finding]:
    names = ("sys_vendor", "product_name", "bios_version", "bios_date")
    dmi = [text for name in names if (text := seen.text(f"/sys/class/dmi/id/{name}"))]
    if want.cuda_arch != "12.1":
        yield Finding("firmware", "ok", " ".join(dmi) or "no DMI")
        return
    yield Finding(
        "firmware",
        "note",
        f"{' '.join(dmi) or 'no DMI'}; not judged: no list of good versions",
        "fwupdmgr refresh && fwupdmgr get-updates" if dmi else "",
    )


def page_size(seen: Readings, want: Wanted) -> Iterator[Finding]:
    size = int(seen.facts.get("page_size", "0"))
    if size == 4096:
        yield Finding("page-size", "ok", "4 KiB")
        return
    hint = "boot a kernel with 4 KiB pages (on Ubuntu: without the suffix -64k; uname -r)"
    yield Finding("page-size", "warn", f"{size / 1024:.0f} KiB", hint)


def python(seen: Readings, want: Wanted) -> Iterator[Finding]:
    there = seen.facts.get("pythons", "").split()
    summary = f"{seen.facts.get('python')}; on the PATH: {' '.join(there) or 'no python3.N'}"
    if want.python in there:
        yield Finding("python", "ok", summary)
        return
    how = (
        "its image includes it"
        if want.needs_engine
        else "a virtual environment uses uv's own build"
    )
    yield Finding(
        "python", "note", f"{summary}; target {want.target} is locked for {want.python}: {how}"
    )


def git(seen: Readings, want: Wanted) -> Iterator[Finding]:
    output = seen.output("git")
    version = re.search(r"(\d+)\.(\d+)", output.out)
    install = "sudo apt-get install git"
    if output.code != 0 or version is None:
        yield Finding(
            "git", "fail", output.problem or f"git --version: {first_line(output.out)!r}", install
        )
    elif (int(version[1]), int(version[2])) < _OLDEST_GIT:
        yield Finding("git", "warn", f"{first_line(output.out)}; use 2.34 or newer", install)
    else:
        yield Finding("git", "ok", first_line(output.out))


def compiler(seen: Readings, want: Wanted) -> Iterator[Finding]:
    here = MACHINES.get(seen.facts.get("machine", ""))
    if not want.compiles or here not in want.platforms:  # a PC would need the cross compiler
        return
    output = seen.output("g++")
    if output.code == 0:
        yield Finding("compiler", "ok", first_line(output.out))
        return
    text = output.problem or f"g++ --version: {first_line(output.out)!r}"
    hint = "sudo apt-get install g++; or build with --pack none"
    yield Finding("compiler", "fail", text, hint)


def proxies(seen: Readings, want: Wanted) -> Iterator[Finding]:
    there = {name: seen.variables[name] for name in _PROXIES if seen.variables.get(name)}
    certificates = [name for name in ("SSL_CERT_FILE", "PIP_CERT") if seen.variables.get(name)]
    bundle = f"; {', '.join(certificates)} set" if certificates else ""
    if not there:
        yield Finding("proxies", "ok", f"none{bundle}")
        return
    # a proxy's address may have a password
    masked = {name: re.sub(r"//[^/@\s]*@", "//***@", value) for name, value in there.items()}
    shown = ", ".join(f"{name}={value}" for name, value in masked.items())
    without = seen.variables.get("no_proxy") or seen.variables.get("NO_PROXY") or ""
    if not {"127.0.0.1", "localhost", "*"}.intersection(re.split(r"[,\s]+", without)):
        text = f"{shown}{bundle}; no_proxy does not contain loopback"
        hint = "export no_proxy=127.0.0.1,localhost NO_PROXY=127.0.0.1,localhost"
        yield Finding("proxies", "warn", text, hint)
        return
    hint = "if the proxy has its own certificates: python3 build.py … --ca-bundle FILE"
    yield Finding("proxies", "note", f"{shown}{bundle}", hint)


# -- memory ----------------------------------------------------------------------


def memory_free(seen: Readings, want: Wanted) -> Iterator[Finding]:
    have = memory.meminfo(seen.text("/proc/meminfo"))
    if not {"MemTotal", "MemAvailable"} <= have.keys() or not have["MemTotal"]:
        yield Finding("memory", "note", "/proc/meminfo has no memory information")
        return
    reading = memory.Reading(have["MemTotal"], have["MemAvailable"])
    # the entrypoint uses CUDA, too; a failing driver is a separate finding
    cuda_total = int(seen.facts.get("cuda_total") or 0) or None
    summary = memory.described(reading, cuda_total)
    if want.memory is None:
        yield Finding("memory", "ok", summary)
        return
    try:
        share = memory.utilisation(want.memory, reading, cuda_total)
    except memory.MemoryShortError:
        keep, least = want.memory.keep_free_gib, want.memory.least_gib
        yield Finding(
            "memory",
            "fail",
            f"{summary}; {keep} are kept free, and the model needs {least}",
            "ps aux --sort=-rss | head; docker ps   # then stop what uses memory"
            if reading.total / _GIB >= keep + least
            else "this machine has too little memory: use another, or a smaller model",
        )
        return
    yield Finding("memory", "ok", f"{summary}; vLLM would be given {share:.2f} of all")
    yield from _page_cache(have, want.memory.least_gib)


def _page_cache(have: dict[str, int], least_gib: int) -> Iterator[Finding]:
    free, cached = have.get("MemFree", 0), have.get("Cached", 0)
    summary = f"{free / _GIB:.1f} GiB free, {cached / _GIB:.1f} GiB cached"
    if free >= least_gib * _GIB:
        yield Finding("page-cache", "ok", summary)
        return
    hint = (
        "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches"
        "   # the image drops the model's own pages by itself"
    )
    yield Finding("page-cache", "warn", f"{summary}; the model takes {least_gib} GiB", hint)


def swap(seen: Readings, want: Wanted) -> Iterator[Finding]:
    have = memory.meminfo(seen.text("/proc/meminfo"))
    total, free = have.get("SwapTotal", 0), have.get("SwapFree", 0)
    if not total:
        yield Finding("swap", "ok", "none")
    elif total - free > _GIB:
        text = f"{(total - free) / _GIB:.1f} of {total / _GIB:.1f} GiB used"
        hint = "sudo swapoff -a && sudo swapon -a   # when enough memory is available"
        yield Finding("swap", "warn", text, hint)
    else:
        yield Finding("swap", "ok", f"{total / _GIB:.1f} GiB, little used")


def _settings(text: str) -> dict[str, str]:
    """Return the NAME=value lines of a file such as os-release."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


PROBES = (
    architecture,
    instructions,
    system,
    firmware,
    page_size,
    python,
    git,
    compiler,
    proxies,
    memory_free,
    swap,
)
