"""Findings of doctor, one for each check, and the list of all checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "note", "warn", "fail"]
STATES: tuple[State, ...] = ("ok", "note", "warn", "fail")
"""``fail``: the target cannot be built or served; ``warn``: it may fail; ``note``: there is nothing
to do, or nothing to judge."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    """Of the check, a key of ``CHECKS``."""
    state: State
    seen: str
    remedy: str = ""
    """The hint, often a command; "" if there is no problem."""

    def as_json(self) -> dict[str, str]:
        """Return it as JSON values."""
        check = CHECKS[self.name]
        return {**asdict(self), "theme": check.theme, "why": check.why}


@dataclass(frozen=True)
class Check:
    """Description of a check."""

    theme: str
    what: str
    """Its readings."""
    worse: str
    """Conditions of a warning or failure."""
    why: str
    """Reason of the check."""


def _checks(theme: str, rows: Mapping[str, tuple[str, str, str]]) -> dict[str, Check]:
    return {name: Check(theme, *row) for name, row in rows.items()}


CHECKS: Mapping[str, Check] = {
    **_checks(
        "machine",
        {
            "architecture": (
                "processor architecture of the kernel",
                "fail: not one of the target's platforms",
                "an image is built and served on its own platform; wheels are built anywhere",
            ),
            "instructions": (
                "CPU flags, for a target that runs on a CPU",
                "fail: vLLM has no kernels for them",
                "they decide which vLLM extension is loaded, and whether it has its own MXFP4"
                " experts (AMX)",
            ),
            "system": (
                "os-release, dgx-release, kernel",
                "",
                "a fault report depends on the DGX OS release and the kernel",
            ),
            "firmware": (
                "DMI names of machine and firmware",
                "",
                "reports of power and clock faults name it; only NVIDIA knows which versions are"
                " good",
            ),
            "page-size": (
                "size of a memory page",
                "warn: not 4 KiB",
                "only 4 KiB was tested; programs built for 4 KiB may not run with 64 KiB",
            ),
            "python": (
                "versions of Python: build.py's own, and the target's",
                "",
                "a virtual environment needs the Python that the wheels are locked for; uv"
                " downloads it if missing",
            ),
            "git": (
                "git --version",
                "fail: missing; warn: older than 2.34",
                "sources and series are git commits",
            ),
            "compiler": (
                "g++ --version, for a target whose build compiles FlashInfer's modules",
                "fail: missing",
                "it compiles their host code (docs/packs.md)",
            ),
            "proxies": (
                "proxy variables, SSL_CERT_FILE",
                "warn: a proxy, and no NO_PROXY for loopback",
                "clients on this machine must reach the server without the proxy; a proxy with"
                " its own certificates needs --ca-bundle",
            ),
        },
    ),
    **_checks(
        "gpu",
        {
            "gpu": (
                "nvidia-smi: name and compute capability",
                "fail: it is needed but does not answer, or no GPU has the target's capability",
                "kernels are compiled for one capability and do not load on another",
            ),
            "driver": (
                "driver version and the newest CUDA that it supports",
                "fail: older than the target's CUDA",
                "a container includes CUDA, but not the driver",
            ),
            "devices": (
                "/dev/nvidia0, nvidiactl, nvidia-uvm",
                "warn: one is missing",
                "without nvidia-uvm the first CUDA call fails, though nvidia-smi works",
            ),
            "gpu-memory": (
                "memory that nvidia-smi reports, and its processes",
                "warn: processes use some",
                "a Spark reports none (N/A): GPU and host share memory, so the kernel's numbers"
                " count (see memory)",
            ),
            "clocks": (
                "SM clock, its maximum, load, reasons for throttling",
                "fail: below 900 MHz under load; warn: throttled by power or heat",
                "reports say that after a power fault a Spark stays at 500 to 850 MHz: it works,"
                " but several times too slowly",
            ),
        },
    ),
    **_checks(
        "memory",
        {
            "memory": (
                "MemTotal, MemAvailable and what CUDA counts",
                "fail: less than the profile needs",
                "the server does not start with less (docs/serving.md, share of memory)",
            ),
            "page-cache": (
                "MemFree and Cached",
                "warn: enough is available, but in cached pages",
                "reports say that CUDA on unified memory fails (NV_ERR_NO_MEMORY) before the"
                " kernel frees cached pages",
            ),
            "swap": (
                "SwapTotal and SwapFree",
                "warn: more than 1 GiB is swapped out",
                "a machine that swaps while a model fills the same memory stops responding",
            ),
        },
    ),
    **_checks(
        "disk",
        {
            "store": (
                "free space and permissions of the store",
                "fail: not writable, or less than 2 GiB free; warn: less than the target needs",
                "it contains downloads, wheels and environments",
            ),
            "model": (
                "files of the pinned revision: index, every shard in it, each shard's header",
                "fail: a shard is missing or truncated; warn: not here yet, not where Compose"
                " looks, or an unfinished download",
                "a truncated shard fails after minutes of loading; a missing one is downloaded"
                " at the first start",
            ),
            "model-rights": (
                "permissions of user 10001 in the folder of SPARKFORGE_HF_CACHE, including ACLs",
                "fail: missing, or a file of the model is not readable; warn: not writable, and"
                " HF_HUB_OFFLINE is not set",
                "the container runs as that user: it reads at each start and writes when it"
                " downloads",
            ),
            "model-disk": (
                "free space where the model will be stored",
                "fail: less than the model needs",
                "a download that fills the disk stops the server at every start",
            ),
        },
    ),
    **_checks(
        "engine",
        {
            "docker-socket": (
                "the engine's socket and its permissions",
                "fail: no permission",
                "without it every docker command fails",
            ),
            "engine": (
                "docker info",
                "fail: the target needs one but none answers, or it is older than 25",
                "it builds and runs the image",
            ),
            "buildx": ("docker buildx version", "fail: missing", "it builds the image"),
            "compose": (
                "docker compose version",
                "warn: missing, or older than 2.20",
                "docker compose up serves the image",
            ),
            "container-toolkit": (
                "nvidia-ctk, the engine's runtimes and CDI devices",
                "fail: the engine cannot give a container the GPU",
                "without it docker compose up fails: could not select device driver nvidia",
            ),
            "profile": (
                "SPARKFORGE_PROFILE",
                "fail: no such profile",
                "the server does not start with it (docs/serving.md, exact, balanced, fast)",
            ),
            "port": (
                "listeners on SPARKFORGE_PORT",
                "warn: in use",
                "the server cannot use a port that another program uses",
            ),
        },
    ),
    **_checks(
        "cluster",
        {
            "interface": (
                "the interface between the two machines: state, speed, address (--cluster)",
                "fail: missing, down, or without the address in .env; warn: below 200 Gbit/s",
                "all traffic between the two machines uses it",
            ),
            "mtu": (
                "MTU on both sides, and whether a packet of that size arrives",
                "fail: they differ, or such packets are lost; warn: below 9000",
                "lost large packets look like a hang; a small MTU costs speed",
            ),
            "rdma": (
                "RDMA devices, their ports and GID tables",
                "fail: no active device on the interface with a RoCE v2 GID of the address",
                "without it NCCL uses TCP, or fails",
            ),
            "rdma-kernel": (
                "kernel and its command line",
                "warn: 7.0.0-1019 without kho=off",
                "reports say that this kernel cannot register large RDMA buffers",
            ),
            "nccl": (
                "NCCL_* and GLOO_* of .env and environment",
                "warn: another interface or GID than the one above, or RoCE off",
                "they override what the image would choose",
            ),
            "peer": (
                "whether the doctor on the other machine answers over TCP",
                "fail: no answer",
                "the two servers connect in the same way",
            ),
            "same-image": (
                "digest and release of the image on both",
                "fail: they differ",
                "two versions of vLLM cannot talk to each other",
            ),
            "same-model": (
                "the pinned revision on both",
                "fail: they differ",
                "halves of different weights give wrong answers",
            ),
            "same-driver": (
                "driver and kernel on both",
                "warn: they differ",
                "no report of such a pair is known",
            ),
            "time": (
                "the two clocks (measured by the worker's doctor)",
                "warn: more than 1 s apart",
                "logs of both machines are compared by time",
            ),
        },
    ),
    **_checks(
        "doctor",
        {
            "doctor": (
                "doctor itself",
                "warn: a reading timed out, or its check failed",
                "an unchecked part may still be wrong",
            )
        },
    ),
}
